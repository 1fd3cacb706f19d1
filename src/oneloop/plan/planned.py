"""One plan: build a recipe's run for rank 0 of N processes that do not exist, and measure its step
on fake tensors."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from io import StringIO
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import nn
from torch._subclasses import fake_tensor as fake
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.tensors import Planned
from oneloop.checkpoint.resume import RunState
from oneloop.job.build import Job, build_job
from oneloop.launch.agreement import where
from oneloop.launch.command import accelerate_variables
from oneloop.launch.nodes import Nodes
from oneloop.launch.processes import Run, start
from oneloop.machine.blocks import has_batch_statistics
from oneloop.plan.step_costs import SAMPLED, Costs, StepCosts
from oneloop.recipe.parse import read
from oneloop.recipe.schema import Recipe

_READS = (
    fake.DataDependentOutputException,
    fake.DynamicOutputShapeException,
    fake.UnsupportedOperatorException,
)
GIB = 2.0**30
ALLOWANCES = {"CUDA context": 0.5 * GIB, "cuBLAS workspace": 0.03 * GIB}
NCCL = 0.4 * GIB  # buffers of several processes; these are rules of thumb, for what no tensor holds
_LABELS = {
    "forward": "activations",
    "backward": "temporaries (backward)",
    "update": "temporaries (update)",
}
_LABELS |= {
    "recompute": "activations (recomputed)",
    "evaluation": "activations",
    "setup": "metrics and checks",
}
_MATH = (
    "pow exp expm1 log log2 log10 log1p rsqrt reciprocal sum prod cumsum cumprod softmax "
    "log_softmax softplus"
)
_LAYERS = (
    "layer_norm group_norm norm nll_loss cross_entropy mse_loss l1_loss smooth_l1_loss kl_div "
    "cosine_similarity"
)
_KILLED = "the process that plans was killed; it may need more host memory"
_NO_TENSORS = (
    "cudnn_benchmark, deterministic, compile_mode, matmul, pinned, patience, check_every, "
    "gc_every, "
)
_NO_TENSORS += "quant_storage"  # keys of machine.* that change no tensor which is counted
_WIDE = {*_MATH.split(), *_LAYERS.split()}  # functions that CUDA's autocast computes in float32


@dataclass(frozen=True)
class Asked:
    """What to plan."""

    training: tuple[str, ...]  # recipe and keys
    config_file: str
    processes: int
    nodes: int = 1
    mixed_precision: str | None = None

    def options(self) -> list[str]:
        precision = (
            [] if self.mixed_precision is None else ["--mixed_precision", self.mixed_precision]
        )
        return ["--config_file", self.config_file, *precision]

    def words(self) -> list[str]:
        return [
            *self.training,
            *self.options(),
            "--processes",
            str(self.processes),
            "--nodes",
            str(self.nodes),
        ]


def planned(several: Sequence[Asked]) -> list[dict[str, Any]]:
    """Plan each in its own process, two at once; for a run that cannot be planned, return {"error":
    message}."""
    found: list[dict[str, Any]] = []
    for pair in (several[at : at + 2] for at in range(0, len(several), 2)):
        with ExitStack() as stack:
            pools = [stack.enter_context(ProcessPoolExecutor(1, get_context("fork"))) for _ in pair]
            futures = [
                pool.submit(_planned, asked) for pool, asked in zip(pools, pair, strict=True)
            ]
            killed = [isinstance(one.exception(), BrokenProcessPool) for one in futures]
            found += [
                {"error": _KILLED} if k else one.result()
                for k, one in zip(killed, futures, strict=True)
            ]
    for module in {module for one in found for module in one.pop("modules", ())}:
        import_module(module)  # so that the next processes need not
    return found


def _planned(asked: Asked) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        with redirect_stdout(StringIO()):
            return _plan(asked)
    except BadInput as error:
        why = str(error)
    except _READS as error:
        reads = (
            f"{where(error)} reads a value of a tensor, or makes a tensor whose size depends on "
            f"one ({error})"
        )
        why = f"the step cannot be planned:{reads}; torch.where and masks need no values"
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        kind = (
            ""
            if isinstance(error, ValueError | ImportError)
            else f"the plan failed: {type(error).__name__}: "
        )
        why = f"{kind}{error}{where(error)}"
    return {"error": " ".join(why.split())}


def _plan(asked: Asked) -> dict[str, Any]:
    ranks = asked.processes
    nodes = Nodes(asked.nodes, asked.nodes, "127.0.0.1", processes=ranks // asked.nodes)
    variables, training, _ = accelerate_variables([*asked.options(), *asked.training], nodes)
    recipe, missing = _plannable(read(training), training)
    if variables.get("ACCELERATE_MIXED_PRECISION") in ("fp16", "fp8"):
        missing.append(
            f"mixed_precision {variables['ACCELERATE_MIXED_PRECISION']}: planned as bf16"
        )
        variables["ACCELERATE_MIXED_PRECISION"] = "bf16"
    places = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks // asked.nodes,
    }
    for name in places:
        os.environ.pop(name, None)
    os.environ |= variables | (
        {name: str(value) for name, value in places.items()} if ranks > 1 else {}
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # this process is a fork, whose parent may have used it
    AcceleratorState._reset_state(reset_partial_state=True)
    how: dict[str, Any] = {
        "sync_each_batch": recipe.machine.sync_each_batch,
        "exact": recipe.batch.grain is not None,
    }
    how |= {"find_unused_parameters": recipe.machine.find_unused_parameters}
    run = start(**how)
    Planned.for_gpu = True
    micro = max(1, recipe.batch.size // ranks)  # for auto and fastest
    job = build_job(
        recipe, ranks=ranks, sharded=run.sharded, device="cuda", on_meta=True, micro=micro
    )
    if any(type(module).__name__ == "Linear4bit" for module in job.model.modules()):
        raise BadInput(
            "4-bit weights cannot be planned; give the unquantized model, which is an upper bound"
        )
    with _CudaAutocast():
        costs = StepCosts(job, run, fake.FakeTensorMode(allow_non_fake_inputs=True))
        step, evaluation = costs.step(), None
        try:
            evaluation = costs.evaluation()
        except _READS:
            missing.append("evaluation: the loss or the metrics read values")
    if any(isinstance(module, nn.RNNBase) for module in job.model.modules()):
        missing.append(
            "what the kernels of recurrent layers (nn.LSTM, …) keep for the backward pass"
        )
    if (
        job.collate.sample_weight is None
        and not hasattr(job.train_set, "lengths")
        and len(job.train_set) > SAMPLED
    ):
        missing.append(f"samples after the first {SAMPLED}, which may be larger")
    missing += [
        f"optimizer.name {recipe.optimizer.name} reads values, planned as 1"
    ] * costs.values.read
    modules = [name for name in sys.modules if name.startswith("transformers.models.")]
    return _described(asked, job, run, costs, step, evaluation) | {
        "not_counted": missing,
        "modules": modules,
    }


def _plannable(recipe: Recipe, words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Return the recipe without what cannot be planned, and lines about what is not counted."""
    machine, bound = recipe.machine, "which is an upper bound"
    lora = recipe.task.options.get("lora")
    if quantize := lora.get("quantize") if isinstance(lora, Mapping) else None:
        recipe = read([*words, "--task.lora.quantize", "null"])
    changes: dict[str, Any] = {
        "compile": (machine.compile, "none"),
        "offload": (machine.offload, False),
    }
    changes |= (
        {"recompute": (machine.recompute, "none")} if machine.recompute.startswith("budget") else {}
    )
    changed = {
        key: (given, instead) for key, (given, instead) in changes.items() if given != instead
    }
    notes = [
        f"machine.{key} {given}: planned as {instead}, {bound}"
        for key, (given, instead) in changed.items()
    ]
    notes += [f"task.lora.quantize {quantize}: planned in the dtype of the model, {bound}"] * bool(
        quantize
    )
    if isinstance(recipe.batch.micro, str):
        notes.append(
            f"batch.micro {recipe.batch.micro}: planned with one micro-batch per step, {bound}"
        )
    notes.append(f"the allocator's rounding and reserve, and workspaces; machine.{_NO_TENSORS}")
    return replace(
        recipe, machine=replace(machine, **{key: instead for key, (_, instead) in changed.items()})
    ), notes


def _described(
    asked: Asked, job: Job, run: Run, costs: StepCosts, step: Costs, evaluation: Costs | None
) -> dict[str, Any]:
    """Return the plan as plain data: see docs/how-to/plan.md."""
    recipe, layout, ranks = job.recipe, job.layout, run.ranks
    owned = costs.owned()
    away = owned.get("EMA", 0) if recipe.ema.device == "cpu" else 0
    peaks = [(one, one.peak - away) for one in (step, evaluation) if one is not None]
    allowances = ALLOWANCES | ({"NCCL": NCCL} if ranks > 1 else {})
    calls = [
        {**call._asdict(), "calls": number, "wire": call.wire * number}
        for call, number in step.collectives
    ]
    state = RunState(costs.model, costs.optimizer, emas=costs.emas, parts={}, own=[])
    once, each = state.size(job.optimizer_share, getattr(job.task, "origin", None))
    local, samples, weight = (
        ranks // asked.nodes,
        job.steps * layout.size,
        job.collate.sample_weight,
    )
    tokens = samples * weight if weight is not None and job.unit == "tokens" else None
    weights = sum(
        parameter.numel() * parameter.element_size() for parameter in costs.model.parameters()
    )
    # auto: at most 8 on a GPU
    workers = recipe.machine.workers if isinstance(recipe.machine.workers, int) else 8
    host = {
        "building the model": weights * (1 if recipe.machine.in_turn else local),
        "EMA": 2 * away * local,
    }
    host |= {"copy for the checkpoint writer": each // ranks * local if run.sharded else each}
    host |= {"batches of the workers": owned.get("inputs", 0) * (2 * workers + 2) * local}
    memory: dict[str, Any] = {"total": max(peak for _, peak in peaks) + sum(allowances.values())}
    memory |= {"allowances": allowances, "kept": _labelled(owned, away)}
    memory |= {
        name: _peak(one, away) for name, one in (("step", step), ("evaluation", evaluation)) if one
    }
    plan: dict[str, Any] = {
        "processes": ranks,
        "nodes": asked.nodes,
        "config_file": asked.config_file,
    }
    plan |= {
        "micro": layout.each,
        "accumulate": layout.accumulate,
        "sharded": run.sharded,
        "exact": job.exact,
    }
    plan |= {
        "mixed_precision": run.accelerator.mixed_precision,
        "blocks": job.built.blocks,
        "memory": memory,
    }
    plan |= {
        "recompute": recipe.machine.recompute,
        "sync_each_batch": recipe.machine.sync_each_batch,
        "host": host,
    }
    plan |= {"batch_statistics": has_batch_statistics(costs.model), "collectives": calls}
    plan |= {
        "fused_loss": getattr(job.task, "fused_loss", None),
        "wire": sum(call["wire"] for call in calls),
    }
    plan |= {"flops": step.operations | {"total": sum(step.operations.values())}}
    plan |= {"run": {"steps": job.steps, "samples": samples, "tokens": tokens}}
    plan |= {"parameters": sum(parameter.numel() for parameter in costs.model.parameters())}
    return plan | {
        "disk": {"checkpoint": each, "once": once, "total": job.checkpoints_kept * each + once}
    }


def _peak(one: Costs, away: int) -> dict[str, Any]:
    kinds = _labelled(one.kinds, away)
    return {
        "peak": one.peak - away,
        "kinds": kinds,
        "stage": one.stage,
        "module": one.module,
        "operator": one.operator,
    }


def _labelled(kinds: dict[str, int], away: int) -> dict[str, int]:
    sizes = Counter[str]()
    for kind, size in kinds.items():
        sizes[_LABELS.get(kind, kind)] += size - (away if kind == "EMA" else 0)
    return {kind: size for kind, size in sizes.most_common() if size}


class _CudaAutocast(TorchFunctionMode):
    """Autocast on a CPU keeps half precision where CUDA's computes in float32; follow CUDA's
    rule."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _WIDE and torch.is_autocast_enabled("cpu"):
            half = (torch.bfloat16, torch.float16)
            args = tuple(
                value.float() if getattr(value, "dtype", None) in half else value for value in args
            )
        return func(*args, **(kwargs or {}))
