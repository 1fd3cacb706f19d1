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
from torch import Tensor
from torch.utils.data import default_collate

from oneloop.basics.differences import Texts, differences, listed
from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.seeds import restored_generators, with_restored_generators
from oneloop.basics.untrusted import damaged
from oneloop.data.current_group import CurrentGroup
from oneloop.data.fingerprint import content_of
from oneloop.data.fixed_collate import BATCH, FixedCollate
from oneloop.data.loader_arguments import (
    check_dataset,
    check_position,
    check_ranks,
    device_of,
    group_of,
    layout_of,
    place,
    place_of,
    workers_of,
)
from oneloop.data.order import checked_order, order_hash
from oneloop.data.step_batches import Group, groups

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
        if accelerator is None:
            self._rank, ranks = place(rank, ranks)
            self._device = device_of(device)
        elif (rank, ranks, device) != (None, None, None):
            raise ValueError(
                "Loader got an accelerator, and also rank, ranks or device; the accelerator knows "
                "them: remove them"
            )
        else:
            self._rank, ranks = place_of(accelerator)
            on_device = accelerator.device_placement
            self._device = accelerator.device if on_device else torch.device("cpu")
        self.layout = layout_of(batch_size, ranks, micro, grain, accelerator)
        self._order = checked_order(dataset, seed=seed, batch=batch_size, shuffle=shuffle)
        self._workers = workers_of(workers, self._device)
        self._collate = FixedCollate(collate or default_collate, weight, may_draw=grain is not None)

        # A weight that only the ranks together know is summed on the host.
        self._group: Any = None
        varies = weight is not None or bool(getattr(dataset, "skips", False))
        if varies and ranks > 1:
            self._group = group_of(ranks)

        # All ranks must have the same data, and the same samples each time.
        with restored_generators():
            content, wrong = content_of(dataset, seed=seed, workers=self._workers)
        if wrong:
            raise ValueError(
                f"the data set {wrong}; return copies of what it stores, and draw random numbers "
                "from torch's, Python's or numpy's global generator"
            )
        self._content = {"seed": str(seed), "batch size": str(batch_size), **content}
        check_ranks(ranks, self._identity(0), self._device)

        # Where the loop is.
        self._finished = 0  # groups
        self._current = CurrentGroup(accelerator, self.layout.accumulate, batch_size)
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
        if self._current.taken and not self._current.counts():
            self._current.reject_other_steps()
        return self.layout.ranks * (self.layout.accumulate if self._current.accelerator else 1)

    @property
    def position(self) -> int:
        """Return the number of groups that were trained.

        A group counts once its update was made: an optimizer of torch has stepped after its last
        batch was handed out. torch does not show a step that a ``GradScaler`` or a guard leaves
        out: such a group counts when the loop over its batches has ended, or at once, if the
        accelerator has prepared the optimizer. Each group counts at the latest when the next one
        is handed out. Groups that were only loaded ahead do not count.

        Setting it selects the next group, but not between the batches of a group.

        Raises:
            RuntimeError: the position is set between the batches of a group.
        """
        return self._finished + self._current.counts()

    @position.setter
    def position(self, position: int) -> None:
        check_position(position, self.batch_size)
        self._current.reject_inside(f"position {position}")
        self._go_to(position)

    def _go_to(self, position: int) -> None:
        self._finished = position
        self._current.hand_out()
        self._loop = None

    def __iter__(self) -> Iterator[Group]:
        # A group that the loop before has left is finished, or repeated: as for a state.
        self._current.reject_inside("a new loop")
        self._go_to(self.position)
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
                self._current.reject_inside("the next step")
                for _ in batches:  # of a group that the loop has left out
                    pass
                group.used = True
                self._finished += 1
                self._current.hand_out()

    def _check_loop(self, loop: object) -> None:
        if self._loop is not loop:
            raise RuntimeError(
                "another loop over this Loader has begun, or its position was set, and only the "
                "newest can continue; make one Loader for each loop"
            )

    def _counted(self, batches: Iterator[Any], loop: object) -> Iterator[Any]:
        """Yield the user's batches of a group, and count them."""
        for loaded in batches:
            self._check_loop(loop)
            self._current.take()
            yield loaded[BATCH]
        self._check_loop(loop)
        self._current.end()

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
        if self._group is None:
            # All ranks have as many samples, or there is one rank.
            each = 1 if self._collate.weight else ranks
            for group in stream:
                group.total = each * rounded_sum(group.addends(0, 1))
                yield group
            return

        upcoming: tuple[int, Group, Tensor, Any] | None = None
        for number, group in enumerate(stream, start=self._finished + 1):
            # The number of the step shows whether all ranks sum up the same group.
            addends = [*group.addends(self._rank, ranks), float(number)]
            sums = torch.tensor(addends, dtype=torch.float64)
            work = dist.all_reduce(sums, group=self._group, async_op=True)
            current = upcoming
            upcoming = (number, group, sums, work)
            if current:
                yield _with_total(ranks, *current)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what a state must agree with: seed, batch size and data.

        Take it before the first batch of a group is used, or when the group counts: see
        :attr:`position`.

        Raises:
            RuntimeError: a batch of a group was used, and the group does not count.
        """
        self._current.reject_state()
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
        self._go_to(state["position"])

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reject the state of another loader, before anything is loaded.

        Raises:
            ValueError: the state is damaged, or has another seed, batch size, order or data set.
            RuntimeError: a group has begun, and its last batch is not used.
        """
        self._current.reject_inside("a loaded state")
        with damaged("the state of a Loader"):
            check_position(state["position"], self.batch_size)
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
