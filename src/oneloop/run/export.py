"""Write weights for inference: at the end of a run, and by ``oneloop export`` from a checkpoint."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.base_models import BaseModel
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.untrusted import read_json
from oneloop.checkpoint.manifest import MANIFEST, header, read_manifest
from oneloop.checkpoint.named_checkpoint import FILE, FINAL, base_model_of, base_of
from oneloop.checkpoint.saved_state import MOST_STATE, STATE, read_state
from oneloop.checkpoint.state_dict import load_tensors
from oneloop.checkpoint.store import vouch
from oneloop.checkpoint.weights import bare, gathered_weights, load_weights, write_weights
from oneloop.ema import EMA
from oneloop.machine.frozen_dtype import rounded
from oneloop.task_protocol.protocol import Task
from oneloop.tools.export.model_card import model_card
from oneloop.tools.export.power_emas import load_power_ema

TASK = "task"  # name of the task's state in a checkpoint, and of task.json in ``final/``

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""floating-point dtypes by their names in safetensors"""


@dataclass(frozen=True)
class FinalWeights:
    """Which weights ``final/`` holds."""

    weights: str  # last or best
    step: int  # that they are from
    end: int  # last step of the run
    metric: str | None = None  # of the best weights: eval.best
    value: float | None = None  # of the best weights: that metric

    def as_json(self) -> dict[str, Any]:
        """Return the fields for summary.json and MANIFEST.json; the last weights have no metric."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def write_final(
    folder: Path,
    model: nn.Module,
    task: Task,
    emas: Iterable[EMA] = (),
    *,
    about: Mapping[str, Any] = MappingProxyType({}),
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
        (folder / MANIFEST).unlink(missing_ok=True)
    write_weights(folder / f"{_file(origin)}.safetensors", weights)
    for ema in emas:
        with ema.swapped():
            write_weights(folder / f"{ema.name}.safetensors", gathered_weights(model, origin))
    if not weights:
        return

    # On rank 0, write the task's files, and the manifest last.
    if hasattr(task, "state_dict"):
        (folder / f"{TASK}.json").write_text(json.dumps(task.state_dict()))
    if hasattr(task, "save"):
        if origin is None:
            task.save(_whole(model, task, weights), folder)
        else:
            task.save(bare(model), folder)
    manifest = dict(about)
    if origin is not None:
        manifest["base"] = origin.description
    vouch(folder, manifest)


def _file(origin: BaseModel | None) -> str:
    if origin is None:
        return "model"
    return origin.file


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
        _in_types(model, _types_of(checkpoint / f"{_file(origin)}.safetensors"), origin)
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
        rounded(model, base_dtype)
        model = task.merge(model)
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


def reject_other_origin(folder: Path, origin: BaseModel | None) -> None:
    """Raise ValueError if a checkpoint was trained on another base model.

    Args:
        folder: the checkpoint, or ``final/``.
        origin: the base model of the task, or None.
    """
    if folder.name == FINAL:
        there = read_manifest(folder)["about"].get("base")
    else:
        there = base_model_of(folder)
    if (origin is None) != (there is None):
        raise ValueError(
            f"{folder} is of another model: only one of the two has a separate base model"
        )
    if origin is None:
        return
    other = origin.difference(there or {})
    if other:
        raise ValueError(
            f"{folder} needs the base model {other}; restore it at the path in task.model"
        )


def load_task_state(task: Task, folder: Path) -> None:
    """Restore the task's state from a checkpoint, or from ``final/``, if it was saved."""
    if not hasattr(task, "load_state_dict"):
        return

    # ``final/`` has it in a file of its own, a checkpoint among the other components.
    file = folder / f"{TASK}.json"
    if file.is_file():
        task.load_state_dict(read_json(file, object, most=MOST_STATE))
    elif (folder / STATE).is_file():
        state = read_state(folder)
        if TASK in state:
            task.load_state_dict(state[TASK])


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
    return {name: about["dtype"] for name, about in header(file).items() if name != "__metadata__"}


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


_REPLACED = (".safetensors", ".json", ".jinja", "recipe.yaml")
"""suffixes of files from an earlier push, which a push replaces"""


def write_card(run: Path, folder: Path, name: str, *, licence: str | None = None) -> str:
    """Write the model card of an export to its README.md.

    Args:
        run: the run folder.
        folder: the export.
        name: of the repository (ORG/NAME).
        licence: its identifier on the hub.

    Returns:
        The card.
    """
    # Does transformers load it: adapters, or a model with a type that transformers knows?
    config = folder / "config.json"
    loadable = (folder / "adapter_config.json").is_file()
    if not loadable and config.is_file():
        loadable = b'"model_type"' in config.read_bytes()

    about = read_manifest(folder)["about"]
    card = model_card(run, name, about, licence=licence, language_model=loadable)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return card


def check_push(name: str) -> None:
    """Raise BadInput if a push to the hub cannot work.

    There is no token, or ``name`` cannot be the name of a repository.
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise BadInput(f"--push {name!r} is not a repository name (ORG/NAME): {error}") from error
    if not get_token():
        raise BadInput(
            f"--push {name} needs a token that may write to the hub: hf auth login, or HF_TOKEN=…"
        )


def push(run: Path, folder: Path, name: str, *, licence: str | None, public: bool) -> str:
    """Commit what ``oneloop export`` wrote to a repository, which is created if it is missing.

    Args:
        run: the run folder.
        folder: the export.
        name: of the repository (ORG/NAME).
        licence: its identifier on the hub.
        public: whether a repository that is created here is public.

    Returns:
        A line with the commit's address.

    Raises:
        BadInput: the hub rejects the push, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    # Collect the files of the export, with the model card and the recipe.
    manifest = read_manifest(folder)
    card = write_card(run, folder, name, licence=licence)
    files: dict[str, Any] = {}
    for file in (*manifest["files"], MANIFEST):
        files[file] = folder / file
    files["README.md"] = card.encode()
    files["recipe.yaml"] = run / "recipe.yaml"

    # Describe the weights in the commit message.
    about = manifest["about"]
    what = about.get("checkpoint") or f"step {about.get('step')}"
    if about.get("weights") not in ("raw", None):
        what += f", {about['weights']}"

    # Replace the files of an earlier push in one commit.
    api = HfApi()
    with _hub_errors(name):
        api.create_repo(name, private=not public, exist_ok=True)
        operations: list[Any] = []
        for file in api.list_repo_files(name):
            if file.endswith(_REPLACED) and "/" not in file and file not in files:
                operations.append(CommitOperationDelete(file))
        for file, content in files.items():
            operations.append(CommitOperationAdd(file, content))
        done = api.create_commit(name, operations, commit_message=f"oneloop: {run.name}, {what}")
    return f"{name}: {done.commit_url}"


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    # the HTTP library's error class, which differs between versions
    base_error: Any = HfHubHTTPError.__bases__[0]

    try:
        yield
    except HfHubHTTPError as error:
        raise BadInput(f"--push {name}: the hub rejects it: {_first(error)}") from error
    except (base_error, OSError) as error:
        raise BadInput(f"--push {name}: the hub cannot be reached: {_first(error)}") from error


def _first(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
