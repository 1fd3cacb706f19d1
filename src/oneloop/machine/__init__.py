"""How a run is computed: speed and memory, and nothing of what is learned."""
