"""Comparisons that show whether a result depends on more than samples, seeds and weights."""
