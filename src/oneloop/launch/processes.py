"""The processes of a run: set up accelerate from the launcher's environment, and check it."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.launcher import local_ranks, ranks
from oneloop.data.data_workers import workers_here
from oneloop.launch import devices
from oneloop.launch.agreement import LONG, Agreement, limit_collectives
from oneloop.launch.signals import Stopping
from oneloop.machine.blocks import blocks, class_names
from oneloop.machine.mixed_precision import HALF, prepare, sharded_precision
from oneloop.measure.flops import peak_flops
from oneloop.show.terminal import Display
from oneloop.supervise.pipe import ADDRESS, CHANNEL

_AXES = tuple(
    f"PARALLELISM_CONFIG_{axis}_SIZE" for axis in ("TP", "CP", "SP", "DP_REPLICATE", "DP_SHARD")
)


class Run(Agreement):
    """One process of a run, with collectives between the ranks.

    Args:
        accelerator: as :func:`start` builds it.
        cores: CPUs of this process, if the processes of the host divide them equally.
    """

    def __init__(self, accelerator: Accelerator, *, cores: int) -> None:
        super().__init__(accelerator.num_processes)
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.began = time.time()  # seconds since 1970
        self.begun = False  # whether it writes its folder: a later error is the run's end

        self.rank: int = accelerator.process_index
        self.main: bool = accelerator.is_main_process
        self.sharded = bool(accelerator.is_fsdp2)
        self.local_ranks = local_ranks()  # on this host
        self.cores = cores

        self.stopping = Stopping(looks=self.main)
        self.display = Display(shown=self.main)
        self.command: Sequence[str] = sys.argv  # command of the run: module, recipe and keys
        self.closing = ExitStack()  # callbacks for every end of the run

    def listen(self) -> None:
        """Hear stop requests from now on, and report that to the supervisor. Collective."""
        self.stopping.listen()
        CHANNEL.send(listens=True)
        CHANNEL.send(watched_at=self.from_main(os.environ.get(ADDRESS)))

    def workers(self, asked: int | str) -> int:
        """Return the number of data loading processes for this process."""
        return workers_here(asked, device=self.device, cores=self.cores)

    def stop_wanted(self) -> bool:
        """Return whether a stop is requested on any rank. Collective: call on every rank."""
        return self.any(self.stopping.requested())

    def prepare(self, model: nn.Module, *, blocks: Sequence[str] = ()) -> nn.Module:
        """:func:`oneloop.machine.mixed_precision.prepare` with this run's accelerator."""
        prepared = prepare(model, self.accelerator, blocks=blocks)
        parameter = next(prepared.parameters())
        if isinstance(parameter, DTensor):
            self.mesh_groups += parameter.device_mesh.get_all_groups()
        if self.host is not None:
            limit_collectives(LONG, self.mesh_groups)  # torch's own limit is shorter
        return prepared

    def prepare_frozen(self, model: nn.Module, *, names: Sequence[str] = ()) -> nn.Module:
        """Return a model that only computes outputs: sharded by FSDP2, but not wrapped in DDP.

        Args:
            model: not yet wrapped.
            names: classes of its blocks, see :func:`oneloop.machine.blocks.blocks`.
        """
        if self.sharded:
            return self.prepare(model, blocks=class_names(blocks(model, names)))
        return cast(nn.Module, self.accelerator.prepare_model(model, evaluation_mode=True))

    def share(self, items: Sequence[Any]) -> list[Any]:
        """Return this rank's share of the items of rank 0: every n-th of them, with n ranks.

        FSDP2 needs equally many forwards on all ranks: some get the last item, too. Collective.
        """
        self.barrier()
        several = [*self.from_main(items)]
        if self.sharded:
            several += several[-1:] * (-len(several) % self.ranks)
        return several[self.rank :: self.ranks]

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a small tensor over all ranks, on the device.

        Collective: call on every rank.
        """
        return cast(Tensor, self.accelerator.reduce(value, "sum"))

    def peak_flops(self, weights: torch.dtype) -> float:
        """Return the peak FLOP/s of this rank's device at the run's precision.

        Args:
            weights: dtype of the weights, in which products are computed without mixed precision.
        """
        autocast = {**HALF, "fp8": torch.bfloat16}  # fp8: of all other products
        return peak_flops(self.device, autocast.get(self.accelerator.mixed_precision, weights))


def start(
    *,
    device: Literal["auto", "cpu"] = "auto",
    sync_each_batch: bool = False,
    find_unused_parameters: bool = False,
    deterministic: bool = False,
    exact: bool = False,
    track: Sequence[str] = (),
    folder: Path | None = None,
) -> Run:
    """Build the Accelerator that the launcher's environment configures.

    Args:
        device: ``cpu``: train on the CPU, although there may be a GPU.
        sync_each_batch: reduce gradients in every micro-batch (accelerate).
        find_unused_parameters: let DDP search for unused parameters.
        deterministic: use torch's deterministic algorithms.
        exact: bit-identical on any number of processes. This means deterministic algorithms,
            autocast for half precision (also under FSDP2), and one CPU thread, as the number of
            threads changes the order of sums.
        track: names of trackers (accelerate).
        folder: run folder, for trackers.

    Raises:
        BadInput: the device does not support the precision, the processes of a host share a GPU,
            or the strategy is not one process, DDP or FSDP2.
    """
    # Set torch's switches before anything uses the device.
    if deterministic or exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    # Check the settings before the ranks connect: all raise the same error, and none waits.
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    sharding = _is_true("ACCELERATE_USE_FSDP")
    if device == "cpu":
        devices.use_cpu()
    kind = _checked_device(precision, sharding=sharding, exact=exact, deterministic=deterministic)
    on_cpu = kind.type == "cpu"  # with cpu=True, accelerate uses gloo

    cores = devices.set_up()

    # Connect.
    if not on_cpu and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives to show if a rank hangs
    state = PartialState(cpu=on_cpu, timeout=LONG)

    # accelerate must neither step a scheduler nor end a group of micro-batches by itself.
    plugin = _sharding(state, precision, exact=exact) if sharding else None
    project = None
    if folder:
        project = ProjectConfiguration(str(folder), logging_dir=str(folder / "tensorboard"))
    accelerator = Accelerator(
        cpu=on_cpu,
        fsdp_plugin=plugin,
        log_with=list(track) or None,
        project_config=project,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1,
            sync_with_dataloader=False,
            sync_each_batch=sync_each_batch and not exact,
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters
            )
        ],
        step_scheduler_with_optimizer=False,
    )
    run = Run(accelerator, cores=cores)
    if exact and on_cpu:
        # The number of CPU threads changes the order of sums.
        run.closing.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
    return run


def _checked_device(
    precision: str, *, sharding: bool, exact: bool, deterministic: bool
) -> torch.device:
    """Return the device type that trains. Raise BadInput for settings that it does not support."""
    reject_strategy(sharding=sharding)
    kind = devices.kind()
    devices.set_allocator(kind)  # before a check starts CUDA
    _reject_precision(precision, kind)
    if exact:
        _reject_inexact(precision)
    if kind.type == "mps":
        _reject_on_mps(exact=exact, deterministic=deterministic)
    devices.reject_shared(kind)
    return kind


def _sharding(
    state: PartialState, precision: str, *, exact: bool
) -> FullyShardedDataParallelPlugin:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if state.distributed_type == DistributedType.NO:
        raise BadInput(
            "FSDP2 requires two or more processes, got one; use single.yaml, or "
            "--num_processes 2 or more"
        )
    if state.device.type == "cpu":
        # accelerate turns only MULTI_GPU into FSDP; with gloo the same code runs without a GPU.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    policy = MixedPrecisionPolicy() if exact else sharded_precision(precision)
    return FullyShardedDataParallelPlugin(mixed_precision_policy=policy)


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def reject_strategy(*, sharding: bool) -> None:
    """Raise BadInput for accelerate's settings that oneloop does not support.

    Args:
        sharding: whether FSDP shards the model.
    """
    # Check numbers first: the tests below convert them.
    for name in ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "FSDP_MIN_NUM_PARAMS", *_AXES):
        if not os.environ.get(name, "0").isdigit():
            raise BadInput(
                f"{name} must be a whole number, got {os.environ[name]!r}; correct "
                "accelerate's config file"
            )

    # Reject kinds of sharding.
    if sharding and _is_true("FSDP_OFFLOAD_PARAMS"):
        raise BadInput(
            "fsdp_offload_params true is not supported: it was never tried; set it to false"
        )
    if sharding and os.environ.get("FSDP_VERSION", "1") != "2":
        raise BadInput("fsdp_version 1 is not supported; set fsdp_version: 2")

    # Reject other strategies.
    for other in ("DEEPSPEED", "MEGATRON_LM"):
        if _is_true(f"ACCELERATE_USE_{other}"):
            raise BadInput(
                f"{other} is not supported; use one of the config files in accelerate_configs/ "
                "(DDP, FSDP2)"
            )
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise BadInput("accelerate's dynamo_backend is not supported; set dynamo_backend: 'no'")
    if any(int(os.environ.get(axis, 1)) > 1 for axis in _AXES[:3]):
        raise BadInput(
            "tensor, context or sequence parallelism is set, and only data parallelism "
            "(dp_replicate, dp_shard) is supported; set the other sizes to 1"
        )


def _reject_inexact(precision: str) -> None:
    if int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1)) > 1:
        raise BadInput(
            "batch.grain requires bit-identical runs on any number of processes, but hybrid "
            "sharding (HSDP) sums in another order; use fsdp2.yaml or ddp.yaml"
        )
    if precision == "fp8":
        raise BadInput(
            "batch.grain requires bit-identical runs on any number of processes, but fp8 scales "
            "by what each process has seen; use bf16 or no"
        )


def _reject_on_mps(*, exact: bool, deterministic: bool) -> None:
    if ranks() > 1:
        raise devices.not_on_mps(f"{ranks()} processes", "torch.distributed has no backend for it")
    if exact:
        raise devices.not_on_mps("batch.grain", "it has no float64, which exact sums require")
    if deterministic:
        raise devices.not_on_mps(
            "machine.deterministic true", "torch has deterministic algorithms for CUDA and the CPU"
        )


def _reject_precision(precision: str, device: torch.device) -> None:
    # Check the name, then what the device and the strategy support.
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise BadInput(f"mixed_precision {precision!r} does not exist; use no, bf16, fp16 or fp8")
    if precision == "fp8" and _is_true("ACCELERATE_USE_FSDP"):
        raise BadInput(
            "mixed_precision fp8 with FSDP2 is not supported: it was never tried on a GPU; use bf16"
        )
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "AO").upper()
    if precision == "fp8" and backend not in ("AO", "NO"):
        raise BadInput(
            f"fp8_backend {backend} is not supported, because only torchao's layers are converted; "
            "use fp8_backend AO"
        )
    if precision == "fp16" and device.type == "cpu":
        raise BadInput(
            "mixed_precision fp16 does not work on a CPU, which has no fp16 loss scaling; use "
            "bf16 or no"
        )
    if precision == "fp16" and device.type == "mps":
        raise BadInput(
            "mixed_precision fp16 was never tried on the Apple GPU (mps), whose loss scaling "
            "differs; use bf16 or no, there or with machine.device cpu"
        )
    if precision == "fp8":
        # fp8 needs a GPU of compute capability 8.9 (Ada, Hopper), and a library.
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        if capability < (8, 9):
            raise BadInput(
                "mixed_precision fp8 requires compute capability 8.9 or higher, got "
                f"{device.type} {capability}; use bf16"
            )
        from accelerate.utils import is_torchao_available

        if not is_torchao_available():
            raise BadInput(
                "mixed_precision fp8 needs torchao, which is not installed; install it, or use bf16"
            )
