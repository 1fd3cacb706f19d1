"""Tasks that train with the outputs of a frozen model, which a run computes before its first step.

The documents are divided into ranges. The outputs of a range depend on the range alone, so that a
pass continues after a stop, on any number of processes.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.content_hash import content_hash
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import writing
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.progress import Working
from oneloop.basics.tensor_hash import fingerprint
from oneloop.basics.tensors import as_real
from oneloop.task_protocol.user_code import source_hash, sources
from oneloop.tasks.frozen.outputs import FrozenOutputs
from oneloop.tasks.rows.cache import key_of

_Range = tuple[str, int]  # name of the outputs, and number of the range


@dataclass
class FrozenModel:
    """A frozen model whose outputs a task trains with: what a run computes before its first step.

    Args:
        role: the reference, or the teacher; for messages.
        outputs: by name: SPLIT, or SPLIT/SOURCE; those of ``samples_of`` are called data.
        batch: makes a batch of documents: ``batch(name, documents)``, tensors by name on the host.
        compute: ``compute(model, batch)`` returns an array of records for each document, in order;
            it is called in eval mode, without gradients.
        kind: JSON values that describe what the records are: a part of the key.
        address: folder of all outputs; None: in the cache of this host.
        build: builds the model; None: it is the policy before its first step.
        content: JSON values that identify the weights; None: a run finds them.

    Raises:
        ValueError: the address is not a folder.
    """

    role: str
    outputs: dict[str, FrozenOutputs]
    batch: Callable[[str, Sequence[int]], dict[str, Tensor]]
    compute: Callable[[nn.Module, dict[str, Tensor]], Sequence[NDArray[Any]]]
    kind: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None
    build: Callable[[], nn.Module] | None = None
    content: Any = None
    is_tried: bool = field(default=False, init=False)  # whether the outputs are placeholders

    def __post_init__(self) -> None:
        if self.address and "://" in self.address:
            raise ValueError(
                f"task.store {self.address} is not a folder; mount the bucket, and name the "
                "mounted folder"
            )

    @property
    def note(self) -> str:
        """A log line about the size of the outputs."""
        size = 0
        for outputs in self.outputs.values():
            size += outputs.starts[-1] * outputs.record.itemsize
        where = self.address or "the cache of this host"
        return f"{self.role}: its outputs, {size / 1e6:,.1f} MB, are computed once, in {where}"

    def check(self, content: Any) -> None:
        """Raise ValueError if these are not the weights of the frozen model."""
        if content != self.content:
            raise ValueError(
                f"{self.role} of the checkpoint had other weights than now; restore init.from, "
                "task.model or task.teacher, or begin a new run"
            )


class FrozenTask:
    """Base class of tasks that train with the outputs of a frozen model.

    Its checkpoints name the weights that were frozen, and never hold them.
    """

    frozen: FrozenModel | None = None
    """what a run computes before its first step, once the task was made; None: nothing"""

    def state_dict(self) -> dict[str, Any]:
        """Return which weights were frozen, for a checkpoint; None: the run was only tried."""
        if self.frozen is None:
            return {}
        return {"frozen": None if self.frozen.is_tried else self.frozen.content}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Compare the frozen weights with those of a checkpoint, unless the task is only tried.

        Raise ValueError if they differ: the run would continue with another frozen model.
        """
        if self.frozen is None:
            return
        content = state.get("frozen")
        if self.frozen.content is None:
            self.frozen.content = content
        elif not self.frozen.is_tried:
            self.frozen.check(content)

    def before_run(self, model: Any, run: Any) -> None:
        """Compute what is missing of the outputs, and read them from now on. Collective.

        Args:
            model: of the run, prepared; it may be trained.
            run: what a task may use, as :func:`oneloop.run.before_run.before_run` describes it;
                None: samples are only tried, and the outputs are zeros.

        Raises:
            BadInput: the outputs cannot be stored, or hosts do not share their folder.
            ValueError: the frozen weights are others than those of the checkpoint.
        """
        frozen = self.frozen
        if frozen is None:
            return
        frozen.is_tried = run is None
        for outputs in frozen.outputs.values():
            outputs.are_placeholders = frozen.is_tried
        if run is None:
            return

        # Which weights are frozen? Those of a trained policy are in its checkpoint.
        if frozen.content is None:
            frozen.content = _weights(self, run.initial_model())

        # Which ranges are missing? All processes look before one of them writes.
        folders = _folders(self, frozen, model, run)
        missing = []
        for name, folder in folders.items():
            for number in range(len(frozen.outputs[name].ranges)):
                BEATS.beat()
                if not frozen.outputs[name].is_stored(number, folder):
                    missing.append((name, number))

        # Compute them. A host that does not share the folder still lacks those of the others.
        share = run.share(missing)
        if share:
            _compute(self, frozen, share, folders, run)
        run.barrier()
        for name, number in missing:
            if not frozen.outputs[name].is_stored(number, folders[name]):
                raise BadInput(
                    f"{folders[name]} lacks outputs of {frozen.role} that another process has "
                    "computed, because the hosts do not share it; name a shared folder with "
                    "task.store"
                )
        for name, folder in folders.items():
            frozen.outputs[name].folder = folder


def _weights(task: FrozenTask, model: nn.Module) -> dict[str, Any]:
    """Return what identifies the policy's weights, on any parallel layout. Collective."""
    # A tied tensor counts once, by its first name.
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (bare_name(name), as_real(tensor.detach())))
    tensors = dict(named.values())

    # The parameters of a base model are those of its files.
    content: dict[str, Any] = {}
    origin = getattr(task, "origin", None)
    if origin is not None:
        content["base"] = origin.content
        tensors = {name: tensors[name] for name in tensors.keys() - origin.names}

    # Fresh adapters change nothing: the same outputs serve every seed and rank of adapters.
    last = {name: tensors[name] for name in tensors if ".lora_B." in name}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in last.items()}
    if fingerprint(last) == fingerprint(zeros):
        tensors = {name: tensors[name] for name in tensors if ".lora_" not in name}
    return {**content, "tensors": fingerprint(tensors)["bits"]}


def _compute(
    task: FrozenTask,
    frozen: FrozenModel,
    share: Sequence[_Range],
    folders: Mapping[str, Path],
    run: Any,
) -> None:
    """Compute and write ranges, with the policy or a model that exists only meanwhile."""
    if frozen.build is None:
        model = run.initial_model()
        frozen.check(_weights(task, model))
    else:
        model = run.prepare(frozen.build().requires_grad_(False))
    model.eval()
    device = next(model.parameters()).device

    # FSDP2 needs equally many forwards on all processes: some repeat theirs.
    forwards = 0
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        for name in folders:
            outputs = frozen.outputs[name]
            for number in range(len(outputs.ranges)):
                forwards = max(forwards, len(outputs.batches(number)))

    # Compiled code is not used: each length would be another compilation.
    eager = torch.compiler.set_stance("force_eager")
    with eager, Working(f"computing outputs of {frozen.role}", total=len(share)) as bar:
        for name, number in share:
            outputs = frozen.outputs[name]
            batches = outputs.batches(number)
            last = outputs.ranges[number][-1]
            records = np.empty(outputs.positions(last, number).stop, outputs.record)
            for at in range(forwards or len(batches)):
                documents = batches[at % len(batches)]
                batch = frozen.batch(name, documents)
                on_device = {key: tensor.to(device) for key, tensor in batch.items()}
                computed = frozen.compute(model, on_device)
                for document, values in zip(documents, computed, strict=True):
                    here = outputs.positions(document, number)
                    records[here] = values
                    is_nan = [
                        np.isnan(records[key][here]).any() for key in outputs.record.names or ()
                    ]
                    if any(is_nan):
                        raise ValueError(
                            f"{frozen.role} computes NaN for document {document} of {name}; check "
                            "its weights and precision"
                        )
                BEATS.beat()
            with writing(folders[name], "make room, or name another folder with task.store"):
                outputs.write(records, number, folders[name])
            bar.advance()


def _code(task: FrozenTask, model: nn.Module) -> str:
    """Return a hash of all sources of the user, and of the versions of packages."""
    kinds = {kind for part in (task, *model.modules()) for kind in type(part).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    versions = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in packages}

    # Each command of oneloop is another script. The classes of a notebook have no module.
    checksums = {source_hash(kind) for kind in kinds if kind.__module__ == "__main__"}
    for name, checksum in sources().items():
        if name.partition(".")[0] not in ("oneloop", "__main__"):
            checksums.add(checksum)
    return content_hash((checksums, versions))


def _folders(task: FrozenTask, frozen: FrozenModel, model: nn.Module, run: Any) -> dict[str, Path]:
    """Return the folder of the outputs of each data set that is read, and make it."""
    root = Path(frozen.address).expanduser() if frozen.address else run.cache
    rounding = [run.precision, torch.get_float32_matmul_precision()]
    parts = [_code(task, model), rounding, frozen.content, dict(frozen.kind)]

    # What else changes the outputs of a policy?
    if frozen.build is None:
        parts.append(sorted({str(parameter.dtype) for parameter in model.parameters()}))
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_dict"):
            parts.append(getattr(config, "_attn_implementation", None))
            parts.append(config.to_dict() | {"_name_or_path": None})

    folders = {}
    for name, outputs in frozen.outputs.items():
        if name.partition("/")[0] in run.sets:
            key = key_of(parts, outputs.content, outputs.record.descr, len(outputs))
            folders[name] = root / f"{frozen.role} {key}".replace(" ", "-")
            with writing(folders[name], "name another folder with task.store"):
                folders[name].mkdir(parents=True, exist_ok=True)
    return folders
