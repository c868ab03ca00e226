"""What the checkpoints of each model family look like."""
