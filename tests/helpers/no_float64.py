"""A run as on Apple's GPUs (MPS), which have no float64; a CPU plays the device.

>>> with without_float64():
...     torch.ones(2).double()  # TypeError

Tensors of the host are on the same CPU. So a function may make float64 only if it is in
:data:`ON_HOST`; what is computed from such tensors alone may be float64, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

import oneloop
from oneloop.api import fit
from oneloop.basics import wide_sums
from oneloop.recipe.parse import read
from worlds import back_to

WIDE = (torch.float64, torch.complex128)

ON_HOST = {
    "basics/wide_sums.py on_host": "copies a tensor to the host first",
    "task_protocol/evaluation_metrics.py named_values": "a number that a metric has computed",
    "tasks/text_regression.py": "float64 metrics stay in host memory",
    "launch/processes.py largest": "numbers that the ranks exchange through the host",
    "loop/steps.py _summed": "sums that the ranks exchange through the host",
}
"""functions (or files) that make float64 in host memory, and why; at most five"""

_SOURCE = str(Path(oneloop.__file__).parent) + "/"


class NoFloat64(TorchDispatchMode):
    """Raises TypeError if an operator makes a float64 tensor outside the functions of ON_HOST."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.rejected: list[str] = []  # messages, also of errors that somebody catches
        self._allowed = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        result = func(*args, **(kwargs or {}))
        made = _wide(result)
        if not made:
            return result
        given = _wide((args, kwargs))
        if not given or not all(one in self._allowed for one in given):
            self._check(func)
        for one in made:
            self._allowed[one] = True
        return result

    def _check(self, func: Any) -> None:
        """Raise TypeError unless a function of ON_HOST is on the stack."""
        frame: Any = sys._getframe(2)
        lines = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(_SOURCE):
                file = code.co_filename.removeprefix(_SOURCE)
                if file in ON_HOST or f"{file} {code.co_name}" in ON_HOST:
                    return
                lines.append(f"{file}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        place = ", ".join(lines) or "code outside oneloop"
        self.rejected.append(f"MPS has no float64: {func} in {place}")
        raise TypeError(self.rejected[-1])


def _wide(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor) and one.dtype in WIDE]


@contextmanager
def without_float64() -> Iterator[NoFloat64]:
    """Let the CPU have no float64 in this context."""
    with patch.object(wide_sums, "NO_FLOAT64", {"mps", "cpu"}), NoFloat64() as mode:
        yield mode


def train_and_resume(words: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Train in the folder ``run`` of the current one without float64, and again from its middle.

    Return the number of operators, and the summaries of both.
    """
    folder = Path("run")
    with without_float64() as mode:
        summaries = [fit(read([*words, "--run.dir", str(folder)]))]
        back_to(folder, 5)
        summaries.append(fit(read([*words, "--run.dir", str(folder)])))
    assert mode.rejected == []
    return mode.operators, summaries
