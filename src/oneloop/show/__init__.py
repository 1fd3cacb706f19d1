"""Where figures go: files, trackers, bars, the terminal and the report."""
