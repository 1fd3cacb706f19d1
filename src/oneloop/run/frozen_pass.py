"""Compute the outputs of a frozen model before the first step, once for all runs that need them.

The documents are divided into ranges. The outputs of a range depend on the range alone, so that a
pass continues after a stop, on any number of processes.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from oneloop.basics.differences import differences, listed
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.progress import Working
from oneloop.basics.tensors import local
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.evaluation import evaluating
from oneloop.frozen.listing import free_bytes, in_bucket, local_root
from oneloop.frozen.outputs import FrozenModel, FrozenOutputs
from oneloop.frozen.store import RangeFiles
from oneloop.launch.processes import Run
from oneloop.machine.blocks import blocks, class_names
from oneloop.machine.torch_settings import release_cache
from oneloop.measure.fingerprint import fingerprint
from oneloop.run.source_code import sources_of_model

_TOKENS = 8192  # of a forward, at most, unless one document has more
_NOT_OF_CONFIG = ("transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
"""keys of a config of transformers that do not change the outputs"""


def compute_frozen(
    task: Any,
    model: nn.Module,
    run: Run,
    *,
    rebuild: Callable[[], nn.Module] | None = None,
    wanted: Callable[[str], bool] = lambda _: True,
) -> None:
    """Compute what is missing of a task's frozen outputs, and let the task read them.

    Collective: call on every rank.

    Args:
        task: has ``frozen_model``, or needs nothing.
        model: the policy, prepared; at the start of a run, with the initial weights.
        run: this process.
        rebuild: returns the policy before its first step, if ``model`` is a trained one.
        wanted: whether the outputs of this name are needed.

    Raises:
        BadInput: a store cannot be written or is too small, or the frozen weights are others than
            those of the checkpoint.
    """
    frozen: FrozenModel | None = task.frozen_model() if hasattr(task, "frozen_model") else None
    if frozen is None:
        return
    with run.setting_up():
        root = local_root(frozen.address)
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    # Which weights are frozen? Those of a trained policy are in its checkpoint.
    if frozen.content is None:
        frozen.content = frozen.expected
        if rebuild is None:
            frozen.content = _content(frozen, task, inner, run)
        elif frozen.expected is None:
            raise BadInput(
                f"the checkpoint does not name the weights of {frozen.role}, so its outputs for "
                "this data are unknown; name a checkpoint of a run that this version trained"
            )

    # Find out what is missing.
    passes = []
    parts = _parts(frozen, task, inner, run)
    address = frozen.address if in_bucket(frozen.address) else None
    for name, outputs in frozen.outputs.items():
        if not wanted(name):
            continue
        inputs = {
            "content": outputs.content,
            "record": outputs.record.descr,
            "documents": len(outputs),
        }
        files = RangeFiles(root, {**parts, "inputs": inputs}, outputs, address)
        passes.append(_Pass(frozen, name, files, _missing(files, frozen.role, run)))
    if not passes:
        return
    _check_space(passes, frozen, run)

    # Compute it, with the policy, or with a model that exists only meanwhile.
    if any(one.missing for one in passes):
        with run.setting_up(), _model_of(frozen, inner, task, run, rebuild) as computing:
            for one in passes:
                if run.main and one.missing:
                    one.files.announce()
                one.run(computing, run)
        # Free a model that is no longer needed. A sharded model refers to itself.
        del computing
        gc.collect()
        release_cache()
    for one in passes:
        _check_shared(one.files, run)
        one.files.outputs.attach(one.files.folder)


def _content(frozen: FrozenModel, task: Any, model: nn.Module, run: Run) -> dict[str, Any]:
    """Return what identifies the policy's weights, on any parallel layout. Collective."""
    tensors = dict(model_tensors(model))
    content: dict[str, Any] = {}

    # The parameters of a base model are those of its files.
    origin = getattr(task, "origin", None)
    if origin is not None:
        content["base"] = origin.content
        for name in [*tensors]:
            if name.removeprefix("model.") in origin.names:
                del tensors[name]

    # Fresh adapters change nothing: the same outputs serve every seed and rank of adapters.
    if frozen.zero:
        first = [tensor for name, tensor in tensors.items() if frozen.zero in name]
        if not run.any(any(bool(tensor.count_nonzero()) for tensor in map(local, first))):
            tensors = {name: one for name, one in tensors.items() if frozen.adds not in name}
    content["tensors"] = fingerprint(tensors)["bits"]
    return content


def _parts(frozen: FrozenModel, task: Any, inner: nn.Module, run: Run) -> dict[str, Any]:
    """Return what identifies the outputs of any documents. Collective."""
    policy = inner if frozen.build is None else None
    modules = () if policy is None else policy.modules()
    return {
        "role": frozen.role,
        "weights": frozen.content,
        "kind": dict(frozen.kind),
        "precision": _precision(run, policy),
        "config": _config(policy),
        "sources": run.from_main(sources_of_model(task, modules)),
    }


def _precision(run: Run, model: nn.Module | None) -> dict[str, Any]:
    """Return the settings on which the rounding of the outputs depends, other than the device.

    ``model``: the policy; None: a teacher, whose files identify its dtype.
    """
    mixed = run.accelerator.mixed_precision
    if mixed != "no" and run.sharded:
        mixed += " (FSDP2)"
    precision = {"mixed": mixed, "products": torch.get_float32_matmul_precision()}
    if model is None:
        return precision
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    config: Any = getattr(model, "config", None)
    return {
        **precision,
        "weights": sorted(dtypes),
        "attention": getattr(config, "_attn_implementation", None),
    }


def _config(model: nn.Module | None) -> dict[str, Any]:
    """Return the policy's config of transformers, without what does not change its outputs."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    kept = {}
    for key, value in config.to_dict().items():
        if not key.startswith("_") and key not in _NOT_OF_CONFIG:
            kept[key] = value
    return kept


def _missing(files: RangeFiles, role: str, run: Run) -> list[int]:
    """Return the ranges that a host lacks. Collective.

    The ranks of a host share the check of its files; a host copies what it lacks from the bucket.
    """
    with run.setting_up():
        if run.accelerator.is_local_main_process:
            files.begin()
    missing = []
    faults = []
    first = run.accelerator.local_process_index
    with run.setting_up(), Working(f"checking outputs of {role}") as bar:
        for number in range(first, files.outputs.ranges, run.local_ranks):
            fault = files.fault(number)
            bar.advance()
            if fault is None:
                continue
            if fault:
                # Another host may compute it, which does not replace the file here.
                files.drop(number)
                faults.append(f"range {number} in {files.folder} is computed again: {fault}")
            if not files.fetch(number):
                missing.append(number)
    found = run.gathered((missing, faults))
    for line in {fault: None for _, faults in found for fault in faults}:
        run.display.say(f"{role}: {line}")
    return sorted({number for numbers, _ in found for number in numbers})


def _check_space(passes: Sequence["_Pass"], frozen: FrozenModel, run: Run) -> None:
    """Print what must be computed, and raise BadInput if the disk has no room for it."""
    documents = sum(len(one.files.outputs) for one in passes)
    size = sum(one.files.outputs.bytes for one in passes)
    new = sum(one.bytes for one in passes)
    root = passes[0].files.root
    about = f"{frozen.role}: outputs of {documents:,} documents, {_megabytes(size)}, in {root}"
    if not new:
        run.display.say(f"{about}: nothing to compute")
        return
    free = free_bytes(root)
    run.display.say(f"{about}: {_megabytes(new)} to compute; {_megabytes(free)} are free")
    with run.setting_up():
        # Other sources or versions may compute something else.
        for one in passes if run.main else ():
            before = one.files.of_other_sources()
            if before is not None and one.bytes == one.files.outputs.bytes:
                why = listed(differences(before, one.files.parts["sources"]))
                run.display.say(
                    f"{frozen.role}: its outputs are computed again, because the stored ones are "
                    f"of other code ({why})"
                )
                break
        if new > free:
            raise BadInput(
                f"{frozen.role}: its outputs need {_megabytes(new)}, and {root} has "
                f"{_megabytes(free)}; free some, or name another folder or bucket with task.store"
            )


def _megabytes(count: float) -> str:
    if count < 1e9:
        return f"{count / 1e6:,.1f} MB"
    return f"{count / 1e9:,.1f} GB"


def _check_shared(files: RangeFiles, run: Run) -> None:
    """Copy from the bucket what other hosts have computed. Raise BadInput if a host lacks files."""
    with run.setting_up():
        if not run.accelerator.is_local_main_process or files.present():
            return
        for number in range(files.outputs.ranges):
            if files.fault(number) is not None and not files.fetch(number):
                raise BadInput(
                    f"the hosts do not share {files.root}: one lacks outputs that another has "
                    "computed; name a shared folder or a bucket with task.store"
                )


def batches_of(outputs: FrozenOutputs, number: int) -> list[list[int]]:
    """Return the documents of each forward of a range: of similar lengths, a function of the range.

    Args:
        outputs: the outputs.
        number: of the range.
    """
    documents = outputs.documents(number)
    lengths = outputs.lengths[documents.start : documents.stop]
    order = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        count = max(1, _TOKENS // longest)
        batches.append([documents.start + int(at) for at in order[start : start + count]])
        start += count
    return batches


@dataclass
class _Pass:
    """What must be computed of the outputs of one data set."""

    frozen: FrozenModel
    name: str
    files: RangeFiles
    missing: list[int]  # ranges

    @property
    def bytes(self) -> int:
        """Bytes of the missing ranges."""
        outputs = self.files.outputs
        return sum(outputs.records_of(number) * outputs.record.itemsize for number in self.missing)

    def run(self, model: nn.Module, run: Run) -> None:
        """Compute the missing ranges, of which each rank takes one at a time. Collective."""
        outputs = self.files.outputs
        turns = math.ceil(len(self.missing) / run.ranks)
        began = time.monotonic()
        with Working(f"computing outputs of {self.frozen.role}", total=turns) as bar:
            for turn in range(turns):
                several = self.missing[turn * run.ranks : (turn + 1) * run.ranks]
                has_work = run.rank < len(several)
                number = several[run.rank] if has_work else several[0]
                batches = batches_of(outputs, number)

                # FSDP2 needs equally many forwards on all ranks: some repeat theirs.
                forwards = len(batches) if has_work else 0
                if run.sharded:
                    forwards = max(len(batches_of(outputs, one)) for one in several)
                records: dict[int, NDArray[Any]] = {}
                for at in range(forwards):
                    documents = batches[at % len(batches)]
                    records.update(self._computed(model, documents, run.device))
                    BEATS.beat()

                # Write the range in the order of its documents.
                if has_work:
                    ordered = [records[document] for document in outputs.documents(number)]
                    self.files.write(number, np.concatenate(ordered))
                bar.advance()
                if turn == 0 and turns > 1:
                    seconds = (time.monotonic() - began) * (turns - 1)
                    run.display.say(f"{self.frozen.role}: about {seconds:,.0f} s for {self.name}")
        run.gathered(None)  # all files are written

    def _computed(
        self, model: nn.Module, documents: Sequence[int], device: torch.device
    ) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield each document with its records. Raise ValueError if they are not as expected."""
        batch = self.frozen.batch(self.name, documents)
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        outputs = self.files.outputs
        for document, records in zip(documents, self.frozen.compute(model, on_device), strict=True):
            expected = outputs.count(document)
            if len(records) != expected or records.dtype != outputs.record:
                raise ValueError(
                    f"{self.frozen.role}: {len(records)} records of {records.dtype} for document "
                    f"{document} of {self.name}, expected {expected} of {outputs.record}"
                )
            for name in outputs.record.names or ():
                if records.dtype[name].kind == "f" and np.isnan(records[name]).any():
                    raise ValueError(
                        f"{self.frozen.role} computes NaN for document {document} of {self.name}; "
                        "check its weights and precision"
                    )
            yield document, records


@contextmanager
def _model_of(
    frozen: FrozenModel,
    policy: nn.Module,
    task: Any,
    run: Run,
    rebuild: Callable[[], nn.Module] | None,
) -> Iterator[nn.Module]:
    """Yield the frozen model in eval mode, without gradients; free it, if it is not the policy.

    Compiled code is not used: each length would be another compilation.
    """
    build = frozen.build or rebuild
    model = policy
    if build is not None:
        with run.setting_up():
            model = build()
        model = _prepared(model, run)
        if frozen.build is None:
            with run.setting_up():
                frozen.check(_content(frozen, task, model, run))
    eager = torch.compiler.set_stance("force_eager")
    try:
        with evaluating(model), eager:
            yield model
    finally:
        if build is not None:
            run.accelerator._models = [one for one in run.accelerator._models if one is not model]


def _prepared(model: nn.Module, run: Run) -> nn.Module:
    """Return a model that only computes outputs: sharded by FSDP2, but not wrapped in DDP."""
    model.requires_grad_(False)
    if run.sharded:
        return run.prepare(model, blocks=class_names(blocks(model)))
    prepared: nn.Module = run.accelerator.prepare_model(model, evaluation_mode=True)
    return prepared
