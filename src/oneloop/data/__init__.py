"""The order of samples, and the loading of batches ahead of time."""
