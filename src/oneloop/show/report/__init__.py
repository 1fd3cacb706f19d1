"""One page about a run, or about several: self-contained HTML, from the files in the run
folders."""
