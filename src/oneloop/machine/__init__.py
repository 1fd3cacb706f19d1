"""Memory and speed of the machine: what changes how a model runs, and nothing of what it learns."""
