"""Tasks: what a run trains.

A task is a plug-in that knows nothing about ranks, devices or accelerators.
"""
