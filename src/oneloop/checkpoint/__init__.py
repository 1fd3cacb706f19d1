"""Checkpoints and weights on disk."""
