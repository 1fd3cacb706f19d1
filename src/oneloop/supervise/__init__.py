"""A small supervisor process per training process: every crash and hang ends with an error."""
