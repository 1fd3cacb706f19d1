"""What a recipe is and how it is read: its groups of keys, the packaged ones, the command line."""
