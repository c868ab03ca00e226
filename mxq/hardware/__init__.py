"""The machine: what is installed and set, what is known to go wrong with it, and how long a step takes on one."""
