"""The machine: what is installed and set, and what is known to go wrong with it."""
