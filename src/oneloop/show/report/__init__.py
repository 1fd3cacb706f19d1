"""One page about a run, or about several: self-contained HTML, from what the run folders hold."""
