"""oneloop: one training loop on one page that trains the same model on a laptop, one GPU or a cluster.

``from oneloop import fit`` trains from Python. Every module also works alone: ``from oneloop.data.order import Order``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneloop.api import fit

__version__ = "0.1.0"
__all__ = ["fit"]


def __getattr__(name: str) -> Any:
    if name == "fit":  # late: it imports torch and accelerate
        from oneloop.api import fit

        return fit
    raise AttributeError(f"module 'oneloop' has no attribute {name!r}")
