"""How a run is computed: speed and memory; nothing here changes what is trained."""
