"""After training: load the model of a run, compare two runs."""
