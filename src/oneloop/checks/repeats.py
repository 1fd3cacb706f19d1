"""What is compared while a run trains: nothing but samples, seeds and weights may matter.

At some log lines, all ranks load the samples of one micro-batch again, and compute its loss and its
gradients twice, with the seeds of the rank that trains it. They must get what this rank has loaded,
and the same results each time, and the passes must leave all tensors as they were. A difference
comes from state that samples, seeds and weights do not determine: tensors that a forward changes,
attributes that change late, private generators, the number of a data worker, code that asks for its
rank, or a faulty device.

The repeat restores what it changes. It needs the memory of one micro-batch of a step, and of two
more copies of its samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import numpy as np
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.content_hash import content_hashes
from oneloop.basics.differences import differences
from oneloop.basics.exit_codes import Inexact
from oneloop.basics.seeds import key
from oneloop.basics.tensors import restored_buffers
from oneloop.checkpoint.weights import bare
from oneloop.checks.passes import Pass, Wrapped, run_pass, whole_parameters
from oneloop.checks.replicas import compare_replicas
from oneloop.checks.reports import Report, describe_difference
from oneloop.checks.samples import copied
from oneloop.checks.state import Values, registered, restored, state_hashes
from oneloop.checks.tolerance import rounding_of
from oneloop.data.seeded_samples import SeededSamples, StepPlaces
from oneloop.data.step_batches import Batch, Group, loader, to_device
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.launch.processes import Run
from oneloop.machine.blocks import statistics_of
from oneloop.machine.fsdp2_units import Units
from oneloop.task_protocol.whole_batch import is_whole_batch

DEPENDS = "another parallel layout trains a different model"
"""what follows from a difference, for messages"""
_COPIED = 1 << 26  # bytes of parameters that are copied for a repeat

Place = tuple[int, int, int]
"""position of a step's first sample, rank, and number of the micro-batch"""


class Checks:
    """Comparisons while a run trains, unless ``machine.check_every`` is 0.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.
        trial: what the preflight check found out.
        seed: seeds the random numbers of a micro-batch, by :data:`Place`.
        units: those of FSDP2, which count the forwards of a step.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        model: nn.Module,
        trial: Preflight,
        *,
        seed: Callable[..., None],
        units: Units,
    ) -> None:
        self._job = job
        self._run = run
        self._model = model
        self._seed = seed
        self._units = units
        self.equal_at = 0  # number of the last step whose comparisons were equal

        # Which tensors may change, and a change of which is an error?
        self._moving = set(trial.moved)
        self._rejected: tuple[str, ...] = ()
        if job.exact:
            self._rejected = ("parameter", "buffer")
        elif run.ranks > 1:
            self._rejected = ("parameter",)

        # A model that is known to be stateful would only be reported once more. A loss over the
        # whole batch computes each embedding twice, and needs equal ones.
        self._strict = job.exact or is_whole_batch(job.task)
        self._reported = bool(trial.stateful) and not self._strict
        # Where a rerun gives the same bits, they are compared.
        on_one_host = run.device.type == "cpu" and run.local_ranks == run.ranks
        bits = job.exact or job.recipe.machine.deterministic or on_one_host
        self._least = None if bits else rounding_of(job, run, model).tolerance

        # Of the last comparison: tensors, their hashes, and what no update changes (of a trained
        # tensor the object, of another one the hash).
        self._tensors: dict[str, Tensor] = {}
        self._hashes: dict[str, int] = {}
        self._marks: dict[str, int] = {}

    def repeat_if_due(self, group: Group, position: int) -> None:
        """At some log lines, repeat a micro-batch of a step. Collective: call on every rank.

        :meth:`oneloop.job.build.Intervals.is_repeated` chooses them.

        Args:
            group: this rank's micro-batches of the step, which it still has afterwards.
            position: index of the step's first sample in the order of all samples.

        Raises:
            Inexact: a result depends on the parallel layout, and the run promises otherwise.
            ReplicasDiffer: two ranks hold different weights.
        """
        if "check" not in self._job.intervals.every:
            return
        if not self._marks:
            self._changed_since()
        number = position // self._job.layout.size + 1
        if self._job.intervals.is_repeated(number, seed=self._job.recipe.seed):
            self._repeat(group, position, number)

    @contextmanager
    def unchanged(self, what: str) -> Iterator[None]:
        """Compare all tensors before and after this context. Collective; host sync.

        Args:
            what: happens in it, for messages.

        Raises:
            Inexact: a tensor has changed.
        """
        if "check" not in self._job.intervals.every:
            yield
            return
        before = state_hashes(self._model)
        with whole_parameters(self._model):
            yield
        names = differences(before, state_hashes(self._model))
        self._judge(self._run.gathered(dict.fromkeys(names, f"in {what}")), "")

    def _repeat(self, group: Group, position: int, number: int) -> None:
        """Repeat one micro-batch of one rank on all ranks, and judge the results."""
        run = self._run
        accumulate = self._job.layout.accumulate
        rank, micro = divmod(
            key(self._job.recipe.seed, position) % (run.ranks * accumulate), accumulate
        )
        place = position, rank, micro

        # What this rank trains on, and the same samples loaded again.
        delivered = [next(group.batches) for _ in range(micro + 1)]
        group.batches = chain(delivered, group.batches)
        trained = content_hashes(delivered[-1])
        batch = self._load(place)

        # All ranks judge the same reports, so that all of them raise the same error.
        try:
            mine = self._compute_twice(batch, trained, place)
        except Inexact as error:
            raise Inexact(f"step {number}: {error}", equal_at=self.equal_at) from None
        reports: list[Report] = run.gathered(mine)
        if self._judge([report.changes for report in reports], f"step {number}: "):
            return
        compare_replicas({n: report.shared for n, report in enumerate(reports)}, step=number)

        # Buffers that move differ between ranks. Only those of BatchNorm do not matter.
        across = self._moving <= statistics_of(bare(self._model))
        why = describe_difference(reports, rank, least=self._least, across=across)
        if not why:
            self.equal_at = number
        elif not self._reported:
            self._reported = True
            if self._strict:
                raise Inexact(f"step {number}: {why}", equal_at=self.equal_at)
            run.display.say(f"step {number}: {why}; {DEPENDS}")

    def _judge(self, reports: Iterable[Mapping[str, str]], start: str) -> bool:
        """Raise Inexact if a tensor has changed that must not, or report the first change.

        Args:
            reports: of each rank, the tensors that have changed, and when: "in an evaluation".
            start: of the message.

        Returns:
            Whether a change was reported.
        """
        sentences: dict[str, str] = {}
        for report in reports:
            for name, when in report.items():
                if name not in self._moving:
                    sentences.setdefault(name, f"the {name} has changed {when}, not by an update")
        for name, why in sentences.items():
            if name.startswith(self._rejected):
                raise Inexact(
                    f"{start}{why}, so the weights would depend on the parallel layout; let "
                    "nothing but the optimizer change it, or train on one process without "
                    "batch.grain",
                    equal_at=self.equal_at,
                )
        for why in [*sentences.values()][:1]:
            self._run.display.say(f"{start}{why}; {DEPENDS}")
        self._moving |= sentences.keys()
        return bool(sentences)

    def _load(self, place: Place) -> Batch:
        """Return a micro-batch, loaded again."""
        job = self._job
        layout = job.layout
        position, rank, micro = place
        begin = position + layout.each * layout.leaf(rank, micro)
        epochs, indices = job.order.at(np.arange(begin, begin + layout.each))
        places = StepPlaces(zip(epochs.tolist(), indices.tolist(), strict=True))
        places.position = position  # a data set may follow the progress of the run

        # A data worker loads it, if the run has any: this process must not touch their files.
        workers = min(1, self._run.workers(job.recipe.machine.workers))
        before = Values({"train": job.train_set, "task": job.task}, set())
        samples = SeededSamples(job.train_set, seed=job.recipe.seed, name="train")
        [(batch, _)] = loader(
            samples, job.collate, [places], workers=workers, device=self._run.device, pinned=False
        )
        before.restore()
        return to_device(batch, self._run.device)

    def _compute_twice(self, batch: Batch, trained: dict[str, str], place: Place) -> Report:
        """Make two passes over a micro-batch, and undo what they change."""
        model = bare(self._model)
        changes = self._changed_since()
        shared = {}
        for name, tensor in self._tensors.items():
            # A buffer that differs shows in the results, if it matters.
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor):
                shared[name] = self._hashes[name]
        others = {"task": self._job.task}
        try:
            with restored(self._run.device, model, others, most=_COPIED) as values:
                # Buffers that may move are the same in both passes.
                with restored_buffers(model):
                    first = self._pass(batch, place)
                    after = state_hashes(model)
                    attributes = values.changed()
                second = self._pass(batch, place)
        finally:
            self._units.forget()
        changes |= dict.fromkeys(differences(self._hashes, after), "in a forward")
        samples = content_hashes(batch)
        return Report(samples, trained, changes, attributes, shared, (first, second))

    def _changed_since(self) -> dict[str, str]:
        """Return which tensors have changed since the last call, but not by updates, and when."""
        before = self._marks
        # The last tensors are alive until now, so that no other one has their addresses.
        self._tensors = registered(self._model)
        self._hashes = state_hashes(self._model)
        self._marks = {}
        for name, tensor in self._tensors.items():
            self._marks[name] = id(tensor) if tensor.requires_grad else self._hashes[name]
        changed = differences(before, self._marks) if before else {}
        return dict.fromkeys(changed, f"since step {self.equal_at}")

    def _pass(self, batch: Batch, place: Place) -> Pass:
        """Make one forward and backward over a micro-batch."""
        replicated = self._run.ranks > 1 and not self._run.sharded
        model = Wrapped(bare(self._model)) if replicated else self._model
        # The loss may change its batch in place: give it a copy.
        copy = copied(batch)
        self._seed(*place)
        return run_pass(model, lambda: self._job.task.loss(model, copy)[0])
