"""Output of metrics: files, trackers, progress bars, the terminal and the report."""
