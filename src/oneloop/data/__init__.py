"""Which samples a step sees, and how they reach the device in time."""
