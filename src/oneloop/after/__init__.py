"""After training: load the model of a run, or compare two runs."""
