"""Write the weights of a checkpoint, or of ``final/``, for inference."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from oneloop.basics.base_models import BaseModel
from oneloop.basics.files import writing
from oneloop.basics.untrusted import damaged
from oneloop.checkpoint.manifest import MANIFEST, read_manifest
from oneloop.checkpoint.named_checkpoint import FILE, FINAL, base_model_of, base_of
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.weights import load_weights
from oneloop.run.final_weights import load_task_state, write_final
from oneloop.task_protocol.protocol import Task
from oneloop.tools.after_training.trained_model import reject_other_origin, round_frozen
from oneloop.tools.export.power_emas import load_power_ema

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""floating-point dtypes by their names in safetensors"""


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    task: Task,
    *,
    weights: str = "raw",
    merge: bool = False,
    base_dtype: str | None = None,
) -> None:
    """Write the weights of a checkpoint, or of ``final/``, as a run writes its ``final/``.

    Args:
        checkpoint: a checkpoint's folder, or ``final/``.
        folder: written into; created if it is missing.
        task: of the run.
        weights: ``raw``, the name of an EMA, or ``power:SIGMA``: the power-function EMA of that
            width, combined from the EMAs in this checkpoint and in earlier ones of the run.
        merge: add adapters to their base model.
        base_dtype: dtype that the matrices of the base model had in the run.

    Raises:
        ValueError: the checkpoint is of another model or base model, the EMA does not exist, there
            is nothing to merge, or the folder has files that would be replaced.
    """
    load_task_state(task, checkpoint)
    model = task.model()
    origin: BaseModel | None = getattr(task, "origin", None)

    # Reject a folder with other files, and a checkpoint of another base model.
    _reject_both(folder, adapters=origin is not None and not merge)
    _reject_own_files(folder)
    reject_other_origin(checkpoint, origin)

    # Load the weights in the dtypes that they were saved in.
    about = {"weights": weights, "checkpoint": checkpoint.name}
    if checkpoint.name == FINAL:
        name = origin.file if origin else "model"
        _in_types(model, _types_of(checkpoint / f"{name}.safetensors"), origin)
        load_weights(model, str(checkpoint), weights, origin=origin)
        about = read_manifest(checkpoint)["about"] | {"weights": weights}
        about.pop("base", None)
    elif weights.startswith("power:"):
        _as_saved(model, checkpoint)
        load_power_ema(checkpoint, model, weights)
    else:
        _as_saved(model, checkpoint)
        load_tensors(checkpoint, model, weights=weights)

    # Merge adapters, with the base model rounded as it was in the run.
    if merge:
        if not hasattr(task, "merge"):
            raise ValueError(
                "--merged: the run trained no adapters; its weights are whole as they are"
            )
        round_frozen(model, base_dtype)
        model = task.merge(model)
    with writing(f"--to {folder}", "make room, or name another folder"):
        write_final(folder, model, task, about=about)


def _reject_both(folder: Path, *, adapters: bool) -> None:
    """Raise ValueError if the folder would hold both adapters and a whole model."""
    if adapters and (folder / "config.json").exists():
        raise ValueError(
            f"--to {folder} holds a whole model, and adapters would be read together with it; use "
            "another folder"
        )
    if not adapters and (folder / "adapter_config.json").exists():
        raise ValueError(
            f"--to {folder} holds adapters, and a whole model would be read together with it; use "
            "another folder"
        )


def _reject_own_files(folder: Path) -> None:
    """Raise ValueError if the folder has files of the user that an export would replace."""
    if (folder / MANIFEST).exists():  # an earlier export
        return
    for name in ("README.md", "config.json", "preprocessor_config.json"):
        if (folder / name).exists():
            raise ValueError(
                f"--to {folder} holds {name}, which an export would replace; use another folder"
            )


def _as_saved(model: nn.Module, checkpoint: Path) -> None:
    """Convert floating-point tensors to the dtypes in the checkpoint.

    These are machine.dtype and machine.base_dtype of the run.
    """
    saved: dict[str, str] = {}
    for name, (kind, _) in read_manifest(checkpoint).get("tensors", {}).items():
        saved[name] = kind

    # Frozen weights of a run without a separate base model are in base/.
    base = base_of(checkpoint)
    if base and base_model_of(checkpoint) is None:
        saved |= _types_of(base[0] / FILE)

    kinds: dict[str, str] = {}
    for name, kind in saved.items():
        if name.startswith("model."):
            kinds[name.removeprefix("model.")] = kind
    _in_types(model, kinds)


def _types_of(file: Path) -> dict[str, str]:
    """Return the dtypes of the tensors in a safetensors file."""
    with damaged(file.name), safe_open(file, "pt") as tensors:
        names = tensors.keys()
        return {name: tensors.get_slice(name).get_dtype() for name in names}


def _in_types(model: nn.Module, saved: Mapping[str, str], origin: BaseModel | None = None) -> None:
    """Convert floating-point tensors to the ``saved`` dtypes; those of a base model stay."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        kind = saved.get(name)
        if origin is not None and name in origin.names:
            kind = None
        elif origin is not None:
            kind = saved.get(origin.outside(name))
        if kind in _DTYPES and tensor.is_floating_point():
            tensor.data = tensor.data.to(_DTYPES[kind])
