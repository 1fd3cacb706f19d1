"""What is learned: each task is a plug-in that knows nothing of ranks, devices or accelerators."""
