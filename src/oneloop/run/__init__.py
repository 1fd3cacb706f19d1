"""One run: entry, steps, counters, rare work, the run folder, export."""
