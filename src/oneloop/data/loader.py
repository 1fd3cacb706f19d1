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

from oneloop.basics.exact_sums import rounded_sum
from oneloop.basics.seeds import with_own_generators
from oneloop.basics.update_count import UPDATES
from oneloop.data.current_group import CurrentGroup
from oneloop.data.fixed_collate import BATCH, FixedCollate
from oneloop.data.loader_arguments import (
    check_accumulation,
    check_dataset,
    check_marks,
    check_position,
    check_ranks,
    device_of,
    group_of,
    layout_of,
    marks,
    micro_of,
    place,
    place_of,
    reject_unknown,
    workers_of,
)
from oneloop.data.loader_identity import Identity
from oneloop.data.order import checked_order
from oneloop.data.step_batches import Group, groups


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
            batch=…)``.
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
        TypeError: the data set has no ``__len__`` and ``__getitem__``, or an argument is unknown.
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
        **unknown: Any,
    ) -> None:
        reject_unknown(unknown)
        check_dataset("Loader", dataset, Loader)
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self._accelerator = accelerator

        # Which part of a step is this process's?
        sharded = False
        if accelerator is None:
            self._rank, ranks = place(rank, ranks)
            self._device = device_of(device)
        elif (rank, ranks, device) != (None, None, None):
            raise ValueError(
                "Loader got an accelerator, and also rank, ranks or device; the accelerator knows "
                "them: remove them"
            )
        else:
            self._rank, ranks, sharded = place_of(accelerator)
            on_device = accelerator.device_placement
            self._device = accelerator.device if on_device else torch.device("cpu")

        # Divide the step.
        if accelerator is not None and micro is None and grain is None:
            micro = micro_of(accelerator, batch_size, ranks)
        self.layout = layout_of(batch_size, ranks, micro, grain, sharded=sharded)
        if accelerator is not None:
            check_accumulation(accelerator, self.layout.accumulate)
        self._order = checked_order(dataset, seed=seed, batch=batch_size, shuffle=shuffle)
        self._workers = workers_of(workers, self._device)
        self._collate = FixedCollate(collate or default_collate, weight, may_draw=grain is not None)

        # A weight that only the ranks together know is summed on the host.
        self._group: Any = None
        varies = weight is not None or bool(getattr(dataset, "skips", False))
        if varies and ranks > 1:
            self._group = group_of(ranks)

        # All ranks must have the same data, and the same samples each time.
        self._identity = Identity(
            dataset, self._order, seed=seed, batch_size=batch_size, workers=self._workers
        )
        check_ranks(ranks, self._identity.of_rank(), self._device)

        # Where the loop is.
        UPDATES.watch()
        self._finished = 0  # groups
        self._current = CurrentGroup(accelerator, self.layout.accumulate, batch_size)
        self._loops = 0  # loops over this loader that began
        self._moved = False  # whether the position was set in a loop

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
        if self._current.taken and not self._current.was_updated():
            self._current.reject_other_steps()
        return self.layout.ranks * (1 if self._accelerator is None else self.layout.accumulate)

    @property
    def position(self) -> int:
        """Return the number of groups that were trained.

        A group counts when an optimizer has stepped after its last batch was handed out, or a
        ``GradScaler`` or :class:`oneloop.optim.bad_step_guard.Guard` has left out this step. It
        counts at the latest when the next group is handed out: if your loop itself leaves out an
        update, or has no optimizer of torch. Groups that were only loaded ahead do not count.

        Setting it selects the next group: before the loop any one, later only an earlier one, and
        not between the batches of a group.

        Raises:
            RuntimeError: an optimizer has stepped before the last batch of the group, or the
                position is set between its batches.
        """
        return self._finished + self._current.was_updated()

    @position.setter
    def position(self, position: int) -> None:
        check_position(position, self.batch_size)
        if self._loops and position > self.position:
            raise ValueError(
                f"position {position} is beyond the {self.position} groups that were trained, so "
                "samples would be left out; set it before the loop, or load a saved state"
            )
        self._current.reject_inside(f"position {position}")
        self._go_to(position)

    def _go_to(self, position: int) -> None:
        self._finished = position
        self._current.hand_out(0)
        self._moved = True

    def __iter__(self) -> Iterator[Group]:
        # A group that the loop before has left is finished, or repeated: as for a state.
        self._current.reject_inside("a new loop")
        self._finished = self.position
        self._current.hand_out(0)
        self._loops += 1
        loop = self._loops
        while True:
            self._moved = False
            for group in self._summed(self._loaded()):
                # Hand the group out.
                if not 0 < group.total < math.inf:
                    raise ValueError(
                        f"the weight of step {self._finished + 1} is {group.total}, so its mean "
                        "loss is not defined; remove samples without weight, or correct weight"
                    )
                self._current.hand_out(self._finished + 1)
                batches = self._counted(group, loop)
                handed = Group(batches, group.weights, group.apart, group.total)
                yield handed

                # It is finished now, unless the state was set meanwhile.
                self._check_loop(loop)
                if self._moved:
                    break
                self._current.reject_inside("the next step")
                self._current.was_updated()  # remembers it
                for _ in group.batches:  # of a group that the loop has left out
                    pass
                handed.used = True
                self._finished += 1
                self._current.hand_out(0)

    def __len__(self) -> int:
        raise TypeError(
            "a Loader is endless and has no length: an epoch has len(dataset) / batch_size steps; "
            "end the loop when loader.position reaches your number of steps"
        )

    def __getattr__(self, name: str) -> Any:
        # Accelerate looks for sampler, batch_sampler and set_epoch of a DataLoader.
        raise AttributeError(
            f"a Loader is not a DataLoader and has no {name}; use it as it is, without "
            "prepare_data_loader or setup_dataloaders: it gives each process its part"
        )

    def _check_loop(self, loop: int) -> None:
        if loop != self._loops:
            raise RuntimeError(
                "another loop over this Loader has begun, and only the newest can continue; make "
                "one Loader for each loop"
            )

    def _counted(self, group: Group, loop: int) -> Iterator[Any]:
        """Yield the user's batches of a group, and count them."""
        for loaded in group.batches:
            self._check_loop(loop)
            if self._moved:  # the state was set before the first batch
                return
            self._current.take()
            yield loaded[BATCH]
        self._check_loop(loop)
        self._current.reject_inside("the end of the batches")
        self._current.ended = True

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
        return stream if self._workers else with_own_generators(stream)

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
            # The marks show whether all ranks sum up the same group.
            addends = [*group.addends(self._rank, ranks), *marks(number)]
            sums = torch.tensor(addends, dtype=torch.float64)
            work = dist.all_reduce(sums, group=self._group, async_op=True)
            current = upcoming
            upcoming = (number, group, sums, work)
            if current:
                yield _with_total(ranks, *current)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what a state must agree with: seed, batch size and data.

        Before the update of a group, it is the position of this group, which is then repeated: call
        it after the update.

        Raises:
            RuntimeError: an optimizer has stepped before the last batch of the group, or none has
                stepped so far, so that it is unknown whether the group was trained.
        """
        position = self.position
        if self._current.ended and not self._current.updated:
            raise RuntimeError(
                "no optimizer of torch has stepped in a group of this Loader, so it is unknown "
                "whether the newest group was trained; save after optimizer.step(), or, without an "
                "optimizer of torch, before the batches of the next group are used"
            )
        order = self._identity.order_hash(position)
        return {"position": position, "order": order, **self._identity.values()}

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
        self._identity.check(state)
        check_position(state["position"], self.batch_size)
        self._identity.check_order(state)


def _with_total(ranks: int, number: int, group: Group, sums: Tensor, work: Any) -> Group:
    work.wait()
    *weights, total, squares = sums.tolist()
    check_marks(number, (total, squares), ranks)
    group.total = rounded_sum(weights)
    return group
