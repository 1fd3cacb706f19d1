"""Where metrics go: files, trackers, bars, the terminal and the report."""
