"""Divergences between a teacher's stored distribution and a student's, of each token.

The teacher's distribution has its k most likely entries and one bucket for all others, the tail.
The student's is merged into the same buckets. By the data-processing inequality (Csiszar 1967) each
divergence of the merged distributions is at most that of the whole ones, so that it is a lower
bound. It is exact if k is the size of the vocabulary.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward", "reverse", "js"]


def merged(logits: Tensor, entries: Tensor, *, temperature: float) -> Tensor:
    """Return the student's log-probabilities of the teacher's entries and of the tail.

    Args:
        logits: (…, vocabulary).
        entries: int64, (…, k), without duplicates in a row.
        temperature: of the student.

    Returns:
        (…, k + 1), the tail last; (…, k) if k is the size of the vocabulary, which leaves no tail.
    """
    logits = logits / temperature
    chosen = logits.gather(-1, entries)
    whole = logits.logsumexp(-1, keepdim=True)
    if entries.shape[-1] == logits.shape[-1]:
        return chosen - whole
    # Sum the others directly: 1 minus the sum of the entries would cancel.
    others = logits.scatter(-1, entries, -torch.inf)
    tail = others.logsumexp(-1, keepdim=True)
    buckets = torch.cat([chosen, tail], -1)
    return buckets - whole


def divergence(
    teacher: Tensor, student: Tensor, kind: Divergence, *, weight: float = 0.5
) -> Tensor:
    """Return the divergence of each token, in nats.

    - forward: KL(teacher || student), the sum of ``p (log p - log q)`` (Hinton et al. 2015).
    - reverse: KL(student || teacher).
    - js: the generalized Jensen-Shannon divergence (Agarwal et al. 2024):
      ``w KL(teacher || m) + (1 - w) KL(student || m)`` with ``m = w teacher + (1 - w) student``.

    Args:
        teacher: log-probabilities, (…, buckets).
        student: the same of the student.
        kind: of the divergence.
        weight: w of js, between 0 and 1.
    """
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    rest = 1 - weight
    middle = torch.logaddexp(
        teacher + math.log(weight),
        student + math.log(rest),
    )
    of_teacher = _kl(teacher, middle)
    of_student = _kl(student, middle)
    return weight * of_teacher + rest * of_student


def _kl(of: Tensor, to: Tensor) -> Tensor:
    """Return the sum of ``p (log p - log q)`` over the buckets."""
    # A bucket without probability adds nothing, although its logarithm is infinite.
    empty = of.isneginf()
    apart = torch.where(empty, 0.0, of - to)
    each = of.exp() * apart
    return each.sum(-1)
