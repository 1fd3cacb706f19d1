"""Seeing what a run does, at no cost between two log steps."""
