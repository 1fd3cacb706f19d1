"""Sums that are the same bits in any order, so that they depend on no split and no sharding.

A square is cut at fixed places into digits of 30 bits, and digits are added as whole numbers, which does not round
(binned summation: Demmel & Nguyen 2015). Three digits below the largest value are kept: what is cut off a square is
less than 2^-60 of the largest one. The cuts lie at multiples of 30 bits, not at the largest value, so that sums of
parts can be put together later.

>>> norm = exact_norm(tensors)
>>> rows = [digit_rows([part]) for part in parts]        # of ranks, pieces, … in any order
>>> square = square_sum(torch.cat(rows).tolist())
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_HALF = 15  # bits of a digit of a value whose square has digits of 30
_DIGITS = 3
NOTHING = -60
"""number of the first digit where all is zero; below that of any value"""
_ON_CPU, _ELSEWHERE = 1 << 17, 1 << 21
"""elements at once: as many as a cache holds; at most 2^22, whose digits float64 adds without rounding"""


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension in one fixed binary tree, neighbours first. Zeros at the end change nothing.

    Args:
        parts: of shape (n, …).
    """
    while len(parts) > 1:
        if len(parts) % 2:
            parts = torch.cat([parts, torch.zeros_like(parts[:1])])
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def rounded_sum(values: Iterable[float]) -> float:
    """Their sum, rounded once; infinite or NaN where one of them is not finite, or where it is too large."""
    known = [*values]
    try:
        return math.fsum(known)
    except (OverflowError, ValueError):  # of inf - inf
        return sum(known)


def digit_rows(tensors: Iterable[Tensor]) -> Tensor:
    """What the squares of all elements come to, for :func:`square_sum`: shape (pieces, 4), float64. No host sync.

    A row is the number of its first digit, and the sums of three digits. Exact for float32 and less; of float64 the
    square is rounded first, element by element.
    """
    rows = []
    for piece in _pieces(tensors):
        first = _first_digit(piece.detach().abs().max())
        rows.append(torch.cat([first.reshape(1), _digits(piece, first)]))
    return torch.stack(rows) if rows else torch.empty(0, 1 + _DIGITS, dtype=torch.float64)


def square_sum(rows: Sequence[Sequence[float]]) -> float:
    """The sum of the squares that these rows stand for, correctly rounded; NaN where a value was not finite."""
    whole, last = _whole(rows)
    if whole is None:
        return math.nan
    try:
        return math.ldexp(float(whole), 2 * _HALF * last)
    except OverflowError:
        return math.inf


def square_ratio(rows: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The quotient of two such sums; NaN where a value was not finite, or the second is zero."""
    (one, at), (other, there) = _whole(rows), _whole(others)
    if one is None or not other:
        return math.nan
    return math.ldexp(one / other, 2 * _HALF * (at - there)) if one else 0.0


def _whole(rows: Sequence[Sequence[float]]) -> tuple[int | None, int]:
    """The sum as a whole number of its last digit, and that digit's number."""
    if not all(math.isfinite(value) for row in rows for value in row):
        return None, 0
    last = int(max((row[0] for row in rows), default=NOTHING)) - _DIGITS
    whole = 0
    for first, *digits in rows:
        for place, digit in enumerate(digits):
            if (shift := int(first) - 1 - place - last) >= 0:
                whole += int(digit) << (2 * _HALF * shift)
    return whole, last


@torch.no_grad()
def exact_norm(
    whole: Sequence[Tensor], shards: Sequence[Tensor] = (), group: dist.ProcessGroup | None = None
) -> Tensor:
    """L2 norm of all elements together, 0-dim, float64, not finite where one is not. No host sync.

    Args:
        whole: tensors that every rank has.
        shards: this rank's parts of others; every rank must get here, if it has none.
        group: the ranks that have the shards.
    """
    device = next(tensor.device for tensor in (*whole, *shards))
    held = [tensor for tensor in (*whole, *shards) if tensor.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(held, math.inf) if held else []
    largest = torch.stack([zero, *(norm.double() for norm in norms)]).max()
    largest = torch.where(torch.isfinite(largest), largest, math.inf)  # a maximum over ranks may lose a NaN
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    first = _first_digit(largest)
    total = _whole_digits(shards, first)
    if group is not None:
        dist.all_reduce(total, group=group)
    top, middle, low = (total + _whole_digits(whole, first)).double()
    unit = 2.0 ** (-2 * _HALF)
    square = ((low * unit + middle) * unit + top) * unit
    return torch.where(torch.isfinite(largest), square.sqrt() * _power_of_two(_HALF * first), math.inf)


def _whole_digits(tensors: Sequence[Tensor], first: Tensor) -> Tensor:
    """Sums of digits as whole numbers; for 2^33 elements."""
    total = torch.zeros(_DIGITS, dtype=torch.int64, device=first.device)
    for piece in _pieces(tensors):
        total += _digits(piece, first).nan_to_num(0.0, 0.0, 0.0).to(torch.int64)
    return total


def _first_digit(largest: Tensor) -> Tensor:
    """Number of the first digit, float64, 0-dim: the smallest n with |value| < 2^(15 n). What is not finite stays."""
    largest = largest.double()
    number = torch.ceil(torch.frexp(largest).exponent.double() / _HALF).clamp(min=NOTHING + 1)
    return torch.where(torch.isfinite(largest), torch.where(largest > 0, number, NOTHING), largest)


def _digits(piece: Tensor, first: Tensor) -> Tensor:
    """Sums of the first digits of all squares, shape (3,), float64."""
    rest = piece.detach().double() * _power_of_two(-_HALF * first)
    rest.square_()
    sums = []
    for place in range(_DIGITS):
        rest.mul_(2.0 ** (2 * _HALF))
        digit = rest.floor()
        sums.append(digit.sum())
        if place < _DIGITS - 1:
            rest.sub_(digit)
    return torch.stack(sums)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Made of its bits, since a device's ``pow`` may round."""
    whole = exponent.nan_to_num(0.0, 0.0, 0.0).to(torch.int64)
    return ((whole + 1023) << 52).view(torch.float64)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    waiting: list[Tensor] = []
    held = 0
    for tensor in tensors:
        most = _ON_CPU if tensor.device.type == "cpu" else _ELSEWHERE
        for part in tensor.detach().reshape(-1).split(most):
            if not part.numel():
                continue
            waiting.append(part)
            held += part.numel()
            if held >= most:
                yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                waiting, held = [], 0
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
