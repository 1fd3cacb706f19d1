"""``oneloop compare`` and ``verify --same``: what differs between runs."""
