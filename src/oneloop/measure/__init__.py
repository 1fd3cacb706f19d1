"""Metrics of a run: what it does and where its time goes, at no cost between two log steps."""
