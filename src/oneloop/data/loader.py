"""A loader of training data for your own loop: the same samples in each step on any layout.

>>> loader = Loader(dataset, batch_size=256, accelerator=accelerator)
>>> for group in loader:                        # the micro-batches of one optimizer step
...     for batch in group:
...         with accelerator.accumulate(model):
...             loss = loss_function(model(batch["x"]), batch["y"]).sum()
...             accelerator.backward(loss * loader.factor / group.total)
...             optimizer.step()
...             optimizer.zero_grad()
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import GradientState
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from oneloop.basics.differences import Texts, differences, listed
from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.launcher import local_ranks
from oneloop.basics.launcher import ranks as launched_ranks
from oneloop.basics.seeds import (
    random_states,
    restored_generators,
    with_restored_generators,
)
from oneloop.basics.system.processes import usable_cores
from oneloop.basics.tensors import host_group
from oneloop.basics.untrusted import damaged
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.data_workers import workers_here
from oneloop.data.fingerprint import content_of
from oneloop.data.order import checked_order, order_hash
from oneloop.data.step_batches import Group, groups

_BATCH = "batch"  # the user's batch, among what travels with it
_CPU = torch.device("cpu")
_REQUESTED = "requested before oneloop"
"""in the settings of Accelerate: the ``gradient_accumulation_steps`` before the first group"""
_ORDER = "order of the samples (shuffle, or order() of the data set)"


class Loader:
    """The samples of a data set in an endless, seeded order, by optimizer step.

    ``for group in loader`` yields the micro-batches of this process for one step, and
    ``for batch in group`` the batches, on the device. ``len(group)`` is their number, and
    ``group.total`` the weight of the global batch: of all micro-batches of all processes.
    Each step has the same samples on any number of processes, with any micro-batch size and any
    number of data workers. Data is loaded ahead. A sample's random numbers depend on ``seed``, the
    epoch and the sample; the generators of this process stay as they are. Without data workers,
    loop in the thread that trains: loading seeds the generators of the process for a moment.

    The state is :attr:`position`. Save it with ``accelerator.register_for_checkpointing(loader)``,
    or with :meth:`state_dict`, on which torch.distributed.checkpoint relies, too.
    Do not prepare a loader with Accelerate or Fabric: it already gives each process its part.

    >>> loader = Loader(dataset, batch_size=256, accelerator=accelerator)
    >>> accelerator.register_for_checkpointing(loader)

    With Fabric, or torch's DDP:

    >>> Loader(dataset, 256, rank=fabric.global_rank, ranks=fabric.world_size, device=fabric.device)

    Args:
        dataset: map-style (``__len__`` and ``__getitem__``), for example of torch or ``datasets``,
            or a :class:`oneloop.tasks.rows.mixture.Mixture`. A set may have its own ``order(seed=…,
            batch=…)``, and what else :mod:`oneloop.data.order` and ``SeededSamples`` ask for.
        batch_size: samples of one optimizer step, on all processes.
        seed: of the order, and of the samples' random numbers.
        shuffle: False: the samples are read in their order, in each epoch.
        accelerator: its processes divide each step. Each group sets its
            ``gradient_accumulation_steps`` to the number of micro-batches, so that ``accumulate()``
            updates once per group.
        micro: samples of a micro-batch; None: as many as the accelerator's
            ``gradient_accumulation_steps`` need, else all of this process.
        collate: makes a batch of a list of samples; None: torch's ``default_collate``. Tensors in
            dicts, lists and tuples are moved to the device. It must not draw random numbers, except
            with ``grain``.
        weight: returns the weight of a batch, such as its number of target tokens; None: its
            samples. On several processes, each step then makes one small all-reduce on the host,
            while the step before it trains.
        workers: processes that load data for this process; ``auto``: none on a CPU.
        grain: samples of a micro-batch that has the same samples on every layout.
        rank: of this process, in place of an accelerator.
        ranks: number of processes, in place of an accelerator.
        device: where batches go, in place of an accelerator; None: torch's current accelerator, or
            the CPU.

    Raises:
        ValueError: an argument is wrong, or the batch cannot be divided. Or the ranks have
            different data, or a sample differs when it is loaded again with the same seeds.
        TypeError: the data set has no ``__len__`` and ``__getitem__``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        accelerator: Accelerator | None = None,
        micro: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        weight: Callable[[Any], Tensor | float] | None = None,
        workers: int | str = "auto",
        grain: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_dataset("Loader", dataset)
        self.dataset = dataset
        self._length = len(dataset)
        self.batch_size = batch_size
        self.seed = seed

        # Which part of a step is this process's?
        self._accelerator = accelerator
        self._rank, ranks, self._device = place_of(accelerator, rank, ranks, device)
        self.layout = layout_of(batch_size, ranks, micro, grain, accelerator)
        self._order = checked_order(dataset, seed=seed, batch=batch_size, shuffle=shuffle)
        cores = usable_cores() // local_ranks()
        self._workers = workers_here(workers, device=self._device, cores=cores)
        self._collate = FixedCollate(collate or default_collate, weight, may_draw=grain is not None)

        # Ranks of torch.distributed compare their data on the host, and sum up weights that only
        # all of them together know.
        world = dist.get_world_size() if dist.is_initialized() else 1
        group = host_group() if world == ranks > 1 else None
        varies = weight is not None or getattr(dataset, "skips", False)
        if varies and ranks > 1 and group is None:
            raise ValueError(
                f"the weights of {ranks} processes are summed over all processes of "
                f"torch.distributed, which has {world}; call init_process_group first, or leave "
                "out weight"
            )
        self._group = group if varies else None

        # All ranks must have the same data, and the same samples each time.
        with restored_generators():
            content, wrong = content_of(dataset, seed=seed, workers=self._workers)
        if wrong:
            raise ValueError(
                f"the data set {wrong}; return copies of what it stores, and draw random numbers "
                "from torch's, Python's or numpy's global generator"
            )
        self._content = {"seed": str(seed), "batch size": str(batch_size), **content}
        if group is not None:
            check_ranks(self._identity(0), group)

        # Where the loop is.
        self._finished = 0  # groups before the current one
        self._taken = 0  # batches of the current group that were handed out
        self._loop: object = None  # the newest loop; None: the position was set since it began

    @property
    def factor(self) -> int:
        """Return the factor of a micro-batch's summed loss, which is divided by ``group.total``.

        It undoes the means of DDP and FSDP2 over processes, and of Accelerate over micro-batches.

        A mean loss would be too small by the weight of its micro-batch, and no error would show
        it. Multiply a mean by what it was divided by: by ``len(x)``, or by the number of target
        tokens of this micro-batch if ``weight`` counts tokens.

        >>> accelerator.backward(mean * len(x) * loader.factor / group.total)

        Raises:
            RuntimeError: Accelerate divides by the number of micro-batches of another group.
        """
        if self._taken:
            self._reject_other_steps()
        return self.layout.ranks * (self.layout.accumulate if self._accelerator else 1)

    @property
    def position(self) -> int:
        """Return the number of groups whose batches were all handed out.

        Save a state after the update of a group, or before its first batch is used: between its
        last batch and its update, a state counts the group without its update. Groups that were
        only loaded ahead do not count.

        Setting it selects the next group, but not between the batches of a group.

        Raises:
            RuntimeError: the position is set between the batches of a group.
        """
        return self._finished + (self._taken == self.layout.accumulate)

    @position.setter
    def position(self, position: int) -> None:
        check_position(position)
        self._go_to(position, f"position {position}")

    def _go_to(self, position: int, event: str) -> None:
        self._reject_inside(event)
        self._finished = position
        self._taken = 0
        self._loop = None

    def __iter__(self) -> Iterator[Group]:
        self._go_to(self.position, "a new loop")
        while True:
            loop = self._loop = object()
            for group in self._summed(self._loaded()):
                # Hand the group out.
                if not 0 < group.total < math.inf:
                    raise ValueError(
                        f"the weight of step {self._finished + 1} is {group.total}, so its mean "
                        "loss is not defined; remove samples without weight, or correct weight"
                    )
                batches = group.batches
                group.batches = self._counted(batches, loop)
                yield group

                # It is finished now, unless the position was set meanwhile.
                if self._loop is None:
                    break
                self._check_loop(loop)
                self._reject_inside("the next step")
                for _ in batches:  # of a group that the loop has left out
                    pass
                group.used = True
                self._finished += 1
                self._taken = 0

    def _check_loop(self, loop: object) -> None:
        if self._loop is not loop:
            raise RuntimeError(
                "another loop over this Loader has begun, or its position was set, and only the "
                "newest can continue; make one Loader for each loop"
            )

    def _counted(self, batches: Iterator[Any], loop: object) -> Iterator[Any]:
        """Yield the user's batches of a group, and count them.

        From its first batch to its last, the group belongs to the accelerator, which counts the
        batches in ``accumulate()`` and adds up their gradients. Nothing else may begin in between.
        """
        for loaded in batches:
            self._check_loop(loop)
            if not self._taken:
                if self._accelerator:
                    self._reject_inside("a group")
                    accumulate_group(self._accelerator, self.layout.accumulate)
                self._reject_other_steps()
            self._taken += 1
            yield loaded[_BATCH]

    def _reject_inside(self, event: str) -> None:
        """Raise RuntimeError if this group, or another of its accelerator, is not complete.

        Args:
            event: what happens now.
        """
        number = self.layout.accumulate
        done = self._taken % number
        # Accelerate knows whether batches are trained that were handed out all at once.
        if self._accelerator and not self._accelerator.sync_gradients:
            done = done or self._accelerator.step
            number = self._accelerator.gradient_accumulation_steps
        if done:
            raise RuntimeError(
                f"{event} of the Loader with batch_size {self.batch_size} comes inside a group, "
                f"after batch {done} of its {number}. A group makes one update: use all its "
                "batches before that (with Accelerate, each inside accumulate), or keep them with "
                "batches = list(group). Gradients of a group that was left remain: make "
                "accelerator, model, optimizer and Loader again, and load a state"
            )

    def _reject_other_steps(self) -> None:
        """Raise RuntimeError if Accelerate divides losses by a number unknown to ``factor``."""
        known = self.layout.accumulate if self._accelerator else 1
        if GradientState._shared_state and GradientState().num_steps != known:
            raise RuntimeError(
                f"an Accelerator of this process has gradient_accumulation_steps "
                f"{GradientState().num_steps}, by which its backward() divides losses, but the "
                f"Loader with batch_size {self.batch_size} expects {known}. If this Loader has no "
                "accelerator, give it accelerator=. If another Loader has begun a group, train "
                "each group before the next one begins, or give both Loaders one number of "
                "micro-batches"
            )

    def _loaded(self) -> Iterator[Group]:
        """Yield the groups of this process, from the position on."""
        stream = groups(
            self.dataset,
            self._collate,  # type: ignore[arg-type]
            self._order,
            self.layout,
            rank=self._rank,
            seed=self.seed,
            start=self._finished * self.batch_size,
            device=self._device,
            workers=self._workers,
        )
        return stream if self._workers else with_restored_generators(stream)

    def _summed(self, stream: Iterator[Group]) -> Iterator[Group]:
        """Yield the groups with the weights of their global batches.

        The all-reduce of a group takes place while the group before it trains.
        """
        ranks = self.layout.ranks
        upcoming: tuple[int, Group, Tensor, Any] | None = None
        for number, group in enumerate(stream, start=self._finished + 1):
            if self._group is None:
                # All ranks have as many samples, or there is one rank.
                each = 1 if self._collate.weight else ranks
                group.total = each * rounded_sum(group.addends(0, 1))
                yield group
                continue

            # The number of the step shows whether all ranks sum up the same group.
            addends = [*group.addends(self._rank, ranks), float(number)]
            sums = torch.tensor(addends, dtype=torch.float64)
            work = dist.all_reduce(sums, group=self._group, async_op=True)
            if upcoming:
                yield _with_total(ranks, *upcoming)
            upcoming = (number, group, sums, work)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what a state must agree with: seed, batch size and data.

        Take it after the update of a group: see :attr:`position`.

        Raises:
            RuntimeError: the current group has begun, and its last batch was not handed out.
        """
        self._reject_inside("a state")
        position = self.position
        return {"position": position, "identity": self._identity(position)}

    def _identity(self, position: int) -> Texts:
        """Return what a state must agree with: seed, batch size, data, and order at a position."""
        start = position * self.batch_size
        order = order_hash(self._order, self._length, self.batch_size, position=start)
        return {**self._content, _ORDER: order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the groups that this state counts; in a loop, from its next group on.

        Raises:
            ValueError, RuntimeError: as :meth:`check_state_dict`.
        """
        self.check_state_dict(state)
        self._go_to(state["position"], "a loaded state")

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reject the state of another loader, before anything is loaded.

        Raises:
            ValueError: the state is damaged, or has another seed, batch size, order or data set.
            RuntimeError: a group has begun, and its last batch was not handed out.
        """
        self._reject_inside("a loaded state")
        with damaged("the state of a Loader"):
            check_position(state["position"])
            lines = differences(state["identity"], self._identity(state["position"]))
        if lines:
            raise ValueError(
                f"the state is of another Loader ({listed(lines)}): its steps have other samples; "
                "use its arguments and its data set, or begin without this state"
            )


def _with_total(ranks: int, number: int, group: Group, sums: Tensor, work: Any) -> Group:
    work.wait()
    *weights, numbers = sums.tolist()
    if numbers != ranks * number:
        raise RuntimeError(
            f"the ranks sum up the weights of different steps: this one of step {number}, another "
            "rank of another step. Its loop began again, or its position was set; do both on all "
            "ranks, and after an exception on one rank, end all"
        )
    group.total = rounded_sum(weights)
    return group


class FixedCollate:
    """A collate function with the weight: [(index, sample)] -> ({_BATCH: batch}, weight).

    A random number that it drew would depend on how a step is divided into micro-batches. The first
    batch of each process shows whether it draws.

    Args:
        collate: makes a batch, of any form, from samples.
        weight: returns the weight of a batch; None: its number of samples.
        may_draw: whether it may draw random numbers, because the division is fixed.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        weight: Callable[[Any], Tensor | float] | None,
        *,
        may_draw: bool,
    ) -> None:
        self.collate = collate
        self.weight = weight
        self._checked = may_draw

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[dict[str, Any], float]:
        values = []
        for index, sample in samples:
            if sample is None and not self.weight:
                raise ValueError(
                    f"sample {index} of the data set is None; to leave it out, raise "
                    "oneloop.data.skipped_rows.SkipSample in __getitem__, and give the class "
                    "skips = True"
                )
            values.append(sample)

        states = None if self._checked else random_states(_CPU)
        batch = self.collate(values)
        if states and states != random_states(_CPU):
            raise ValueError(
                "collate draws random numbers, which depend on how a step is divided; draw them in "
                "the data set's __getitem__ (for a collator of transformers, by "
                "oneloop.tasks.language.drawn_samples.DrawnSamples), or set grain"
            )
        self._checked = True
        weight = len(values) if self.weight is None else self.weight(batch)
        return {_BATCH: batch}, float(weight)


def check_dataset(user: str, dataset: Any) -> None:
    """Raise TypeError, unless it is a map-style data set.

    Args:
        user: the class that needs it, in messages.
        dataset: the argument.
    """
    members = all(hasattr(dataset, name) for name in ("__len__", "__getitem__"))
    if isinstance(dataset, IterableDataset) or not members:
        raise TypeError(
            f"{user} needs a data set with __len__ and __getitem__, got {type(dataset).__name__}: "
            "give it the data set of a loader or sampler; a stream has no position to resume from "
            "(see docs/how-to/from-streams.md)"
        )
    # Their [index] is a column, or no sample.
    table = hasattr(dataset, "columns") and hasattr(dataset, "shape")
    if table or (isinstance(dataset, Mapping) and 0 not in dataset):
        raise TypeError(
            f"{user} needs rows, and {type(dataset).__name__} has columns or splits; give it one "
            "split, datasets.Dataset.from_dict(columns), or a list of rows: "
            "frame.to_dict('records') of pandas, .to_dicts() of polars, .to_pylist() of pyarrow"
        )


def place_of(
    accelerator: Accelerator | None,
    rank: int | None,
    ranks: int | None,
    device: torch.device | str | None,
) -> tuple[int, int, torch.device]:
    """Return rank, number of processes, and where batches go.

    Args:
        accelerator: of the Loader, if it has one.
        rank: this process, in place of an accelerator.
        ranks: number of processes, in place of an accelerator.
        device: in place of an accelerator; None: torch's current accelerator, or the CPU.
    """
    if accelerator is None:
        if rank is None and ranks is None:
            world = dist.get_world_size() if dist.is_initialized() else launched_ranks()
            if world > 1:
                raise ValueError(
                    f"Loader runs on {world} processes, and each would load all samples; give it "
                    "the accelerator, or rank and ranks"
                )
            rank, ranks = 0, 1
        if rank is None or ranks is None or not 0 <= rank < ranks:
            raise ValueError(
                f"Loader needs both 0 <= rank < ranks, got rank {rank} and ranks {ranks}"
            )
        device = device or torch.accelerator.current_accelerator(check_available=True)
        return rank, ranks, torch.device(device or "cpu")

    if (rank, ranks, device) != (None, None, None):
        raise ValueError(
            "Loader got an accelerator, and also rank, ranks or device; the accelerator knows "
            "them: remove them"
        )
    kind = accelerator.distributed_type.value
    parallel = accelerator.parallelism_config
    divided = parallel and parallel.non_data_parallel_size > 1
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or divided:
        raise ValueError(
            f"Loader divides a step among all processes of DDP and FSDP, and not with {kind} or "
            "tensor, context or sequence parallelism; give rank and ranks of the data-parallel "
            "group in place of the accelerator"
        )
    placed = accelerator.device if accelerator.device_placement else torch.device("cpu")
    return accelerator.process_index, accelerator.num_processes, placed


def layout_of(
    batch_size: int,
    ranks: int,
    micro: int | None,
    grain: int | None,
    accelerator: Accelerator | None,
) -> BatchLayout:
    """Return how a step is divided. Raise ValueError in the words of a Loader.

    Args:
        batch_size: samples of a step, on all processes.
        ranks: number of processes.
        micro: samples of a micro-batch; None: what the accelerator's
            ``gradient_accumulation_steps`` need.
        grain: samples of a micro-batch that is the same on every layout.
        accelerator: of the Loader, if it has one.
    """
    for name, value in {"batch_size": batch_size, "micro": micro, "grain": grain}.items():
        if value is not None and not (isinstance(value, int) and value > 0):
            raise ValueError(f"{name} of a Loader must be a positive integer, got {value!r}")
    if micro and grain and micro != grain:
        raise ValueError(
            f"micro {micro} and grain {grain} of a Loader are both sizes of a micro-batch; give one"
        )

    # Follow what the user has set, not a group of another Loader.
    steps = 1
    if accelerator:
        steps = accelerator.gradient_accumulation_steps
        steps = accelerator.gradient_state.plugin_kwargs.get(_REQUESTED, steps)
    if steps > 1 and micro is None:
        micro = max(1, batch_size // (ranks * steps))
    sharded = accelerator is not None and accelerator.is_fsdp2
    try:
        layout = BatchLayout(batch_size, ranks, micro, grain=grain, sharded=sharded)
    except ValueError as error:
        message = str(error).replace("batch.size", "batch_size").replace("batch.", "")
        raise ValueError(message) from None
    if steps not in (1, layout.accumulate):
        raise ValueError(
            f"batch_size {batch_size} over {ranks} processes has {layout.accumulate} micro-batches "
            f"of {layout.each} in a group, but the accelerator's gradient_accumulation_steps are "
            f"{steps}; leave out micro and grain, or that setting, and let batch_size be a "
            "multiple of processes x gradient_accumulation_steps"
        )
    return layout


def check_ranks(own: Mapping[str, Any], group: Any) -> None:
    """Raise ValueError on all ranks if they differ in what they must have in common. Collective.

    Args:
        own: of this rank, by name: seed, batch size and data.
        group: of all ranks, on the host.
    """
    reports: list[Any] = [None] * group.size()
    dist.all_gather_object(reports, own, group=group)
    for rank, report in enumerate(reports):
        lines = differences(reports[0], report)
        if lines:
            raise ValueError(
                f"the Loaders of the ranks differ (rank 0 -> rank {rank}): {listed(lines)}; give "
                "all ranks the same seed, batch size and data set (shuffle or divide data with one "
                "seed)"
            )


def accumulate_group(accelerator: Accelerator, number: int) -> None:
    """Let ``accumulate()`` count the batches of a new group, whatever happened before.

    A state may have been loaded, the setting changed by another Accelerator or Loader, or a
    prepared DataLoader left at its last batch.

    Args:
        accelerator: of the Loader.
        number: batches of the group, on this process.

    Raises:
        ValueError: the accelerator has prepared a scheduler, which then counts processes.
    """
    for scheduler in accelerator._schedulers:
        if scheduler.step_with_optimizer and not scheduler.split_batches:
            raise ValueError(
                f"the accelerator has prepared the scheduler {type(scheduler.scheduler).__name__}, "
                "so that each step() counts once for each process; do not prepare it: step it once "
                "after the loop over a group, and save it by register_for_checkpointing. Or create "
                "Accelerator(step_scheduler_with_optimizer=False)"
            )
    settings = accelerator.gradient_state.plugin_kwargs
    settings.setdefault(_REQUESTED, accelerator.gradient_accumulation_steps)
    settings["sync_with_dataloader"] = False
    settings["num_steps"] = number
    accelerator.step = 0


def check_position(position: Any) -> None:
    """Raise ValueError unless this is a number of groups."""
    if type(position) is not int or position < 0:
        raise ValueError(f"the position of a Loader is a number of groups, got {position!r}")
