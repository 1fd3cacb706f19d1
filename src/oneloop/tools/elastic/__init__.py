"""Several nodes and restarts: the agent of a node, its store, and the checks of nodes."""
