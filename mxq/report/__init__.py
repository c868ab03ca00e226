"""What a run says, for people: terminal tables, figures."""
