"""Write the weights of a run for inference, and read the state that its task saved."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.base_models import BaseModel
from oneloop.basics.files import replacing
from oneloop.basics.untrusted import delete, read_json
from oneloop.checkpoint.manifest import MANIFEST
from oneloop.checkpoint.store import MOST_STATE, STATE, read_state, vouch
from oneloop.checkpoint.weights import bare, gathered_weights, write_weights
from oneloop.ema import EMA
from oneloop.task_protocol.protocol import Task

TASK = "task"  # name of the task's state in a checkpoint, and of task.json in ``final/``


def write_final(
    folder: Path,
    model: nn.Module,
    task: Task,
    emas: Iterable[EMA] = (),
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write ``model.safetensors``, a file for each EMA, and the task's files.

    Collective: call on every rank. On rank 0, ``task.save`` gets a model of whole tensors; with an
    ``origin`` (base model), the model as it is.

    Args:
        folder: written into; created if it is missing.
        model: as prepared for training, or not.
        task: its state, and its files if it has ``save``.
        emas: EMAs of the weights.
        about: entries of MANIFEST.json, which also holds the size and checksum of every file.
    """
    origin: BaseModel | None = getattr(task, "origin", None)

    # Gather the weights on rank 0. A manifest from before would vouch for files that change now.
    weights = gathered_weights(model, origin)
    if weights:
        delete(folder / MANIFEST, inside=folder)
    name = origin.file if origin else "model"
    write_weights(folder / f"{name}.safetensors", weights)
    for ema in emas:
        with ema.swapped():
            write_weights(folder / f"{ema.name}.safetensors", gathered_weights(model, origin))
    if not weights:
        return

    # On rank 0, write the task's files, and the manifest last.
    if hasattr(task, "state_dict"):
        with replacing(folder / f"{TASK}.json") as draft:
            draft.write_text(json.dumps(task.state_dict()))
    if hasattr(task, "save"):
        if origin is None:
            task.save(_whole(model, task, weights), folder)
        else:
            task.save(bare(model), folder)
    manifest = dict(about or {})
    if origin is not None:
        manifest["base"] = origin.description
    vouch(folder, manifest)


def _whole(model: nn.Module, task: Task, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the model without DTensors.

    Under FSDP2, this is a new model with the gathered weights.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return bare(model)
    made = task.model()
    for name, tensor in made.state_dict(keep_vars=True).items():
        if name in weights:
            tensor.data = weights[name]  # tied weights share this tensor
    return made.train(model.training)


def load_task_state(task: Task, folder: Path) -> None:
    """Restore the task's state from a checkpoint, or from ``final/``, if it was saved."""
    if not hasattr(task, "load_state_dict"):
        return

    # ``final/`` has it in a separate file, a checkpoint among the other components.
    file = folder / f"{TASK}.json"
    if file.is_file():
        task.load_state_dict(read_json(file, object, most=MOST_STATE))
    elif (folder / STATE).is_file():
        state = read_state(folder)
        if TASK in state:
            task.load_state_dict(state[TASK])
