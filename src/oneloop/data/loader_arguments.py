"""Arguments and surroundings of a :class:`oneloop.data.loader.Loader`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset, Sampler

from oneloop.basics.launcher import local_ranks
from oneloop.basics.launcher import ranks as launched_ranks
from oneloop.basics.system.processes import usable_cores
from oneloop.basics.tensors import host_group
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.current_group import requested_steps
from oneloop.data.data_workers import workers_here
from oneloop.data.fingerprint import rank_difference

_MOST = 1 << 62  # samples: positions are 64-bit integers
_NUMBERS = 1 << 20  # whose squares are exact in float64, also the sum of 8,192 of them
_INSTEAD = {
    "sampler": "the order is seeded; for your own, give the data set a method order(seed, batch)",
    "batch_sampler": "the order is seeded; for your own, give the data set a method order(seed, "
    "batch)",
    "drop_last": "every step is full, and may cross the end of an epoch; remove it",
    "collate_fn": "write collate=",
    "num_workers": "write workers=",
    "generator": "write seed=",
    "worker_init_fn": "random numbers are seeded for each sample; remove it",
    "pin_memory": "batches are pinned where that helps; remove it",
    "prefetch_factor": "two groups are loaded ahead; remove it",
    "persistent_workers": "data workers last as long as the loop; remove it",
    "num_replicas": "write ranks=",
}
"""what to do instead of giving these arguments of torch's DataLoader and samplers"""


def reject_unknown(given: Mapping[str, Any]) -> None:
    """Raise TypeError if there are other arguments, with what to do in their place."""
    for name in given:
        raise TypeError(f"Loader takes no {name}: {_INSTEAD.get(name, 'it has no such argument')}")


def check_dataset(user: str, dataset: Any, loader: type = DataLoader) -> None:
    """Raise TypeError, unless it is a map-style data set.

    Args:
        user: the class that needs it, in messages.
        dataset: the argument.
        loader: a class that has a data set.
    """
    if isinstance(dataset, DataLoader | loader):
        raise TypeError(
            f"{user} needs a data set, got a {type(dataset).__name__}; give it that loader's data "
            "set (its attribute dataset)"
        )
    if isinstance(dataset, Sampler):
        raise TypeError(
            f"{user} needs a data set, got the sampler {type(dataset).__name__}; give it the data "
            "set: the order is seeded"
        )
    # Their [index] is a column, or no sample.
    if hasattr(dataset, "columns") and hasattr(dataset, "shape"):
        raise TypeError(
            f"{user} needs rows, got the table {type(dataset).__name__}; give it "
            "frame.to_dict('records') of pandas, .to_dicts() of polars, or .to_pylist() of pyarrow"
        )
    if isinstance(dataset, Mapping) and all(isinstance(name, str) for name in dataset):
        raise TypeError(
            f"{user} needs rows, got {type(dataset).__name__} with the keys {', '.join(dataset)}; "
            "give it datasets.Dataset.from_dict(columns), or, if the keys are splits, one split"
        )
    parts = all(hasattr(dataset, name) for name in ("__len__", "__getitem__"))
    if isinstance(dataset, IterableDataset) or not parts:
        raise TypeError(
            f"{user} needs a data set with __len__ and __getitem__, got {type(dataset).__name__}: "
            "a stream has no position to resume from; see docs/how-to/from-streams.md"
        )


def place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Return rank and number of processes of a script without an accelerator."""
    if rank is None and ranks is None:
        world = dist.get_world_size() if dist.is_initialized() else launched_ranks()
        if world > 1:
            raise ValueError(
                f"Loader runs on {world} processes, and each would load all samples; give it the "
                "accelerator, or rank and ranks"
            )
        return 0, 1
    if rank is None or ranks is None or not 0 <= rank < ranks:
        raise ValueError(f"Loader needs both 0 <= rank < ranks, got rank {rank} and ranks {ranks}")
    return rank, ranks


def place_of(accelerator: Accelerator) -> tuple[int, int, bool]:
    """Return rank, number of processes, and whether FSDP2 shards the model."""
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"accelerator must be an Accelerator of accelerate, got {type(accelerator).__name__}; "
            "with Fabric or torch's DDP, give rank and ranks"
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
    return accelerator.process_index, accelerator.num_processes, accelerator.is_fsdp2


def device_of(device: torch.device | str | None) -> torch.device:
    """Return the device; None: torch's current accelerator, or the CPU."""
    if device is not None:
        return torch.device(device)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def micro_of(accelerator: Accelerator, batch_size: int, ranks: int) -> int | None:
    """Return the micro-batch size that the accelerator's accumulation requests, if any."""
    steps = requested_steps(accelerator)
    if steps == 1:
        return None
    parts = ranks * steps
    if batch_size % parts:
        raise ValueError(
            f"batch_size {batch_size} cannot be divided over {ranks} processes x "
            f"gradient_accumulation_steps {steps}; nearest batch_size: "
            f"{max(1, round(batch_size / parts)) * parts}"
        )
    return batch_size // parts


def layout_of(
    batch_size: int, ranks: int, micro: int | None, grain: int | None, *, sharded: bool
) -> BatchLayout:
    """Return the layout. Raise ValueError in the words of a Loader."""
    for name, value in {"batch_size": batch_size, "micro": micro, "grain": grain}.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and value > 0):
            raise ValueError(f"{name} of a Loader must be a positive integer, got {value!r}")
    if micro and grain and micro != grain:
        raise ValueError(
            f"micro {micro} and grain {grain} of a Loader are both sizes of a micro-batch; give one"
        )
    try:
        return BatchLayout(batch_size, ranks, micro, grain=grain, sharded=sharded)
    except ValueError as error:
        message = str(error).replace("batch.size", "batch_size").replace("batch.", "")
        raise ValueError(message) from None


def check_accumulation(accelerator: Accelerator, accumulate: int) -> None:
    """Raise ValueError if the user has set another number of micro-batches."""
    steps = requested_steps(accelerator)
    if steps not in (1, accumulate):
        raise ValueError(
            f"a group has {accumulate} micro-batches, but the accelerator's "
            f"gradient_accumulation_steps are {steps}; leave out micro, or that setting"
        )


def check_ranks(ranks: int, own: Mapping[str, Any], device: torch.device) -> None:
    """Raise ValueError on all ranks if they differ in what they must have in common.

    Collective, if these are all processes of torch.distributed.

    Args:
        ranks: their number.
        own: of this rank, by name: seed, batch size and data.
        device: of this rank, which a script may not have made its current device.
    """
    if ranks == 1 or not dist.is_initialized() or dist.get_world_size() != ranks:
        return
    found: list[Any] = [None] * ranks
    # NCCL sends objects from the current device, which must differ on each rank.
    with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
        dist.all_gather_object(found, own)
    different = rank_difference(found)
    if different:
        raise ValueError(
            f"the Loaders of the ranks differ: the {different}; give all ranks the same seed, "
            "batch size and data set (shuffle or divide data with one seed)"
        )


def group_of(ranks: int) -> Any:
    """Return a group of all processes on the host. Collective."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != ranks:
        raise ValueError(
            f"the weights of {ranks} processes are summed over all processes of torch.distributed, "
            f"which has {world}; call init_process_group first, or leave out weight"
        )
    return host_group()


def workers_of(workers: int | str, device: torch.device) -> int:
    """Return the number of data workers of this process; raise ValueError if it is wrong."""
    if workers != "auto" and not (isinstance(workers, int) and workers >= 0):
        raise ValueError(f"workers of a Loader must be auto, 0 or more, got {workers!r}")
    cores = usable_cores() // local_ranks()
    return workers_here(workers, device=device, cores=cores)


def check_position(position: Any, batch_size: int) -> None:
    """Raise ValueError unless this is a number of groups whose samples can be counted."""
    most = _MOST // batch_size
    if type(position) is not int or not 0 <= position <= most:
        raise ValueError(
            f"the position of a Loader is a number of groups from 0 to {most:,}, got {position!r}"
        )


def marks(number: int) -> list[float]:
    """Return what a rank adds to a sum that must be of one group: see :func:`check_marks`."""
    part = number % _NUMBERS
    return [float(part), float(part * part)]


def check_marks(number: int, sums: Sequence[float], ranks: int) -> None:
    """Raise RuntimeError on all ranks, unless all of them have added the marks of one group.

    Args:
        number: of this rank's group, from 1.
        sums: of the marks of all ranks.
        ranks: their number.
    """
    total, squares = map(int, sums)
    if ranks * squares == total * total:  # the variance is 0
        return
    raise RuntimeError(
        f"the ranks sum up the weights of different steps: this one of step {number}, another rank "
        "of another step. Its loop began again, or its position was set; do both on all ranks, and "
        "after an exception on one rank, end all"
    )
