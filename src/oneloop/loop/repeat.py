"""Repeat a micro-batch on all ranks: nothing but samples, seeds and weights may matter.

At some steps all ranks load the samples of one micro-batch again, and compute its loss and its
gradients twice, with the seeds of the rank that trains it. They must get what this rank has
loaded, and the same results each time. A difference comes from state that samples, seeds and
weights do not determine: attributes that change late, private generators, the number of a data
worker, code that asks for its rank, or a faulty device.

The repeat restores what it changes. It needs the memory of one micro-batch of a step, and of two
more copies of its samples.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import key
from oneloop.basics.snapshot import Snapshot
from oneloop.basics.tensor_hash import tensor_hash, tensor_hashes
from oneloop.basics.tensors import as_real, reshard
from oneloop.basics.wide_sums import wide_dtype
from oneloop.checkpoint.weights import bare
from oneloop.checks.tolerance import tolerance_of
from oneloop.data.seeded_samples import SeededSamples
from oneloop.data.step_batches import Batch, loader, to_device
from oneloop.job.build import Job
from oneloop.job.restore import KeptTensors, restored
from oneloop.launch.processes import Run
from oneloop.machine.layout_checks import DEPENDS, Checks

_GROWTH = 4  # each early interval with one repeat is longer than the one before
_COPIED = 1 << 26  # bytes of parameters and buffers that are copied for a repeat
_AT_ONCE = 1 << 20  # elements
_NOISE = 10.0  # where reruns differ: allowed multiple of the difference of two reruns


@dataclass(frozen=True)
class _Pass:
    """What one forward and backward gave."""

    loss: float
    gradients: dict[str, tuple[int, float, float]]
    """by parameter: hash, sum, and sum of absolute values"""


@dataclass(frozen=True)
class _Found:
    """What one rank found out."""

    samples: dict[str, int]  # hash of each entry of the micro-batch
    delivered: dict[str, int]  # the same of what it trains; empty on the other ranks
    passes: tuple[_Pass, _Pass]
    moved: list[str]  # names of tensors and attributes that the first pass changed
    state: dict[str, int]  # hash of each attribute before the passes
    lost: list[str]  # names of tensors that have changed, and were not restored


class Repeats:
    """Repeats of micro-batches.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.
        checks: around each micro-batch of training; under FSDP2, its units show whole gradients.
        seed: seeds the random numbers of a rank's micro-batch of the current step.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        model: nn.Module,
        checks: Checks,
        seed: Callable[[int, int], None],
    ) -> None:
        self._job = job
        self._run = run
        self._model = model
        self._checks = checks
        self._seed = seed
        self._on = True
        self.equal_at = 0  # number of the last step whose repeat was equal

        # Where a rerun gives the same bits, they are compared.
        one_host = run.local_ranks == run.ranks
        self._bits = job.exact or job.recipe.machine.deterministic
        if run.device.type == "cpu" and one_host:
            self._bits = True
        self._least = tolerance_of(job, run, model)

    def due(self, number: int) -> bool:
        """Return whether to repeat at this step: some log steps, early and then rarely.

        There is one in each interval of log lines. The intervals grow until they are as long as
        ``machine.check_every``.

        Args:
            number: of the step.
        """
        intervals = self._job.intervals
        if not self._on or not intervals.is_due("log", number):
            return False
        if number >= intervals.total:
            return True
        every = intervals.every["log"]
        line = number // every

        # Find the interval of this log line.
        longest = max(1, intervals.every["check"] // every)
        start = 1
        length = min(longest, _GROWTH - 1)
        while line >= start + length:
            start += length
            length = min(longest, (_GROWTH - 1) * start)
            if length == longest:
                start += (line - start) // length * length
        return line == start + key(self._job.recipe.seed, start) % length

    def repeat(self, batches: Iterator[Batch], position: int) -> Iterator[Batch]:
        """Repeat one micro-batch of one rank. Collective: call on every rank. Host sync.

        Args:
            batches: this rank's micro-batches of a step.
            position: of the step's first sample in the order of all samples.

        Returns:
            The micro-batches.

        Raises:
            Inexact: with ``batch.grain``, a difference.
        """
        run = self._run
        number = position // self._job.layout.size + 1
        layout = self._job.layout
        chosen, micro = divmod(
            key(self._job.recipe.seed, position) % (run.ranks * layout.accumulate),
            layout.accumulate,
        )
        delivered = [next(batches) for _ in range(micro + 1)]
        batch = self._load(position, chosen, micro)
        trained = _hashes(delivered[-1]) if run.rank == chosen else {}
        found = self._computed(batch, trained, chosen, micro)

        # All ranks judge the same reports, so that all of them raise the same error.
        reports: list[_Found] = run.gathered(found)
        for name in (name for report in reports for name in report.lost):
            raise Inexact(
                f"step {number}: a forward changes {name}, which a repeated micro-batch cannot "
                "undo, since the model has more than 64 MB; change it outside of the forward, or "
                "set machine.check_every 0",
                equal_at=self.equal_at,
            )
        why = self._difference(reports, chosen)
        if not why:
            self.equal_at = number
        elif self._job.exact:
            raise Inexact(f"step {number}: {why}", equal_at=self.equal_at)
        else:
            self._on = False
            run.display.say(f"step {number}: {why}; {DEPENDS}")
        return chain(delivered, batches)

    def _load(self, position: int, rank: int, micro: int) -> Batch:
        """Return a micro-batch of a rank, loaded again."""
        job = self._job
        layout = job.layout
        begin = position + layout.each * layout.leaf(rank, micro)
        epochs, indices = job.order.at(np.arange(begin, begin + layout.each))
        places = [*zip(epochs.tolist(), indices.tolist(), strict=True)]

        # A data worker loads it, if the run has any: this process must not touch their files.
        workers = min(1, self._run.workers(job.recipe.machine.workers))
        before = None if workers else Snapshot({"train": job.train_set, "task": job.task})
        samples = SeededSamples(job.train_set, seed=job.recipe.seed, name="train")
        loaded = loader(
            samples, job.collate, [places], workers=workers, device=self._run.device, pinned=False
        )
        [(batch, _)] = loaded
        if before is not None:
            before.restore()
        return to_device(batch, self._run.device)

    def _computed(self, batch: Batch, delivered: dict[str, int], rank: int, micro: int) -> _Found:
        """Make two passes over a micro-batch of a rank, and restore what they change."""
        model = bare(self._model)
        reshard(model)
        snapshot = Snapshot({"model": model, "task": self._job.task})
        kept = KeptTensors(model, most=_COPIED)
        try:
            with restored(model, self._run.device), _without_sync(self._model):
                first = self._pass(batch, rank, micro)
                reshard(model)
                moved = snapshot.changed()
                moved += [f"model.{name}" for name in kept.changed()]
                second = self._pass(batch, rank, micro)
        finally:
            reshard(model)
            state = snapshot.digests()
            snapshot.restore()
            lost = kept.restore()
            self._checks.units.forget()
        return _Found(_hashes(batch), delivered, (first, second), moved, state, lost)

    def _pass(self, batch: Batch, rank: int, micro: int) -> _Pass:
        """Make one forward and backward, without a sum over the ranks."""
        gradients: dict[str, Tensor] = {}
        units = self._checks.units

        def see(name: str, gradient: Tensor) -> None:
            gradients[name] = _measured(gradient)

        # The loss may change its batch in place: give it a copy.
        copy = {name: one.clone() if torch.is_tensor(one) else one for name, one in batch.items()}
        self._seed(rank, micro)
        if units.parameters:
            units.see = see
        try:
            loss, _ = self._job.task.loss(self._model, copy)
            direct = self._backward(loss)
        finally:
            units.see = None

        # Measure the gradients, and drop them.
        for name, parameter in self._model.named_parameters():
            gradient = direct.get(name, parameter.grad)
            if gradient is not None and not units.parameters:
                see(bare_name(name), gradient)
            parameter.grad = None
        rows = torch.stack([*gradients.values()]).tolist() if gradients else []  # host sync
        measured = {name: tuple(row) for name, row in zip(gradients, rows, strict=True)}
        return _Pass(float(loss.detach()), measured)

    def _backward(self, loss: Tensor) -> dict[str, Tensor]:
        """Compute the gradients; return those that are not in ``.grad``, by name."""
        model = self._model
        if not (isinstance(model, DistributedDataParallel) and model.find_unused_parameters):
            loss.backward()
            return {}

        # DDP would count all parameters of a backward as used in this step, and wait for them.
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        pairs = zip(trained, found, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def _difference(self, reports: list[_Found], chosen: int) -> str:
        """Return the first difference of the ranks' reports as a sentence; empty if there is none.

        ``chosen``: the rank that trains the micro-batch.
        """
        # The samples: as they were loaded for training, and as each rank has loaded them again.
        trained = reports[chosen].delivered
        for rank, report in enumerate(reports):
            for name in trained:
                if report.samples.get(name) != trained[name]:
                    return (
                        f"rank {rank} has loaded other values of {name!r} for the samples of a "
                        f"micro-batch than rank {chosen} trains on: the data set or collate "
                        "depends on more than the index, the epoch and the seed (a counter, a "
                        "private generator, a changed sample, a data worker's number)"
                    )

        # The same rank, twice; then each rank and the one that trains the micro-batch.
        noise = self._noise(reports)
        for rank, report in enumerate(reports):
            again = self._apart(*report.passes, noise if not self._bits else {})
            if again and self._bits:
                names = [*dict.fromkeys(report.moved)]
                changed = ", ".join(names[:3]) or "nothing that can be compared"
                return (
                    f"rank {rank} got {again} for the same micro-batch, seeds and weights the "
                    f"second time; what changed in between: {changed}"
                )
        first = reports[chosen]
        for rank, report in enumerate(reports):
            found = self._apart(first.passes[0], report.passes[0], noise)
            if found:
                differ = [
                    name for name in first.state if report.state.get(name) != first.state[name]
                ]
                changed = ", ".join(differ[:3]) or "none that can be compared"
                return (
                    f"ranks {chosen} and {rank} got {found} for the same micro-batch, seeds and "
                    f"weights; attributes that differ between them: {changed}"
                )
        return ""

    def _noise(self, reports: list[_Found]) -> dict[str, float]:
        """Return by how much reruns may differ: of the loss (""), and of each gradient."""
        if self._bits:
            return {}
        noise: dict[str, float] = {}
        for report in reports:
            one, other = report.passes
            least = self._least * abs(one.loss)
            noise[""] = max(noise.get("", least), _NOISE * abs(one.loss - other.loss))
            for name, (_, total, size) in one.gradients.items():
                again = other.gradients.get(name, (0, total, size))[1]
                least = self._least * size
                noise[name] = max(noise.get(name, least), _NOISE * abs(total - again))
        return noise

    def _apart(self, one: _Pass, other: _Pass, noise: Mapping[str, float]) -> str:
        """Return how two passes differ; empty if they do not, or are not finite."""
        if not (math.isfinite(one.loss) and math.isfinite(other.loss)):
            return ""
        if not abs(one.loss - other.loss) <= noise.get("", 0.0):
            return f"the losses {one.loss:.9g} and {other.loss:.9g}"
        for name in one.gradients.keys() | other.gradients.keys():
            mine = one.gradients.get(name)
            theirs = other.gradients.get(name)
            if mine is None or theirs is None:
                return f"a gradient of {name} only once"
            finite = math.isfinite(mine[1]) or math.isfinite(theirs[1])
            if mine[0] == theirs[0] or not finite:
                continue
            if abs(mine[1] - theirs[1]) <= noise.get(name, -1.0):
                continue
            return f"other gradients of {name} (sums {mine[1]:.9g} and {theirs[1]:.9g})"
        return ""


@contextmanager
def _without_sync(model: nn.Module) -> Iterator[None]:
    """Compute gradients of this rank alone under DDP, and leave DDP as it was."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = model.require_forward_param_sync
    try:
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = before


def _measured(gradient: Tensor) -> Tensor:
    """Return hash, sum and sum of absolute values of a gradient, in the widest dtype.

    In float64, the hash has 52 bits.
    """
    values = as_real(gradient.detach())
    wide = wide_dtype(values.device)
    short = (tensor_hash(values) >> 12).to(wide)

    # Part by part: a copy of a large gradient would need more memory than a step does.
    total = torch.zeros((), dtype=wide, device=values.device)
    size = torch.zeros_like(total)
    for part in values.reshape(-1).split(_AT_ONCE):
        copy = part.to(wide)
        total += copy.sum()
        size += copy.abs().sum()
    return torch.stack([short, total, size])


def _hashes(batch: Mapping[str, Any]) -> dict[str, int]:
    """Return a hash of each entry of a batch. Host sync."""
    hashes = {}
    for name, value in batch.items():
        if torch.is_tensor(value) and value.layout is torch.strided:
            hashes[name] = tensor_hashes([value])[0]
        elif isinstance(value, str | int | float | bool | list | tuple):
            hashes[name] = zlib.crc32(repr(value).encode())
    return hashes
