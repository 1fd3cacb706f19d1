"""Metrics of a run, for example where its time goes.

There is no host sync between two log steps."""
