"""What is stored of a teacher for each token that is predicted: its most likely entries.

A record has k entries, their log-probabilities at a temperature, and the logarithm of the sum of
all other probabilities, the tail. A tail at one temperature does not follow from that at another.
"""

import math
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
    stored: NDArray[Any],
    is_target: Tensor,
    vocabulary: int,
) -> dict[str, Tensor]:
    """Return the records at the positions of their targets.

    Args:
        stored: the records of all targets of a batch, in order.
        is_target: (rows, width), on the host.
        vocabulary: its size.

    Returns:
        ``teacher_entry``, int64, (rows, width, k), and ``teacher``, float32, (rows, width, k + 1):
        log-probabilities of the entries and of the tail, without a tail if k is the size of the
        vocabulary. Positions without a target have equal probabilities.
    """
    k = stored.dtype["entry"].shape[0]

    # Places without a target keep these entries and equal probabilities.
    buckets = k + int(k < vocabulary)
    entries = torch.arange(k).repeat(*is_target.shape, 1)
    entries[is_target] = torch.from_numpy(stored["entry"].astype(np.int64))
    values = torch.full((*is_target.shape, buckets), -math.log(buckets))

    # The others get those of their records; the tail, which is the last, only if it is needed.
    tail = stored["tail"][:, None]
    with_tail = np.concatenate(
        [stored["logp"], tail],
        axis=1,
    )
    values[is_target] = torch.from_numpy(with_tail[:, :buckets])
    return {
        "teacher_entry": entries,
        "teacher": values,
    }
