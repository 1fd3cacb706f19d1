"""Outputs of a frozen model, as a task reads them: one record for each position of each document.

They are in a folder of files, one for each range of documents, each with a checksum at its end.

>>> outputs = FrozenOutputs(np.dtype([("logp", "<f4")]), counts=lengths, content=digest_of(tokens))
>>> outputs.folder = folder                              # a run does so, once they are computed
>>> outputs[3]["logp"]
"""

from bisect import bisect
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import replacing

POSITIONS = 1 << 15
"""positions of a range, approximately: what is computed, stored and repeated as a whole"""

_TOKENS = 8192  # of a forward, at most, unless one document has more
_DIGEST = 16  # bytes of the checksum at the end of a file


class FrozenOutputs:
    """Records of documents in files of fixed offsets, one file per range of documents.

    They cannot be read until they have a folder, except as zeros while the task is only tried.

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
        self.lengths = lengths
        self.content = content
        self.starts = np.append(0, np.cumsum(counts, dtype=np.int64))  # first record of each
        number = (np.cumsum(lengths) - 1) // POSITIONS
        edges = np.append(np.unique(number, return_index=True)[1], len(lengths)).tolist()
        self.ranges = [range(first, stop) for first, stop in pairwise(edges)]
        """the documents of each range; they depend on the lengths alone, so that a range is the
        same on any number of processes"""
        self.folder: Path | None = None  # it has the file of every range
        self.are_placeholders = False  # whether they are zeros without a folder

    def __len__(self) -> int:
        return len(self.lengths)

    def batches(self, number: int) -> list[list[int]]:
        """Return the documents of each forward of a range: of similar lengths.

        They depend on the range alone.
        """
        documents = self.ranges[number]
        lengths = self.lengths[documents.start : documents.stop]
        order = np.argsort(-lengths, kind="stable")
        batches = []
        while len(order):
            count = max(1, _TOKENS // int(lengths[order[0]]))
            batches.append([documents[at] for at in order[:count]])
            order = order[count:]
        return batches

    def positions(self, document: int, number: int) -> slice:
        """Return where the records of a document are among those of its range."""
        start, stop = self.starts[document : document + 2]
        first = self.starts[self.ranges[number].start]
        return slice(int(start - first), int(stop - first))

    def __getitem__(self, document: int) -> NDArray[Any]:
        """Return the records of a document, (records of the document,).

        Raise BadInput if the folder is unknown, and Unavailable if a file is missing or too short.
        """
        if not 0 <= document < len(self):
            raise IndexError(document)
        number = bisect(self.ranges, document, key=lambda documents: documents.start) - 1
        within = self.positions(document, number)
        count = within.stop - within.start
        if self.folder is None:
            if self.are_placeholders:
                return np.zeros(count, self.record)
            raise BadInput(
                "the stored outputs of a reference or a teacher are missing. Start a run "
                "(oneloop launch --config_file single preference, or distil), which computes "
                "them before its first step. A loop of your own calls task.before_run()"
            )

        # Read at the fixed offset of the document in the file of its range.
        file = self.folder / _name(number)
        try:
            offset = within.start * self.record.itemsize
            records = np.fromfile(file, self.record, count, offset=offset)
            if len(records) < count:
                raise OSError("it is shorter than before")
        except OSError as error:
            raise Unavailable(
                f"{file} cannot be read ({error}), which holds outputs of a frozen model; start "
                "again to compute them again"
            ) from error
        return records

    def is_stored(self, number: int, folder: Path) -> bool:
        """Return whether a folder has the file of a range, and its checksum is right."""
        try:
            content = (folder / _name(number)).read_bytes()
        except OSError:
            return False
        return content == _sealed(content[:-_DIGEST], number, folder)

    def write(self, records: NDArray[Any], number: int, folder: Path) -> None:
        """Write the records of a range to a folder, atomically."""
        with replacing(folder / _name(number), shared=True) as draft:
            draft.write_bytes(_sealed(records.tobytes(), number, folder))


def _name(number: int) -> str:
    """Return the name of the file of a range."""
    return f"{number:08d}.bin"


def _sealed(content: bytes, number: int, folder: Path) -> bytes:
    """Return the content of a range with its checksum; that of another range or folder differs."""
    from xxhash import xxh3_128_digest

    return content + xxh3_128_digest(f"{folder.name} {number} ".encode() + content)
