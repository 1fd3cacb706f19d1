"""State on disk."""
