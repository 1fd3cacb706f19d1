"""How gradients become updates: optimizers by name, the learning rate, clipping, and bad steps."""
