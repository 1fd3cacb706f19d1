"""oneloop: one training loop on one page, the same model on a laptop, on one GPU or on a cluster.

``from oneloop import fit`` trains from Python; evaluate, predict, export and report follow. Your
own loop takes ``from oneloop import Loader``. Every other part is imported from its own file and
works alone: ``from oneloop.data.order import Order``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oneloop.api import fit
    from oneloop.data.loader import Loader
    from oneloop.tools.api import evaluate, export, predict, report

__version__ = "0.1.0"
__all__ = ["Loader", "evaluate", "export", "fit", "predict", "report"]
_HOMES = {"Loader": "oneloop.data.loader", "fit": "oneloop.api"}


def __getattr__(name: str) -> Any:
    # These imports also import torch and accelerate.
    if name not in __all__:
        raise AttributeError(f"module 'oneloop' has no attribute {name!r}")
    if name != "Loader":
        import_module("oneloop.basics.system").check_system()
    return getattr(import_module(_HOMES.get(name, "oneloop.tools.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
