"""Outputs of a frozen model (a reference, a teacher): computed once, and stored by content."""
