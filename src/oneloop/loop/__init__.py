"""The objects of ``train.py``: steps, gradients, state, and the rare work between steps."""
