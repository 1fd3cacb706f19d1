"""Arguments and surroundings of a :class:`oneloop.data.loader.Loader`."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import IterableDataset

from oneloop.basics.differences import differences, listed
from oneloop.basics.launcher import ranks as launched_ranks
from oneloop.data.batch_layout import BatchLayout

_REQUESTED = "requested before oneloop"
"""in the settings of Accelerate: the ``gradient_accumulation_steps`` before the first group"""


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
