"""One plan: build a recipe's run for rank 0 of N processes, and measure its step on fake tensors.

The other processes do not exist."""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from importlib import import_module
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch._subclasses import fake_tensor as fake
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.extras import how_to_install
from oneloop.basics.system.start_methods import spawns, start_context
from oneloop.basics.tensors import Planned
from oneloop.job.build import build_job
from oneloop.launch.processes import start
from oneloop.recipe.parse import read
from oneloop.recipe.schema import Recipe
from oneloop.task_protocol.user_code import where
from oneloop.tools.nodes import Nodes, accelerate_variables
from oneloop.tools.plan.asked import Asked
from oneloop.tools.plan.description import VARLEN, NotCounted, Plan, describe
from oneloop.tools.plan.largest_samples import SAMPLED, may_be_larger
from oneloop.tools.plan.step_costs import StepCosts
from oneloop.tools.server_context import server_context

# What fake tensors raise if a step reads a value.
_READS = (
    fake.DataDependentOutputException,
    fake.DynamicOutputShapeException,
    fake.UnsupportedOperatorException,
)

# Functions that CUDA's autocast computes in float32.
_MATH = (
    "pow exp expm1 log log2 log10 log1p rsqrt reciprocal sum prod cumsum cumprod softmax "
    "log_softmax softplus"
)
_LAYERS = (
    "layer_norm group_norm norm nll_loss cross_entropy mse_loss l1_loss smooth_l1_loss kl_div "
    "cosine_similarity"
)
_WIDE = {*_MATH.split(), *_LAYERS.split()}

# Functions of recurrent layers: cuDNN keeps what it needs for the backward in a private format.
_FUSED = {"lstm", "gru", "rnn_tanh", "rnn_relu"}

_KILLED = "the process that plans was killed; it may need more host memory"
_ALLOCATOR = (  # these keys change no tensor that is counted
    "the allocator's rounding and reserve, and workspaces; machine.cudnn_benchmark, "
    "deterministic, compile_mode, matmul, device, pinned, patience, check_every"
)


def planned(several: Sequence[Asked]) -> list[Plan | str]:
    """Plan each run in its own process, all at once; return its plan, or why it has none."""
    found: list[Plan | str] = []
    imported = set[str]()
    context = _context()
    with ExitStack() as stack:
        futures = []
        for asked in several:
            pool = stack.enter_context(ProcessPoolExecutor(1, context))
            futures.append(pool.submit(_planned, asked))
        for future in futures:
            if isinstance(future.exception(), BrokenProcessPool):
                found.append(_KILLED)
                continue
            plan, modules = future.result()
            found.append(plan)
            imported.update(modules)

    # Import what the plans needed, so that the next processes need not.
    for module in imported:
        import_module(module)
    return found


def _context() -> Any:
    """Return how processes start: by fork, unless autograd cannot work in a fork of this process.

    Its engine has threads after a backward on a GPU, or in deeply nested backwards. A fork does not
    inherit them, and torch then rejects each backward.
    """
    context = start_context()
    if spawns():
        return context
    with ProcessPoolExecutor(1, context) as pool:
        works = pool.submit(_autograd_works).result()
    return context if works else server_context([__name__])


def _autograd_works() -> bool:
    try:
        torch.zeros(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _planned(asked: Asked) -> tuple[Plan | str, list[str]]:
    """Return the plan, and the modules of models that it imported."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        # The task may print; the output is only the plan.
        with redirect_stdout(StringIO()):
            plan = _plan(asked)
        return plan, [name for name in sys.modules if name.startswith("transformers.models.")]
    except BadInput as error:
        message = str(error)
    except _READS as error:
        message = (
            f"the step cannot be planned:{where(error)} reads a value of a tensor, or makes a "
            f"tensor whose size depends on one ({error}); torch.where and masks need no values"
        )
    except (ValueError, ImportError) as error:
        message = f"{error}{where(error)}{how_to_install(error)}"
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        message = f"the plan failed: {type(error).__name__}: {error}{where(error)}"
    return " ".join(message.split()), []


def _plan(asked: Asked) -> Plan:
    ranks = asked.processes
    nodes = Nodes(asked.nodes, asked.nodes, "127.0.0.1", processes=ranks // asked.nodes)
    variables, training, _ = accelerate_variables([*asked.options(), *asked.training], nodes)
    recipe, missing = _plannable(read(training), training)
    precision = variables.get("ACCELERATE_MIXED_PRECISION")
    if precision in ("fp16", "fp8"):
        line = f"mixed_precision {precision}: planned as bf16"
        Planned.fp16 = precision == "fp16"
        if precision == "fp16":
            missing.other.append(line)
        else:  # copies of the weights need memory, and smaller activations save some
            missing.more.append(line)
            missing.less.append(line)
        variables["ACCELERATE_MIXED_PRECISION"] = "bf16"

    # Start rank 0 of a process group whose other ranks do not exist.
    _set_environment(asked, variables)
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # This process may be a fork, whose parent may have used accelerate's state.
    AcceleratorState._reset_state(reset_partial_state=True)
    run = start(
        device="cpu",  # fake tensors need no other
        sync_each_batch=recipe.machine.sync_each_batch,
        find_unused_parameters=recipe.machine.find_unused_parameters,
        exact=recipe.batch.grain is not None,
    )

    # Build the model without memory, with the rules of a GPU.
    Planned.capability = asked.capability
    job = build_job(
        recipe,
        ranks=ranks,
        sharded=run.sharded,
        device="cuda",
        on_meta=True,
        micro=max(1, recipe.batch.size // ranks),  # for auto and fastest
    )
    if any(type(module).__name__ == "Linear4bit" for module in job.model.modules()):
        raise BadInput(
            "4-bit weights cannot be planned; give the unquantized model, which is an upper bound"
        )

    # Run the step and the evaluation on fake tensors.
    evaluation = None
    with _CudaRules() as rules, rules.kept_in_backward():
        costs = StepCosts(job, run, fake.FakeTensorMode(allow_non_fake_inputs=True))
        step = costs.step()
        try:
            evaluation = costs.evaluation()
        except _READS:
            missing.more.append("the evaluation, whose loss or metrics read values")
    kernels = sorted(rules.fused | costs.ledger.foreign - VARLEN)
    if kernels:
        missing.more.append(f"what the kernels of {', '.join(kernels)} allocate")

    if may_be_larger(job):
        missing.more.append(f"samples after the first {SAMPLED}, which may be larger")
    if costs.values.read:
        name = job.recipe.optimizer.name
        missing.other.append(f"optimizer.name {name} reads values, planned as 1")
    return describe(asked, job, costs, step=step, evaluation=evaluation, not_counted=missing)


def _set_environment(asked: Asked, variables: Mapping[str, str]) -> None:
    """Set what accelerate's launcher would set for rank 0."""
    # With the ranks of another launcher, accelerate would wait for them.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= variables
    if asked.processes > 1:
        os.environ |= {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(asked.processes),
            "LOCAL_WORLD_SIZE": str(asked.processes // asked.nodes),
        }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


def _plannable(recipe: Recipe, words: Sequence[str]) -> tuple[Recipe, NotCounted]:
    """Return the recipe without what cannot be planned, and what is not counted."""
    machine = recipe.machine
    found = NotCounted(other=[_ALLOCATOR])
    notes = found.less
    if machine.compile != "none":
        notes.append(f"machine.compile {machine.compile}: planned as none, which is an upper bound")
    if machine.offload:
        notes.append(
            f"machine.offload {machine.offload}: planned as False, which is an upper bound"
        )
    recompute = machine.recompute
    if recompute.startswith("budget"):
        notes.append(f"machine.recompute {recompute}: planned as none, which is an upper bound")
        recompute = "none"

    if recipe.eval.generate:
        found.more.append(f"eval.generate {recipe.eval.generate}: keys and values of the tokens")

    # Plan quantized weights in the dtype of the model.
    lora = recipe.task.options.get("lora")
    if isinstance(lora, Mapping) and lora.get("quantize"):
        recipe = read([*words, "--task.lora.quantize", "null"])
        notes.append(
            f"task.lora.quantize {lora['quantize']}: planned in the dtype of the model, which is "
            "an upper bound"
        )
    if isinstance(recipe.batch.micro, str):
        notes.append(
            f"batch.micro {recipe.batch.micro}: planned with one micro-batch per step, which is "
            "an upper bound"
        )
    machine = replace(machine, compile="none", offload=False, recompute=recompute)
    return replace(recipe, machine=machine), found


class _CudaRules(TorchFunctionMode):
    """What CUDA does in another way than a CPU.

    Its autocast computes in float32 what that of a CPU keeps in half precision. ``fused``: called
    functions that have one kernel, whose memory is not known here."""

    def __init__(self) -> None:
        super().__init__()
        self.fused: set[str] = set()

    @contextmanager
    def kept_in_backward(self) -> Iterator[None]:
        """Keep the rules in a backward, which recomputes blocks.

        torch leaves this mode while it runs one of its functions, such as a backward."""

        def with_rules(*args: Any, **kwargs: Any) -> Any:
            with self:
                return _engine_run_backward(*args, **kwargs)

        with patch.object(torch.autograd, "_engine_run_backward", with_rules):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _FUSED:
            self.fused.add(name)
        if name in _WIDE and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_in_float32, args))
        return func(*args, **(kwargs or {}))


def _in_float32(value: Any) -> Any:
    if getattr(value, "dtype", None) in (torch.bfloat16, torch.float16):
        return value.float()
    return value
