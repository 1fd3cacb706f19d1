"""``oneloop plan``: what a run needs, and the cheapest change that makes it fit."""
