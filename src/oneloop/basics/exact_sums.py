"""Sums that are bit-identical in any order.

They do not depend on parallel layout or sharding. Each square is cut at fixed positions into digits
of 30 bits. Digits are added as integers, which does not round (binned summation: Demmel & Nguyen
2015). Three digits are kept: the rest of a square is below 2^-60 of the largest square. The cuts
are at multiples of 30 bits, not relative to the largest value, so that partial sums can be combined
later.

>>> norm = exact_norm(tensors)
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from oneloop.basics.tensors import on_gpu

_HALF = 15  # bits per digit of a value; its square has digits of 30 bits
_DIGITS = 3
_NOTHING = -60  # index of the first digit if all values are zero; below that of any other value
# Elements per piece. On a CPU, a piece fits into the cache. Nowhere may it have more than 2^22
# elements, of which float64 adds the digits without rounding.
_ON_CPU = 1 << 17
_ELSEWHERE = 1 << 21


def tree_sum(parts: Tensor) -> Tensor:
    """Sum a tensor of shape (n, …) over its first dimension in a fixed binary tree.

    Neighbours are added first. Zeros at the end do not change the result.
    """
    while len(parts) > 1:
        if len(parts) % 2:
            parts = torch.cat([parts, torch.zeros_like(parts[:1])])
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def rounded_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once.

    It is infinite or NaN if a value is not finite, or if the sum overflows.
    """
    known = [*values]
    try:
        return math.fsum(known)
    except (OverflowError, ValueError):  # overflow, or inf - inf
        return sum(known)


@torch.no_grad()
def exact_norm(
    whole: Sequence[Tensor], shards: Sequence[Tensor] = (), group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the L2 norm over all elements, 0-dim, float64. No host sync.

    It is not finite if any element is not.

    Args:
        whole: tensors that are equal on all ranks.
        shards: this rank's shards of other tensors.
        group: process group of the shards. Collective: call on all of its ranks, even without
            shards.
    """
    # Find the largest value, which decides where the digits begin.
    device = next(tensor.device for tensor in (*whole, *shards))
    held = [tensor for tensor in (*whole, *shards) if tensor.numel()]
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(held, math.inf) if held else []
    largest = torch.stack([zero, *(norm.double() for norm in norms)]).max()
    # a maximum over ranks may lose a NaN
    largest = torch.where(torch.isfinite(largest), largest, math.inf)
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)

    # Add the digits of all ranks as integers, in any order.
    first = _first_digit(largest)
    total = _whole_digits(shards, first)
    if group is not None:
        dist.all_reduce(total, group=group)

    # Join the three digits, and scale the root back.
    top, middle, low = (total + _whole_digits(whole, first)).double()
    unit = 2.0 ** (-2 * _HALF)
    square = ((low * unit + middle) * unit + top) * unit
    norm = square.sqrt() * _power_of_two(_HALF * first)
    return torch.where(torch.isfinite(largest), norm, math.inf)


def _whole_digits(tensors: Sequence[Tensor], first: Tensor) -> Tensor:
    """Sum digits as integers, shape (3,), int64; exact for up to 2^33 elements."""
    total = torch.zeros(_DIGITS, dtype=torch.int64, device=first.device)
    for piece in _pieces(tensors):
        total += _digits(piece, first).nan_to_num(0.0, 0.0, 0.0).to(torch.int64)
    return total


def _first_digit(largest: Tensor) -> Tensor:
    """Return the index of the first digit: the least n with |value| < 2^(15 n), or inf or NaN.

    It is 0-dim, float64.
    """
    largest = largest.double()
    number = torch.ceil(torch.frexp(largest).exponent.double() / _HALF).clamp(min=_NOTHING + 1)
    return torch.where(torch.isfinite(largest), torch.where(largest > 0, number, _NOTHING), largest)


def _digits(piece: Tensor, first: Tensor) -> Tensor:
    """Sum the first three digits of all squares, shape (3,), float64."""
    rest = piece.detach().double() * _power_of_two(-_HALF * first)
    rest.square_()
    sums = []
    for index in range(_DIGITS):
        # The next digit is before the point.
        rest.mul_(2.0 ** (2 * _HALF))
        digit = rest.floor()
        sums.append(digit.sum())
        if index < _DIGITS - 1:
            rest.sub_(digit)
    return torch.stack(sums)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent, built from bits, since ``pow`` may round on some devices."""
    whole = exponent.nan_to_num(0.0, 0.0, 0.0).to(torch.int64)
    return ((whole + 1023) << 52).view(torch.float64)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield all elements in flat pieces: large tensors are split, small ones are joined."""
    waiting: list[Tensor] = []
    held = 0  # elements in them
    for tensor in tensors:
        most = _ELSEWHERE
        if tensor.device.type == "cpu" and not on_gpu(tensor):
            most = _ON_CPU
        for part in tensor.detach().reshape(-1).split(most):
            if not part.numel():
                continue
            waiting.append(part)
            held += part.numel()
            if held >= most:
                yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                waiting = []
                held = 0
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
