"""Start the processes of a run: the launcher, accelerate, signals, exit codes."""
