"""oneloop: one training loop on one page, the same model on a laptop, on one GPU or on a cluster.

``from oneloop import fit`` trains from Python; evaluate, predict, export and report follow. Your
own loop takes ``from oneloop import Loader``. Every other part is imported from its own file and
works alone: ``from oneloop.data.order import Order``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneloop.api import evaluate, export, fit, predict, report
    from oneloop.data.loader import Loader

__version__ = "0.1.0"
__all__ = ["Loader", "evaluate", "export", "fit", "predict", "report"]


def __getattr__(name: str) -> Any:
    # These imports also import torch and accelerate.
    if name == "Loader":
        from oneloop.data.loader import Loader

        return Loader
    if name in __all__:
        from oneloop import api

        return getattr(api, name)
    raise AttributeError(f"module 'oneloop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
