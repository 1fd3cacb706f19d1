"""From a command line to an exit code: the processes of a run, its job, its folder and its counters."""
