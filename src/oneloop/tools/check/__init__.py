"""``oneloop check``: read all data before a run."""
