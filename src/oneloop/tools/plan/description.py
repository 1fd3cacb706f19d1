"""The answer of a plan: what a run takes, as plain numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oneloop.checkpoint.resume import RunState
from oneloop.job.build import Job
from oneloop.machine.blocks import has_batch_statistics
from oneloop.tools.plan.asked import Asked
from oneloop.tools.plan.gpus import ANY, GIB, GPUS
from oneloop.tools.plan.ledger import Calls, Costs, PeakMemory
from oneloop.tools.plan.step_costs import StepCosts

# Rules of thumb, in bytes, for what no tensor holds.
ALLOWANCES = {"CUDA context": 0.5 * GIB, "cuBLAS workspace": 0.03 * GIB}
NCCL = 0.4 * GIB  # buffers of several processes

# Operators of attention in packed rows, of GPUs with the compute capability 8.0 or higher.
VARLEN = {"torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"}

_LABELS = {  # stage that allocated a tensor: kind that the user reads
    "forward": "activations",
    "backward": "temporaries (backward)",
    "update": "temporaries (update)",
    "recompute": "activations (recomputed)",
    "evaluation": "activations",
    "setup": "metrics and checks",
}


@dataclass
class Memory:
    """Memory of one process on its device, in bytes."""

    total: float  # the largest peak and the allowances
    allowances: dict[str, float]  # by what they are for
    kept: dict[str, int]  # between two steps, by kind
    step: PeakMemory
    evaluation: PeakMemory | None  # None: no evaluation, or one that cannot be planned

    def phases(self) -> dict[str, PeakMemory]:
        """Return the planned phases by name."""
        phases = {"step": self.step}
        if self.evaluation is not None:
            phases["evaluation"] = self.evaluation
        return phases

    @property
    def largest(self) -> PeakMemory:
        """The phase that needs most memory."""
        return max(self.phases().values(), key=lambda phase: phase.peak)


@dataclass
class NotCounted:
    """What the plan does not count exactly, as lines."""

    more: list[str] = field(default_factory=list)  # so that the run may need more memory
    less: list[str] = field(default_factory=list)  # so that it may need less
    other: list[str] = field(default_factory=list)  # in every plan, or not about memory


@dataclass
class Plan:
    """What a run takes; docs/how-to/plan.md describes each value."""

    # The layout.
    processes: int
    nodes: int
    config_file: str
    micro: int  # samples per micro-batch
    accumulate: int  # micro-batches of one step on one process
    sharded: bool  # FSDP2
    exact: bool  # with batch.grain
    mixed_precision: str
    capability: tuple[int, int]  # compute capability of the GPU whose kernels are planned
    varlen: bool  # whether packed rows use the variable-length kernel, which older GPUs lack

    # The model's memory, and settings that a change may replace.
    blocks: list[str]  # class names of its repeated blocks
    memory: Memory
    recompute: str
    sync_each_batch: bool
    host: dict[str, int]  # bytes on each node, by purpose
    batch_statistics: bool  # whether it has BatchNorm

    # One step of one process.
    collectives: list[Calls]
    fused_loss: Any  # auto, true or false; None: the task has no such option
    wire: float  # bytes that it sends
    flops: dict[str, float]  # by stage, and total

    # The whole run.
    run: dict[str, float | None]  # steps, samples, and tokens if they are the unit of the task
    parameters: int
    # Bytes: a checkpoint, what is written once (final weights, EMA weights, frozen weights), total.
    disk: dict[str, int]
    network: str  # what is read over the network; empty if the data are on a disk
    not_counted: NotCounted

    # The answer.
    fits_on: list[str]  # names of known GPUs that hold the planned memory
    gpu: str | None = None  # None: without --gpu
    fits: bool | None = None  # None: not known
    change: dict[str, Any] | None = None  # with which it fits: words, command, total


def describe(
    asked: Asked,
    job: Job,
    costs: StepCosts,
    *,
    step: Costs,
    evaluation: Costs | None,
    not_counted: NotCounted,
) -> Plan:
    """Return the plan of a run.

    Args:
        asked: What was planned.
        job: What the recipe builds.
        costs: The parts of the run, after the measured steps.
        step: What one step takes.
        evaluation: What the evaluation takes; None: it is not planned.
        not_counted: What the plan leaves out.
    """
    machine = job.recipe.machine
    layout = job.layout
    run = costs.run
    owned = costs.owned()

    # The ledger counts EMA weights on the host as if they were on the device.
    away = 0
    if job.recipe.ema.device == "cpu":
        away = owned.get("EMA", 0)
    memory = _memory(owned, step, evaluation, away=away, ranks=run.ranks)

    network = ""
    traffic = getattr(job.train_set, "traffic", None)
    if traffic:
        size = len(job.train_set)
        network = traffic.line(size, batch=layout.size, steps=job.steps, hosts=asked.nodes)

    # Count the whole run.
    samples = job.steps * layout.size
    tokens = None
    if job.collate.sample_weight is not None and job.unit == "tokens":
        tokens = samples * job.collate.sample_weight
    emas = {ema.name: ema for ema in costs.emas}
    state = RunState(costs.model, costs.optimizer, parts=emas, tried=True)
    once, each = state.size(job.tried.share, getattr(job.task, "origin", None))

    # Which GPUs hold it?
    varlen = bool(costs.ledger.foreign & VARLEN)
    fits_on = []
    for name, gpu in GPUS.items():
        if gpu.holds(memory.total) and not (varlen and gpu.capability < ANY):
            fits_on.append(name)

    return Plan(
        processes=run.ranks,
        nodes=asked.nodes,
        config_file=asked.config_file,
        micro=layout.each,
        accumulate=layout.accumulate,
        sharded=run.sharded,
        exact=job.exact,
        mixed_precision=run.accelerator.mixed_precision,
        capability=asked.capability,
        varlen=varlen,
        blocks=job.built.blocks,
        memory=memory,
        recompute=machine.recompute,
        sync_each_batch=machine.sync_each_batch,
        host=_host(costs, run.ranks // asked.nodes, owned, emas=away, saved=each),
        batch_statistics=has_batch_statistics(costs.model),
        collectives=step.collectives,
        fused_loss=getattr(job.task, "fused_loss", None),
        wire=sum(call.wire for call in step.collectives),
        flops={**step.operations, "total": sum(step.operations.values())},
        run={"steps": job.steps, "samples": samples, "tokens": tokens},
        parameters=sum(parameter.numel() for parameter in costs.model.parameters()),
        disk={
            "checkpoint": each,
            "once": once,
            "total": job.checkpoints_kept * each + once,
        },
        network=network,
        not_counted=not_counted,
        fits_on=fits_on,
    )


def _memory(
    owned: Mapping[str, int], step: Costs, evaluation: Costs | None, *, away: int, ranks: int
) -> Memory:
    """Return the memory on the device; ``away``: bytes of EMA weights on the host."""
    allowances = dict(ALLOWANCES)
    if ranks > 1:
        allowances["NCCL"] = NCCL

    def phase(costs: Costs) -> PeakMemory:
        kinds = _labelled(costs.kinds, away)
        return PeakMemory(costs.peak - away, kinds, costs.stage, costs.module, costs.operator)

    total = sum(allowances.values())
    last = None if evaluation is None else phase(evaluation)
    memory = Memory(total, allowances, _labelled(owned, away), phase(step), last)
    memory.total += memory.largest.peak
    return memory


def _labelled(kinds: Mapping[str, int], away: int) -> dict[str, int]:
    """Return sizes by the kinds that the user reads, the largest first, without empty ones."""
    sizes = Counter[str]()
    for kind, size in kinds.items():
        sizes[_LABELS.get(kind, kind)] += size
    if "EMA" in sizes:
        sizes["EMA"] -= away
    return {kind: size for kind, size in sizes.most_common() if size}


def _host(
    costs: StepCosts, local: int, owned: Mapping[str, int], *, emas: int, saved: int
) -> dict[str, int]:
    """Return the bytes of host memory on each node, by purpose.

    ``local``: processes on each node; ``emas``: bytes of one process's EMA weights on the host;
    ``saved``: bytes of a checkpoint."""
    machine = costs.job.recipe.machine
    building = 0  # by all processes of a node at once
    for parameter in costs.model.parameters():
        building += parameter.numel() * parameter.element_size() * local

    # Under FSDP2 each process copies its shard, else rank 0 copies everything.
    if costs.run.sharded:
        saved = saved // costs.run.ranks * local

    # The loader holds two batches for each worker, and two more.
    workers = machine.workers
    if not isinstance(workers, int):
        workers = 8  # auto: at most so many on a GPU
    batches = owned.get("inputs", 0) * (2 * workers + 2)

    return {
        "building the model": building,
        "EMA": 2 * emas * local,
        "copy for the checkpoint writer": saved,
        "batches of the workers": batches * local,
    }
