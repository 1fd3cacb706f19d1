"""Weights as plain safetensors, under the names that the model itself gives them, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from oneloop.checkpoint.state import load_tensors


def tied_names(model: nn.Module) -> set[str]:
    """Names of parameters and buffers that are another name of an earlier one (tied weights)."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name for name, tensor in state.items() if first.setdefault(id(tensor), name) != name}


def gathered_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole model's weights in host memory, on rank 0; empty elsewhere. Every rank must get here.

    Names are those of the bare model: no ``module.``, no ``_orig_mod.``. Tied weights stand there once.
    """
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    tied = tied_names(bare(model))
    return {name: tensor.contiguous() for name, tensor in state.items() if name not in tied}


def write_final(folder: Path, model: nn.Module, task: Any) -> None:
    """``model.safetensors`` and what the task adds (config, tokenizer). Every rank must get here."""
    weights = gathered_weights(model)
    if not weights:
        return
    folder.mkdir(exist_ok=True, parents=True)
    draft = folder / ".model.draft"
    save_file(weights, draft, metadata={"format": "pt"})
    draft.replace(folder / "model.safetensors")
    if hasattr(task, "save"):
        task.save(bare(model), folder)


def export_checkpoint(checkpoint: Path, folder: Path, task: Any) -> None:
    """Writes the weights of a checkpoint as :func:`write_final` writes those of a run.

    Raises:
        ValueError: it is of another model.
    """
    model = task.model()
    load_tensors(checkpoint, model)
    write_final(folder, model, task)


def bare(model: nn.Module) -> nn.Module:
    """The model without its DDP wrapper."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def load_weights(model: nn.Module, source: str) -> None:
    """Loads weights into a model that is not yet wrapped: from a run folder, a folder, or a .safetensors file.

    Raises:
        ValueError: there are none, or they are not this model's.
    """
    path = Path(source)
    tried = (
        [path] if path.suffix == ".safetensors" else [path / "final" / "model.safetensors", path / "model.safetensors"]
    )
    file = next((one for one in tried if one.is_file()), None)
    if file is None:
        raise ValueError(f"init.from {source!r}: no weights there (looked for {' and '.join(map(str, tried))})")
    try:
        weights = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"init.from {source!r}: {file} cannot be read: {error}") from error
    own = model.state_dict()
    missing = sorted(own.keys() - weights.keys() - tied_names(model))
    unexpected = sorted(weights.keys() - own.keys())
    shapes = [f"{name} {tuple(weights[name].shape)} for {tuple(own[name].shape)}"
              for name in sorted(own.keys() & weights.keys()) if own[name].shape != weights[name].shape]  # fmt: skip
    if missing or unexpected or shapes:
        found = [f"{what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
                 for what, names in (("missing", missing), ("unexpected", unexpected), ("other shape", shapes)) if names]  # fmt: skip
        raise ValueError(f"init.from {source!r}: {file.name} is not of this model ({'; '.join(found)});"
                         " choose weights of the same task.* settings")  # fmt: skip
    with torch.no_grad():
        model.load_state_dict(weights, strict=False)
