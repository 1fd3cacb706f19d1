"""The state of a run as named tensors: their layout in a file, and loading at any world size.

The files have the format of torch.distributed.checkpoint's safetensors storage, and its readers
load them. Names are of the unwrapped model: ``model.<name>``, ``optimizer.<parameter>.<key>``,
``ema.<name>.<parameter>``. No pickle.
"""

import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.tensors import as_real, of_shape, optimized
from oneloop.checkpoint.named_checkpoint import base_model_of, base_of
from oneloop.checkpoint.store import header

Tensors = Mapping[str, Tensor]
_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
}
_NAMES |= {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_TYPES = {dtype: name for name, dtype in _NAMES.items()}


def unsavable(model: nn.Module) -> str:
    """Return why a model's state cannot be saved and loaded in place, with the entry's name; empty
    if it can."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state") or not isinstance(tensor, Tensor):
            kind = f"a {type(tensor).__name__} of get_extra_state()"
            return (
                f"{name} is {kind}; only parameters and buffers are saved: register it as a buffer"
            )
        if tensor.dtype not in (*_TYPES, torch.complex64):
            known = ", ".join(str(kind).removeprefix("torch.") for kind in _TYPES)
            return (
                f"{name} has {str(tensor.dtype).removeprefix('torch.')}; a checkpoint supports "
                f"{known}, complex64"
            )
        if any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            return f"{name} is an expanded view, whose elements share memory; copy it with .clone()"
    return ""


def model_tensors(model: nn.Module, *, frozen: bool | None = None) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their first name, not copied. ``frozen`` True
    selects the frozen parameters, False all others, None everything."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"the model's state holds {name}, a {type(tensor).__name__}; only tensors can "
                "be saved"
            )
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if frozen is None or frozen == (
            isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        ):
            tensors[f"model.{bare_name(name)}"] = as_real(tensor.detach())
    return tensors


def optimizer_values(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer state that is not tensors: per parameter, and group entries beyond the
    constructor's."""
    states = {
        name: {
            key: value
            for key, value in optimizer.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        }
        for name, parameter, _ in optimized(model, optimizer)
    }
    groups = [
        {k: v for k, v in g.items() if k not in ("params", *optimizer.defaults)}
        for g in optimizer.param_groups
    ]
    return {
        "parameters": {name: values for name, values in states.items() if values},
        "groups": groups,
    }


def described(tensors: Tensors) -> dict[str, tuple[str, list[int]]]:
    """Return dtype (safetensors name) and global shape of each tensor, for a manifest."""
    return {name: (_TYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Piece:
    """One rank's shard of a tensor, and its offset in the global shape."""

    name: str
    tensor: Tensor
    offset: tuple[int, ...]


def buffers_of(model: nn.Module) -> set[str]:
    """Return the checkpoint names of buffers, which each rank updates separately (BatchNorm
    statistics)."""
    return {f"model.{bare_name(name)}" for name, _ in model.named_buffers()}


def pieces(
    tensors: Tensors, *, rank: int, ranks: int, of_rank_0: Collection[str] = frozenset()
) -> list[Piece]:
    """Return what this rank writes: its shards, and its share of the unsharded tensors by bytes.
    Rank 0 writes those in ``of_rank_0``, which may differ between ranks. No communication.
    ``tensors`` has the same order on all ranks."""
    mine: list[Piece] = []
    load = [0] * ranks
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            replica = any(
                p.is_replicate() and at
                for p, at in zip(tensor.placements, coordinate or (), strict=True)
            )
            _, offset = compute_local_shape_and_global_offset(
                tensor.shape, tensor.device_mesh, tensor.placements
            )
            if not replica and tensor.to_local().numel():
                mine.append(Piece(name, tensor.to_local(), tuple(offset)))
            continue
        owner = 0 if name in of_rank_0 else load.index(min(load))
        load[owner] += tensor.numel() * tensor.element_size() + 1
        if owner == rank:
            mine.append(Piece(name, tensor, (0,) * tensor.ndim))
    # keeps every tensor aligned
    return sorted(mine, key=lambda piece: -piece.tensor.element_size())


def header_of(mine: list[Piece]) -> tuple[str, int]:
    """Return the safetensors header of these pieces in order, and the number of bytes of their
    data."""
    entries: dict[str, Any] = {}
    end = 0
    for piece in mine:
        start, end = end, end + piece.tensor.numel() * piece.tensor.element_size()
        kind = _TYPES.get(piece.tensor.dtype)
        if kind is None:
            raise TypeError(
                f"{piece.name} has dtype {piece.tensor.dtype}, which safetensors does not support"
            )
        entries[piece.name] = {
            "dtype": kind,
            "shape": list(piece.tensor.shape),
            "data_offsets": [start, end],
        }
    sharding = {piece.name: {"saved_offsets": list(piece.offset)} for piece in mine}
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    return json.dumps({"__metadata__": about, **entries}), end


@torch.no_grad()
def stage(mine: list[Piece], buffer: Tensor) -> None:
    """Copy the pieces into ``buffer`` (host memory, uint8) and wait for the copies. Host sync."""
    views, sources, end = [], [], 0
    for piece in mine:
        start, end = end, end + piece.tensor.numel() * piece.tensor.element_size()
        views.append(buffer[start:end].view(piece.tensor.dtype).view(piece.tensor.shape))
        sources.append(piece.tensor)
    if views:
        torch._foreach_copy_(views, sources, non_blocking=True)
        if any(source.device.type != "cpu" for source in sources):
            torch.accelerator.synchronize()


@torch.no_grad()
def load_tensors(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Tensor] | None = None,
    weights: str = "raw",
    cast: bool = False,
    needed: list[tuple[Path, int, int]] | None = None,
) -> None:
    """Load model, optimizer and ``extra`` tensors in place from a checkpoint of any number of
    processes. ``weights`` is ``raw`` or the name of an EMA to load instead; ``cast`` converts
    dtypes. Tensors of a base model that the checkpoint only names, and missing extra ones, stay
    unchanged. Raises ValueError if the model does not match. With ``needed``, load nothing, but
    list the files and the bytes (first, last) that this rank reads; only the headers must exist."""
    folders, elsewhere = _folders(folder)
    readers: list[Any] = [
        HuggingFaceStorageReader(str(path)) if needed is None else _Needs(str(path))
        for path in folders
    ]
    for reader in readers if needed is not None else ():
        reader.needed = needed
    held = [reader.read_metadata().state_dict_metadata for reader in readers]
    saved = {name: about for several in held for name, about in several.items()}
    targets = {
        name: tensor for name, tensor in model_tensors(model).items() if name not in elsewhere
    }
    if (there := {name for name in saved if name.startswith("model.")}) != (here := set(targets)):
        missing, strange = sorted(here - there)[:3], sorted(there - here)[:3]
        apart = f"missing in the checkpoint: {missing}; unknown to the model: {strange}"
        raise ValueError(
            f"{folder} is of another model ({apart}); use the same task.* settings, or another "
            "run.dir"
        )
    for name, target in targets.items():
        about: Any = saved[name]
        targets[name] = target = of_shape(target, about.size)
        if tuple(about.size) != tuple(target.shape):
            apart = (
                f"{name} has shape {tuple(about.size)} in the checkpoint and {tuple(target.shape)} "
                "in the model"
            )
            raise ValueError(f"{folder}: {apart}")
        if about.properties.dtype != target.dtype and not cast:
            apart = (
                f"{name} has dtype {about.properties.dtype} in the checkpoint and {target.dtype} "
                "in the model"
            )
            raise ValueError(
                f"{folder}: {apart}; use the same machine.dtype, or a new run with --init.from"
            )
    if weights != "raw":
        averaged = {name: f"ema.{weights}.{name.removeprefix('model.')}" for name in targets}
        if not any(name in saved for name in averaged.values()):
            raise ValueError(
                f"{folder} has no EMA {weights!r}; it has {', '.join(averages_in(saved)) or 'none'}"
            )
        targets = {
            averaged[name] if averaged[name] in saved else name: target
            for name, target in targets.items()
        }
    targets |= {
        name: of_shape(tensor, saved[name].size)
        for name, tensor in (extra or {}).items()
        if name in saved
    }
    if optimizer is not None:
        for name, parameter, group in optimized(model, optimizer):
            prefix = f"optimizer.{name}."
            for key in [
                key
                for key, value in optimizer.state[parameter].items()
                if isinstance(value, Tensor)
            ]:
                if f"{prefix}{key}" not in saved:
                    del optimizer.state[parameter][key]
            for entry in (
                name
                for name in saved
                if name.startswith(prefix) and "." not in name.removeprefix(prefix)
            ):
                known = optimizer.state[parameter]
                key = entry.removeprefix(prefix)
                if key not in known:
                    known[key] = _empty_entry(saved[entry], parameter, key, group)
                targets[entry] = of_shape(as_real(known[key]), saved[entry].size)
    with warnings.catch_warnings():
        # each rank reads its own shards
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        for reader, names in zip(readers, held, strict=True):
            load(
                {name: targets[name] for name in names if name in targets},
                storage_reader=reader,
                no_dist=True,
            )


class _Needs(HuggingFaceStorageReader):  # type: ignore[misc]
    """Lists the bytes that a plan reads, instead of reading them."""

    needed: list[tuple[Path, int, int]]  # where to list them

    def read_data(self, plan: Any, planner: Any) -> Any:
        headers: dict[Path, dict[str, Any]] = {}
        for item in plan.items:
            file = Path(self.storage_data[item.storage_index].relative_path)
            entries = headers[file] = headers.get(file) or header(file)
            ends = [entry["data_offsets"][1] for entry in entries.values() if "dtype" in entry]
            entry = entries[item.storage_index.fqn]
            start, end = (
                file.stat().st_size - max(ends) + offset for offset in entry["data_offsets"]
            )
            if entry["shape"] and end > start:  # rows of the first dimension are contiguous
                row = (end - start) // entry["shape"][0]
                start += row * item.storage_offsets[0]
                end = start + row * item.lengths[0]
            self.needed.append((file, start, end))
        return super().read_data(replace(plan, items=[]), planner)


def _folders(folder: Path) -> tuple[list[Path], set[str]]:
    """Return the folders with a checkpoint's tensors, and the tensor names that it does not contain
    (base model)."""
    if (named := base_model_of(folder)) is not None:
        return [folder], {f"model.{name}" for name in named["names"]}
    base = base_of(folder)
    return [folder] if base is None else [folder, base[0]], set()


def averages_in(saved: Mapping[str, Any]) -> list[str]:
    """Return the names of the EMAs among these tensor names."""
    names: dict[str, None] = {}
    for name in saved:
        if name.startswith("ema."):
            for parameter in saved:
                if parameter.startswith("model.") and name.endswith(
                    tail := parameter.removeprefix("model")
                ):
                    names[name.removeprefix("ema.").removesuffix(tail)] = None
    return list(names)


def load_values(values: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Restore the result of :func:`optimizer_values`."""
    for name, parameter, _ in optimized(model, optimizer):
        optimizer.state[parameter].update(values["parameters"].get(name, {}))
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]
    for group, given in zip(optimizer.param_groups, values["groups"], strict=True):
        group.update(given)


def _empty_entry(saved: Any, parameter: Tensor, key: str, group: Mapping[str, Any]) -> Tensor:
    """Return a zero tensor for an entry of the optimizer state, on the device that the optimizer
    would choose."""
    kind = saved.properties.dtype
    if parameter.is_complex() and tuple(saved.size) == (*parameter.shape, 2):
        return torch.zeros_like(parameter)
    if tuple(saved.size) == tuple(of_shape(parameter.detach(), saved.size).shape) and key != "step":
        return torch.zeros_like(parameter, dtype=kind)
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(tuple(saved.size), dtype=kind, device="cpu" if on_host else parameter.device)
