"""Rows of people's own files and of the hub, as map-style data sets."""
