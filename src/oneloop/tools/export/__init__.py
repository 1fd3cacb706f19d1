"""``oneloop export``: weights in other forms, the model card, and the push to the hub."""
