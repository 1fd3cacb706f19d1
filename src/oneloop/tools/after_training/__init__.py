"""After training: load the model of a run, evaluate it, and predict."""
