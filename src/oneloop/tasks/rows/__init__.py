"""Rows of the user's own files and of hub data sets, as map-style data sets."""
