"""oneloop: one training loop on one page, the same model on a laptop, on one GPU or on a cluster.

Every part is imported by its own file and works alone: ``from oneloop.data.order import Order``.
"""

__version__ = "0.1.0"
