"""One run: entry, the run folder, and what a resume compares."""
