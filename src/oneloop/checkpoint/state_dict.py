"""The state of a run as named tensors: their layout in a file, and loading at any world size.

The files have the format of torch.distributed.checkpoint's safetensors storage, and its readers
load them. Names are of the unwrapped model: ``model.<name>``, ``optimizer.<parameter>.<key>``,
``ema.<name>.<parameter>``, ``rank.<number>.<buffer>`` (buffers that each rank saves), and
``optimizer..<optimizer><path>`` (tensors of an optimizer that belong to no parameter). No pickle.
If there are several models, a parameter or buffer is called ``<model>.<name>`` (not in an EMA).
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.side_copies import before_change
from oneloop.basics.tensors import (
    NamedModels,
    Optimizers,
    as_real,
    kinds_of,
    named,
    of_shape,
)
from oneloop.basics.untrusted import damaged
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.named_checkpoint import base_model_of, base_of
from oneloop.checkpoint.optimizer_values import groups_in, optimizer_targets
from oneloop.checkpoint.pieces import NAMES, Tensors
from oneloop.checkpoint.rank_buffers import PREFIX, buffer_in


def model_tensors(model: nn.Module, *, frozen: bool | None = None) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their first name, not copied.

    Args:
        model: bare or wrapped.
        frozen: True selects the frozen parameters, False all others, None everything.

    Raises:
        ValueError: its state cannot be saved, and loaded in place.
    """
    tensors = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state"):
            raise ValueError(
                f"{name} is a {type(tensor).__name__} of get_extra_state(); only parameters and "
                "buffers are saved: register it as a buffer"
            )
        # A tied tensor counts once.
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        bare = f"model.{bare_name(name)}"
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if frozen is None or frozen == is_frozen:
            if bare in tensors:
                raise ValueError(
                    f"two tensors of the model have the name {bare} in a checkpoint, because a "
                    "module has the name of a wrapper (module); give it another name"
                )
            tensors[bare] = as_real(tensor.detach())
            strides = zip(tensor.stride(), tensor.shape, strict=True)
            if any(stride == 0 and size > 1 for stride, size in strides):
                raise ValueError(
                    f"{name} is an expanded view, whose elements share memory; copy it with "
                    ".clone()"
                )
    described(tensors)
    return tensors


def reject_others(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizers | None,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Raise ValueError if a checkpoint is of other named models, or of other optimizers.

    Args:
        folder: the checkpoint.
        model: bare or wrapped, or several as one (:func:`oneloop.basics.tensors.together`).
        optimizer: of its parameters, or several by name; None: compare only the models.
        values: the saved result of :func:`oneloop.checkpoint.optimizer_values.optimizer_values`,
            to also compare classes and groups.
    """
    # Compare the names.
    there = read_manifest(folder)["about"].get("named", [])
    if optimizer is None:
        there = [line for line in there if line.startswith("model ")]
    here = named(model, optimizer)
    both = {*there} & {*here}
    missing = [line for line in there if line not in both]
    unknown = [line for line in here if line not in both]
    if missing or unknown:
        raise ValueError(
            f"{folder} has other named models or optimizers (only the checkpoint has "
            f"{missing[:4] or 'nothing'}; only given: {unknown[:4] or 'nothing'}); give those of "
            "the checkpoint, by the same names"
        )

    # Compare classes, and the parameters of groups whose entries are saved.
    if optimizer is None or values is None:
        return
    own = kinds_of(optimizer)
    if own != values["optimizers"]:
        own = groups_in(model, optimizer)
    if own != values["optimizers"]:
        raise ValueError(
            f"{folder} has the state of {', '.join(values['optimizers'])}, but {', '.join(own)} is "
            "given (classes of optimizers, or of parameter groups with a hash of their names); "
            "create the optimizer that was saved"
        )


def described(tensors: Tensors) -> dict[str, tuple[str, list[int]]]:
    """Return dtype (safetensors name) and global shape of each tensor, for a manifest.

    Raises ValueError if safetensors has no name for a dtype.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in NAMES)
            raise ValueError(
                f"{name} has {str(tensor.dtype).removeprefix('torch.')}; a checkpoint supports "
                f"{kinds}, complex64"
            )
    return {name: (NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}


def buffers_of(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return those of the names in a checkpoint that are of buffers, or of EMAs of buffers.

    Each rank updates them separately (BatchNorm statistics).
    """
    # A buffer that modules share may be saved by any of its names. An EMA has the names within its
    # model, which may be one of several.
    models = model.children() if isinstance(model, NamedModels) else [model]
    ends: list[str] = []
    for module in models:
        for name, _ in module.named_buffers(remove_duplicate=False):
            ends.append(f".{bare_name(name)}")
    return {name for name in names if name.endswith(tuple(ends))}


@torch.no_grad()
def load_tensors(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Tensor] | None = None,
    weights: str = "raw",
    cast: bool = False,
) -> dict[str, Tensor]:
    """Load tensors in place from a checkpoint of any number of processes.

    Tensors of a base model that the checkpoint only names, and missing extra ones, stay unchanged.

    Args:
        folder: the checkpoint.
        model: bare or wrapped, or several as one (:func:`oneloop.basics.tensors.together`).
        optimizer: of its parameters, or several by name; None: leave the state unread.
        extra: other tensors, by their names in the checkpoint.
        weights: ``raw``, or the name of an EMA to load instead.
        cast: convert dtypes.

    Returns:
        The tensors of the optimizers, by name.

    Raises:
        ValueError: if the model does not match.
    """
    with damaged(folder):
        # Read the headers.
        folders = [folder]
        elsewhere: set[str] = set()
        referenced = base_model_of(folder)
        base = base_of(folder)
        if referenced is not None:
            elsewhere = {f"model.{name}" for name in referenced["names"]}
        elif base is not None:
            folders.append(base[0])
        readers = [HuggingFaceStorageReader(str(path)) for path in folders]
        held = [reader.read_metadata().state_dict_metadata for reader in readers]
        saved: dict[str, Any] = {}
        for several in held:
            saved.update(several)

        # Find the tensor for each saved one. Buffers of this rank replace those of rank 0.
        own = model_tensors(model)
        for name in extra or {}:
            if name.startswith(PREFIX):
                own.pop(f"model.{buffer_in(name)}", None)
                saved.pop(f"model.{buffer_in(name)}", None)
        targets = {name: tensor for name, tensor in own.items() if name not in elsewhere}
        targets = _matching(folder, targets, saved, cast=cast)
        if weights != "raw":
            targets = _averaged(folder, targets, saved, weights)
        for name, tensor in (extra or {}).items():
            if name in saved:
                targets[name] = of_shape(tensor, saved[name].size)
        of_optimizers: dict[str, Tensor] = {}
        if optimizer is not None:
            of_optimizers = optimizer_targets(model, optimizer, saved)

        # Load; each rank reads its own shards, without communication.
        targets |= of_optimizers
        before_change()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            for reader, names in zip(readers, held, strict=True):
                mine = {name: targets[name] for name in names if name in targets}
                load(mine, storage_reader=reader, no_dist=True)
        return of_optimizers


def _matching(
    folder: Path, targets: dict[str, Tensor], saved: Mapping[str, Any], *, cast: bool
) -> dict[str, Tensor]:
    """Return the model's tensors in their saved shapes.

    Raises ValueError unless names, shapes and, without ``cast``, dtypes are the checkpoint's.
    """
    # Compare the names, then shapes and dtypes.
    there = {name for name in saved if name.startswith("model.")}
    here = set(targets)
    if there != here:
        raise ValueError(
            f"{folder} is of another model (missing in the checkpoint: {sorted(here - there)[:3]}; "
            f"unknown to the model: {sorted(there - here)[:3]}); use the same task.* settings, or "
            "another run.dir"
        )
    matching = {}
    for name, own in targets.items():
        about = saved[name]
        target = of_shape(own, about.size)
        if tuple(about.size) != tuple(target.shape):
            raise ValueError(
                f"{folder}: {name} has shape {tuple(about.size)} in the checkpoint and "
                f"{tuple(target.shape)} in the model"
            )
        if about.properties.dtype != target.dtype and not cast:
            raise ValueError(
                f"{folder}: {name} has dtype {about.properties.dtype} in the checkpoint and "
                f"{target.dtype} in the model; use the same machine.dtype, or a new run with "
                "--init.from"
            )
        matching[name] = target
    return matching


def _averaged(
    folder: Path, targets: dict[str, Tensor], saved: Mapping[str, Any], weights: str
) -> dict[str, Tensor]:
    """Return the model's tensors by the names of an EMA, or by their own if it lacks them.

    Raises ValueError if the checkpoint has no such EMA.
    """
    averaged = {}
    for name, target in targets.items():
        average = f"ema.{weights}.{name.removeprefix('model.')}"
        averaged[average if average in saved else name] = target
    if averaged.keys() == targets.keys():  # no name was replaced
        averages = [name for name in saved if name.startswith("ema.")]
        raise ValueError(
            f"{folder} has no EMA {weights!r}; its tensors of EMAs are {averages[:3] or 'none'}"
        )
    return averaged
