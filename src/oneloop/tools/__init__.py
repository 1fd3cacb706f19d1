"""Tools: what is not needed to train. Each folder or file here can be deleted."""
