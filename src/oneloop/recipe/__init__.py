"""Recipes: groups of keys, packaged recipes, and how files and command lines are read."""
