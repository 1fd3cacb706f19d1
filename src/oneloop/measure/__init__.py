"""Metrics of a run, for example where its time goes; there is no host sync between two log
steps."""
