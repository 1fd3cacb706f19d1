"""What is stored of a teacher for each token that is predicted: its most likely entries.

A record has k entries, their log-probabilities at a temperature, and the logarithm of the sum of
all other probabilities, the tail. A tail at one temperature does not follow from that at another.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.basics.wide_sums import on_host

_SMALL = 1 << 16  # entries that two bytes can number
_LOGITS = 1 << 24  # that are sorted at once


def record_of(k: int, vocabulary: int) -> np.dtype[Any]:
    """Return the type of a record with k entries."""
    entry = "<u2" if vocabulary <= _SMALL else "<i4"
    return np.dtype(
        [
            ("entry", entry, (k,)),
            ("logp", "<f4", (k,)),
            ("tail", "<f4"),
        ]
    )


@torch.no_grad()
def records(logits: Tensor, record: np.dtype[Any], *, temperature: float) -> NDArray[Any]:
    """Return the record of each token.

    Args:
        logits: (tokens, vocabulary).
        record: of :func:`record_of`.
        temperature: divides the logits.
    """
    k = record["entry"].shape[0]
    made = np.empty(len(logits), record)
    size = max(1, _LOGITS // logits.shape[-1])
    for start in range(0, len(logits), size):
        part = logits[start : start + size]
        wide = torch.promote_types(part.dtype, torch.float32)
        part = part.to(wide) / temperature
        whole = part.logsumexp(-1, keepdim=True)
        chosen, entries = part.topk(k, -1)
        rows = made[start : start + size]
        others = part.scatter(-1, entries, -torch.inf)
        tail = others.logsumexp(-1, keepdim=True)
        rows["entry"] = entries.cpu().numpy()
        rows["logp"] = on_host(chosen - whole).numpy()
        rows["tail"] = on_host(tail - whole).numpy()[:, 0]
    return made


def collated_records(
    rows: Sequence[Sequence[tuple[NDArray[np.int32], NDArray[Any]]]], shape: Any, vocabulary: int
) -> dict[str, Tensor]:
    """Return the records at the positions of their targets.

    Args:
        rows: documents of each row with their records, one for each target.
        shape: of the batch's target, (rows, width).
        vocabulary: its size.

    Returns:
        ``teacher_entry``, int64, (rows, width, k), and ``teacher``, float32, (rows, width, k + 1):
        log-probabilities of the entries and of the tail, without a tail if k is the size of the
        vocabulary. Positions without a target have equal probabilities.
    """
    k = rows[0][0][1].dtype["entry"].shape[0]
    buckets = k + int(k < vocabulary)
    entries = np.zeros((*shape, k), dtype=np.int64)
    entries[:] = np.arange(k)
    values = np.full((*shape, buckets), -np.log(buckets), dtype=np.float32)
    for number, row in enumerate(rows):
        start = 0
        for span, stored in row:
            places = start + np.flatnonzero(span[1:] >= 0)
            entries[number, places] = stored["entry"]
            values[number, places, :k] = stored["logp"]
            if buckets > k:
                values[number, places, k] = stored["tail"]
            start += len(span) - 1
    return {
        "teacher_entry": torch.from_numpy(entries),
        "teacher": torch.from_numpy(values),
    }
