"""Outputs of a frozen model, as a task reads them: one record for each position of each document.

>>> outputs = FrozenOutputs(np.dtype([("logp", "<f4")]), counts=lengths, content=digest_of(tokens))
>>> outputs.attach(folder)                               # a run does so, once they are computed
>>> outputs[3]["logp"]
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from oneloop.basics.exit_codes import BadInput, Unavailable

POSITIONS = 1 << 15
"""positions of a range, approximately: what is computed, stored and repeated as a whole"""

_ZEROS = ContextVar("_ZEROS", default=False)  # whether outputs without a store are zeros


@contextmanager
def placeholder_outputs() -> Iterator[None]:
    """Let outputs without a store be zeros: only to try a task before its outputs exist.

    Enter it around the loading itself, in the process that loads: a data worker that was started
    inside of it would never leave it.
    """
    token = _ZEROS.set(True)
    try:
        yield
    finally:
        _ZEROS.reset(token)


class FrozenOutputs:
    """Records of documents in files of fixed offsets, one file per range of documents.

    They cannot be read until :meth:`attach`, except as zeros in :func:`placeholder_outputs`.

    Args:
        record: what is stored for a position: a structured dtype without objects.
        counts: (documents,), number of records of each document.
        lengths: (documents,), number of tokens of each document.
        content: a digest of all inputs from which the records are computed, in order.
    """

    def __init__(
        self,
        record: np.dtype[Any],
        *,
        counts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        content: str,
    ) -> None:
        self.record = record
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.content = content
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.folder: Path | None = None

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def bytes(self) -> int:
        """Bytes of all records."""
        return int(self.ends[-1]) * self.record.itemsize

    @cached_property
    def edges(self) -> NDArray[np.int64]:
        """First document of each range, and the number of documents: (ranges + 1,).

        They depend on the lengths alone, so that a range is the same on any number of processes.
        """
        number = (np.cumsum(self.lengths) - 1) // POSITIONS
        firsts = np.flatnonzero(np.diff(number, prepend=-1))
        return np.append(firsts, len(self))

    @property
    def ranges(self) -> int:
        """Number of ranges."""
        return len(self.edges) - 1

    def documents(self, number: int) -> range:
        """Return the documents of a range."""
        return range(int(self.edges[number]), int(self.edges[number + 1]))

    def records_of(self, number: int) -> int:
        """Return the number of records of a range."""
        documents = self.documents(number)
        return int(self.ends[documents.stop - 1]) - self._start(documents.start)

    def count(self, document: int) -> int:
        """Return the number of records of a document."""
        return int(self.ends[document]) - self._start(document)

    def attach(self, folder: Path) -> None:
        """Read from the files of this folder, which hold every range and are checked."""
        self.folder = folder

    def __getitem__(self, document: int) -> NDArray[Any]:
        """Return the records of a document, (records of the document,).

        Raise BadInput before :meth:`attach`, and Unavailable if a file is missing or too short.
        """
        if not 0 <= document < len(self):
            raise IndexError(document)
        count = self.count(document)
        if self.folder is None:
            if not _ZEROS.get():
                raise BadInput(
                    "the stored outputs of a reference or a teacher are missing. Start a run "
                    "(oneloop launch --config_file single preference, or distil), which computes "
                    "them before its first step. A loop of your own reads them after attach()"
                )
            return np.zeros(count, self.record)

        # Read at the fixed offset of the document in the file of its range.
        number = int(np.searchsorted(self.edges, document, side="right")) - 1
        first = int(self.edges[number])
        offset = (self._start(document) - self._start(first)) * self.record.itemsize
        file = self.folder / range_name(number)
        try:
            records = np.fromfile(file, self.record, count, offset=offset)
        except OSError as error:
            raise Unavailable(
                f"{file} cannot be read ({error.strerror}), which holds outputs of a frozen model; "
                "start again to compute them again"
            ) from error
        if len(records) < count:
            raise Unavailable(
                f"{file} is shorter than before; start again to compute the outputs of the frozen "
                "model again"
            )
        return records

    def _start(self, document: int) -> int:
        """Return the index of a document's first record."""
        return int(self.ends[document - 1]) if document else 0


def range_name(number: int) -> str:
    """Return the name of the file of a range."""
    return f"{number:08d}.bin"


@dataclass
class FrozenModel:
    """A frozen model whose outputs a task trains with: what a run computes before its first step.

    Args:
        role: the reference, or the teacher; for messages.
        outputs: by name: SPLIT, or SPLIT/SOURCE.
        batch: makes a batch of documents: ``batch(name, documents)``, tensors by name on the host.
        compute: ``compute(model, batch)`` returns an array of records for each document, in order;
            it is called in eval mode, without gradients.
        kind: JSON values that describe what the records are: a part of the key.
        address: where they are stored; None: in the cache of this host.
        build: builds the model; None: it is the policy before its first step.
        content: JSON values that identify the weights; None: a run finds them.
        zero: part of the names of tensors; if all of them are 0, as in fresh adapters, the tensors
            whose names contain ``adds`` change nothing, and do not identify the weights.
        adds: see ``zero``.
    """

    role: str
    outputs: dict[str, FrozenOutputs]
    batch: Callable[[str, Sequence[int]], dict[str, Tensor]]
    compute: Callable[[nn.Module, dict[str, Tensor]], Sequence[NDArray[Any]]]
    kind: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None
    build: Callable[[], nn.Module] | None = None
    content: Any = None
    zero: str = ""
    adds: str = ""

    def __post_init__(self) -> None:
        self.expected: Any = None  # ``content`` in the checkpoint of a run

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds: which weights were frozen, and never the weights."""
        return {"frozen": self.content or self.expected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the frozen weights with those of a checkpoint.

        Raise ValueError if they differ: the run would continue with another frozen model.
        """
        self.expected = state.get("frozen")
        if self.content is not None:
            self.check(self.content)

    def check(self, content: Any) -> None:
        """Raise ValueError if these are not the weights of the checkpoint."""
        if self.expected not in (None, content):
            raise ValueError(
                f"{self.role} of the checkpoint had other weights ({brief(self.expected)}) than "
                f"now ({brief(content)}); restore init.from, task.model or task.teacher, or begin "
                "a new run"
            )


def brief(content: Any) -> str:
    """Return the content of weights as a short text."""
    text = xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    return text[:8]
