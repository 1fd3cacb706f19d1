"""One page about a run, or about several: self-contained HTML, from the run folders."""
