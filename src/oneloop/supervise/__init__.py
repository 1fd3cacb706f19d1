"""A small supervisor process per training process, so that every crash and hang ends with a clear
error."""
