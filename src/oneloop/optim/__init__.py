"""How gradients become updates: optimizers by name, the learning rate, clipping, and what is done about bad steps."""
