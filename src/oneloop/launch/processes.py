"""The processes of a run: set up accelerate from the launcher's environment, and check it."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    is_torchao_available,
)
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.extras import how_to_install
from oneloop.basics.files import printable
from oneloop.basics.launcher import local_ranks, ranks
from oneloop.basics.system.processes import usable_cores
from oneloop.data.data_workers import workers_here
from oneloop.launch import devices
from oneloop.launch.signals import Stopping, leave_at_once
from oneloop.machine.blocks import blocks, class_names
from oneloop.machine.mixed_precision import HALF, prepare, sharded_precision
from oneloop.measure.flops import peak_flops
from oneloop.show.terminal import Display
from oneloop.supervise.pipe import ADDRESS, CHANNEL
from oneloop.task_protocol.user_code import where

LONG = timedelta(hours=2)
"""time-out of collectives: one rank may prepare, compile, evaluate, load or write for long; the
supervisor finds a hang earlier"""
_PATIENCE = 15.0  # seconds that the other ranks have to receive an error of one rank


class Run:
    """One process of a run, with collectives between the ranks.

    Those of plain values are on the host, and never wait for a device.

    Args:
        accelerator: as :func:`start` builds it.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.ranks: int = accelerator.num_processes
        self.device: torch.device = accelerator.device
        self.began = time.time()  # seconds since 1970
        self.begun = False  # whether it writes its folder: a later error is the run's end

        self.rank: int = accelerator.process_index
        self.main: bool = accelerator.is_main_process
        self.sharded = bool(accelerator.is_fsdp2)
        self.local_ranks = local_ranks()  # on this host
        # CPUs of this process, if the processes of the host divide them equally
        self.cores = max(1, usable_cores() // self.local_ranks)

        # oneloop plan: the other ranks do not exist
        several = self.ranks > 1 and dist.get_backend() != "fake"
        group = dist.new_group(backend="gloo", timeout=LONG) if several else None
        self.host = cast("dist.ProcessGroup | None", group)
        """process group of collectives on the host; None: one rank"""

        self.stopping = Stopping()
        self.display = Display(shown=self.main)
        self.command: Sequence[str] = sys.argv  # command of the run: module, recipe and keys
        self.closing = ExitStack()  # callbacks for every end of the run

    def listen(self) -> None:
        """Hear stop requests from now on, and report that to the supervisor. Collective."""
        self.stopping.listen()
        CHANNEL.send(listens=True)
        CHANNEL.send(watched_at=self.from_main(os.environ.get(ADDRESS)))

    def union(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. Collective: call on every rank."""
        return [bool(flag) for flag in self.largest(*flags)]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Collective: call on every rank."""
        return self.union([flag])[0]

    def largest(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks. Collective: call on every rank."""
        shared = torch.tensor(values, dtype=torch.float64)
        if self.host:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.host)
        return list(shared.tolist())

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank. Collective: call on every rank."""
        values = [value]
        if self.host:
            values = [None] * self.ranks
            dist.all_gather_object(values, value, group=self.host)
        return values

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value. Collective: call on every rank."""
        box = [value]
        if self.host:
            dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Turn an error of one rank into BadInput (or Unavailable) on all of them.

        The message is that of the first rank that has one. Collective: enter it on every rank.
        """
        mine: BadInput | Unavailable | None = None
        try:
            yield
        except (BadInput, Unavailable) as error:
            if error.shared:
                raise  # all ranks have it already
            mine = type(error)(str(error))
        except (ValueError, ImportError) as error:
            mine = BadInput(f"{error}{where(error)}{how_to_install(error)}")

        # A rank with an error gets here at once. The others may wait in a collective of the model:
        # then this one prints its error and exits, on another thread, and the launcher ends them.
        timer = threading.Timer(_PATIENCE, _exit_with, [mine])
        timer.daemon = True
        if mine is not None and self.ranks > 1:
            timer.start()
        try:
            several = self.gathered(mine)
        finally:
            timer.cancel()
        for shared in several:
            if shared is not None:
                shared.shared = True
                raise shared

    def barrier(self) -> None:
        """Wait for all ranks; raise the error of one that ends :meth:`setting_up`. Collective."""
        with self.setting_up():
            pass

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
        if isinstance(parameter, DTensor) and self.host is not None:
            # torch's own limit for the groups in which FSDP2 shards and reduces is shorter.
            limit_collectives(LONG, parameter.device_mesh.get_all_groups())
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


def _exit_with(error: BadInput | Unavailable) -> NoReturn:
    line = printable(f"oneloop: rank {os.environ.get('RANK', '0')}: {error}")
    print(line, file=sys.stderr, flush=True)
    leave_at_once(error.code)


def limit_collectives(limit: timedelta, groups: Iterable[dist.ProcessGroup]) -> None:
    """Set the time-out of all later collectives of these groups."""
    set_timeout = getattr(distributed_c10d, "set_timeout", None)
    if set_timeout is None:  # before torch 2.15
        set_timeout = distributed_c10d._set_pg_timeout
    for group in groups:
        set_timeout(limit, group)


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
    reject_strategy(sharding=sharding)
    kind = devices.kind()
    devices.set_allocator(kind)  # before a check starts CUDA
    _reject_precision(precision, kind)
    _reject_on_device(kind, precision, exact=exact, deterministic=deterministic)
    devices.reject_shared(kind)

    # Connect.
    on_cpu = kind.type == "cpu"  # with cpu=True, accelerate uses gloo
    chosen = torch.device(os.environ.get("ACCELERATE_TORCH_DEVICE", "cpu"))
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # accelerate selects no GPU if this variable names one
    if not on_cpu and "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives to show if a rank hangs
    state = PartialState(cpu=on_cpu, timeout=LONG)

    # Shard the model.
    plugin = None
    if sharding:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if state.distributed_type == DistributedType.NO:
            raise BadInput(
                "FSDP2 requires two or more processes, got one; use single.yaml, or "
                "--num_processes 2 or more"
            )
        if on_cpu:
            # accelerate turns only MULTI_GPU into FSDP; with gloo the same code runs without a GPU.
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        policy = MixedPrecisionPolicy() if exact else sharded_precision(precision)
        plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)

    # accelerate must neither step a scheduler nor end a group of micro-batches by itself.
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
    run = Run(accelerator)
    if exact and on_cpu:
        # The number of CPU threads changes the order of sums.
        run.closing.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
    return run


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def reject_strategy(*, sharding: bool) -> None:
    """Raise BadInput for accelerate's settings that oneloop does not support.

    Args:
        sharding: whether FSDP shards the model.
    """
    variables = os.environ
    other = "{} is not supported; use one of the config files in accelerate_configs/ (DDP, FSDP2)"
    _reject(
        {
            # Kinds of sharding.
            "fsdp_offload_params true is not supported: it was never tried; set it to false": (
                sharding and _is_true("FSDP_OFFLOAD_PARAMS")
            ),
            "fsdp_version 1 is not supported; set fsdp_version: 2": (
                sharding and variables.get("FSDP_VERSION") != "2"
            ),
            # Other strategies.
            other.format("DEEPSPEED"): _is_true("ACCELERATE_USE_DEEPSPEED"),
            other.format("MEGATRON_LM"): _is_true("ACCELERATE_USE_MEGATRON_LM"),
            "accelerate's dynamo_backend is not supported; set dynamo_backend: 'no'": (
                variables.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"
            ),
            "tensor, context or sequence parallelism is set, and only data parallelism "
            "(dp_replicate, dp_shard) is supported; set the other sizes to 1": any(
                _is_parallel(axis) for axis in ("TP", "CP", "SP")
            ),
        }
    )


def _reject_precision(precision: str, device: torch.device) -> None:
    """Raise BadInput for a precision that the device or the strategy does not support."""
    # fp8 needs a GPU of compute capability 8.9 (Ada, Hopper), and a library.
    is_fp8 = precision == "fp8"
    capability = (0, 0)
    if is_fp8 and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", "AO").upper()

    _reject(
        {
            f"mixed_precision {precision!r} does not exist; use no, bf16, fp16 or fp8": (
                precision not in ("no", "fp16", "bf16", "fp8")
            ),
            "mixed_precision fp8 with FSDP2 is not supported: it was never tried on a GPU; use "
            "bf16": is_fp8 and _is_true("ACCELERATE_USE_FSDP"),
            f"fp8_backend {backend} is not supported, because only torchao's layers are converted; "
            "use fp8_backend AO": is_fp8 and backend not in ("AO", "NO"),
            "mixed_precision fp16 does not work on a CPU, which has no fp16 loss scaling; use bf16 "
            "or no": precision == "fp16" and device.type == "cpu",
            "mixed_precision fp16 was never tried on the Apple GPU (mps), whose loss scaling "
            "differs; use bf16 or no, there or with machine.device cpu": (
                precision == "fp16" and device.type == "mps"
            ),
            "mixed_precision fp8 requires compute capability 8.9 or higher, got "
            f"{device.type} {capability}; use bf16": is_fp8 and capability < (8, 9),
            "mixed_precision fp8 needs torchao, which is not installed; install it, or use bf16": (
                is_fp8 and not is_torchao_available()
            ),
        }
    )


def _reject_on_device(
    kind: torch.device, precision: str, *, exact: bool, deterministic: bool
) -> None:
    """Raise BadInput for settings that batch.grain or an Apple GPU does not support."""
    on_mps = kind.type == "mps"
    grain = "batch.grain requires bit-identical runs on any number of processes, but"
    mps = "the Apple GPU (mps) does not support"
    cpu = "set machine.device cpu (evaluate and predict: --device cpu)"
    _reject(
        {
            f"{grain} hybrid sharding (HSDP) sums in another order; use fsdp2.yaml or ddp.yaml": (
                exact and _is_parallel("DP_REPLICATE")
            ),
            f"{grain} fp8 scales by what each process has seen; use bf16 or no": (
                exact and precision == "fp8"
            ),
            f"{mps} {ranks()} processes: torch.distributed has no backend for it; {cpu}": (
                on_mps and ranks() > 1
            ),
            f"{mps} batch.grain: it has no float64, which exact sums require; {cpu}": (
                on_mps and exact
            ),
            f"{mps} machine.deterministic true: torch has deterministic algorithms for CUDA and "
            f"the CPU; {cpu}": on_mps and deterministic,
        }
    )


def _reject(settings: Mapping[str, bool]) -> None:
    """Raise BadInput with the first of these messages that applies."""
    for message, applies in settings.items():
        if applies:
            raise BadInput(message)


def _is_parallel(axis: str) -> bool:
    """Return whether accelerate's settings divide the processes along this axis."""
    return os.environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1") not in ("", "0", "1")
