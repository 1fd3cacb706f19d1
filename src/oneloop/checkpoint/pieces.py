"""What one rank writes of the state: pieces of the tensors, their header, and their copy.

The files have the format of torch.distributed.checkpoint's safetensors storage.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from oneloop.basics.side_copies import SideCopy
from oneloop.checkpoint.ranks import Ranks

Tensors = Mapping[str, Tensor]
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""dtypes that a checkpoint supports, and their names in safetensors"""


@dataclass(frozen=True)
class Piece:
    """One rank's shard of a tensor, and its offset in the global shape."""

    name: str
    tensor: Tensor
    offset: tuple[int, ...]
    steady: bool = False  # whether only updates change it: steps, EMAs, loads


def pieces(
    tensors: Tensors, ranks: Ranks, *, of_rank_0: Collection[str], only_here: Tensors
) -> list[Piece]:
    """Return what this rank writes: its shards, and its share of the unsharded tensors by bytes.
    No communication.

    Args:
        tensors: all tensors, in the same order on all ranks.
        ranks: of the run.
        of_rank_0: names of tensors that may differ between ranks, since a forward changes them;
            rank 0 writes them.
        only_here: tensors that only this rank has.
    """
    mine = []
    load = [0] * ranks.count  # bytes of unsharded tensors, by rank
    for name, tensor in tensors.items():
        steady = name not in of_rank_0

        # Write its shard; under HSDP, only the first replica does.
        if isinstance(tensor, DTensor):
            own = tensor.to_local()
            _, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            coordinate = tensor.device_mesh.get_coordinate() or ()
            placed = zip(tensor.placements, coordinate, strict=True)
            replica = any(placement.is_replicate() and at for placement, at in placed)
            if own.numel() and not replica:
                mine.append(Piece(name, own, tuple(offset), steady))
            continue

        # The rank with the least bytes so far writes an unsharded tensor.
        owner = load.index(min(load)) if steady else 0
        load[owner] += tensor.numel() * tensor.element_size() + 1
        if owner == ranks.rank:
            mine.append(Piece(name, tensor, (0,) * tensor.ndim, steady))
    for name, tensor in only_here.items():
        mine.append(Piece(name, tensor, (0,) * tensor.ndim))
    # keeps every tensor aligned
    return sorted(mine, key=lambda piece: -piece.tensor.element_size())


def header_of(mine: list[Piece]) -> tuple[str, int]:
    """Return the safetensors header of these pieces in order, and the bytes of their data."""
    entries = {}
    sharding = {}
    end = 0  # bytes so far
    for piece in mine:
        start = end
        end += piece.tensor.numel() * piece.tensor.element_size()
        entries[piece.name] = {
            "dtype": NAMES[piece.tensor.dtype],
            "shape": list(piece.tensor.shape),
            "data_offsets": [start, end],
        }
        sharding[piece.name] = {"saved_offsets": list(piece.offset)}
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    return json.dumps({"__metadata__": about, **entries}), end


@torch.no_grad()
def stage(
    mine: list[Piece],
    buffer: Tensor,
    device: torch.device | None = None,
    watched: Sequence[Tensor] = (),
) -> SideCopy | None:
    """Copy the pieces into a buffer.

    Args:
        mine: the pieces.
        buffer: host memory, uint8.
        device: from which a copy to pinned memory overlaps with training. None: wait for the copy
            (host sync).
        watched: tensors that must not change while such a copy is made.

    Returns:
        The copy, if it overlaps. What a forward may change is copied before the device continues.
    """
    views = []
    sources = []
    end = 0  # bytes so far
    for piece in mine:
        start = end
        end += piece.tensor.numel() * piece.tensor.element_size()
        views.append(buffer[start:end].view(piece.tensor.dtype).view(piece.tensor.shape))
        # Metal copies only to addresses that are multiples of four.
        on_mps = piece.tensor.device.type == "mps"
        sources.append(piece.tensor.cpu() if on_mps else piece.tensor)
    if not views:
        return None
    copy: SideCopy | None = None
    try:
        if device is None:
            torch._foreach_copy_(views, sources, non_blocking=True)
        else:
            copy = _side_copy(mine, views, device, watched)
    finally:
        # Wait for the copies from a GPU: the next update changes the tensors (host sync). After an
        # error, the buffer may be unmapped.
        if copy is None and any(source.device.type != "cpu" for source in sources):
            torch.accelerator.synchronize()
    return copy


def _side_copy(
    mine: list[Piece], views: list[Tensor], device: torch.device, watched: Sequence[Tensor]
) -> SideCopy:
    """Begin to copy; the device continues once what a forward may change is copied."""
    sources: dict[bool, list[Tensor]] = {False: [], True: []}
    targets: dict[bool, list[Tensor]] = {False: [], True: []}
    for piece, view in zip(mine, views, strict=True):
        sources[piece.steady].append(piece.tensor)
        targets[piece.steady].append(view)
    SideCopy(device, sources[False], targets[False]).hold()
    return SideCopy(device, sources[True], targets[True], watched=watched)
