"""One forward and backward over a few samples before a run.

Gradients, buffers and random states are restored.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import has_drawn, other_states, random_states, reseed
from oneloop.basics.tensors import as_real, local
from oneloop.basics.wide_sums import wide_dtype
from oneloop.job.build import Job
from oneloop.job.restore import restored
from oneloop.job.trial_samples import Samples, make_batch
from oneloop.launch.processes import Run
from oneloop.machine.layout_checks import Checks
from oneloop.measure.flops import Operations
from oneloop.task_protocol.protocol_checks import Contract, theirs


class Wrapped(nn.Module):
    """A model as DDP presents it, without communication: it can only be called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"under DDP the model is wrapped, and has no {name!r}: call model(...), and do "
                "what you need in its forward"
            ) from None


class Pass(NamedTuple):
    """Result of one forward and backward."""

    loss: float
    outputs: dict[str, Any]
    draws: bool
    others: bool  # whether Python's or numpy's generator was used
    flops: float
    units: list[str]  # FSDP2 units that ran
    unused: list[str]
    sparse: list[str]  # parameters whose gradient is sparse
    gradients: dict[str, tuple[float, float]]
    """see :func:`projections`"""


def one_pass(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    checks: Checks,
    samples: Samples,
    *,
    backward: bool = True,
    seed: int = 0,
) -> Pass:
    """Run forward and backward over samples, with the same seeds each time.

    Args:
        contract: checks the task.
        job: what the recipe describes.
        run: this process.
        model: not wrapped by DDP.
        checks: around the micro-batch.
        samples: of one load.
        backward: whether to compute gradients.
        seed: a different seed gives different random numbers.

    Returns:
        What was computed, and which parts of the model ran.
    """
    with restored(model, run.device):
        reseed(run.device, job.recipe.seed, seed, others=True)
        batch, _ = make_batch(contract, run, samples)

        # Forward and backward. Their operations are counted, but not those of the checks.
        before = random_states(run.device)
        checks.begin()
        with Operations(modules=run.sharded) as operations:
            loss, outputs = contract.loss(model, batch)
            draws = has_drawn(before, run.device)
            operations.backward = True
            raw = theirs(job.task, "loss", lambda: gradients_of(loss, model)) if backward else {}
        checks.end()
        others = other_states() != before[1]

        # Measure the gradients before they are dropped.
        unused = [name for name, gradient in raw.items() if gradient is None]
        sparse = [name for name, one in raw.items() if one is not None and local(one).is_sparse]
        gradients = projections(raw)
    units = checks.units.calls
    checks.units.calls = []
    return Pass(
        loss=float(loss.detach()),
        outputs=outputs,
        draws=draws,
        others=others,
        flops=operations.total,
        units=units,
        unused=unused,
        sparse=sparse,
        gradients=gradients,
    )


def gradients_of(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of trained parameters.

    Bypass DDP's hooks, which would count this backward as a step's.
    """

    def named() -> Iterator[tuple[str, nn.Parameter]]:
        return ((bare_name(name), p) for name, p in model.named_parameters() if p.requires_grad)

    if isinstance(model, Wrapped):
        names, parameters = zip(*named(), strict=True)
        try:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            return dict(zip(names, gradients, strict=True))
        except RuntimeError as error:
            # reentrant checkpointing allows nothing but backward()
            if "heckpoint" not in str(error):
                raise
    loss.backward()
    # FSDP2 has resharded the gradients by now
    return {name: parameter.grad for name, parameter in named()}


def projections(
    gradients: Mapping[str, torch.Tensor | None],
) -> dict[str, tuple[float, float]]:
    """Return for each gradient its product with fixed vectors, and its norm.

    They are those of this rank's shard. Two gradients that differ have different products, also if
    their sums are equal.
    """
    found = {}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        mine = local(gradient.detach())
        values = as_real(mine.coalesce().values() if mine.is_sparse else mine)
        matrix = values.flatten(1) if values.ndim > 1 else values.reshape(-1, 1)
        if matrix.dtype in (torch.float16, torch.bfloat16):
            matrix = matrix.float()
        # fixed, and without structure that a gradient may have
        wide = wide_dtype(matrix.device)
        rows, columns = (
            torch.arange(size, dtype=wide, device=matrix.device).cos() for size in matrix.shape
        )
        product = (matrix @ columns.to(matrix.dtype)) * rows
        norm = torch.linalg.vector_norm(matrix)
        found[name] = float(product.sum()), float(norm)
    return found
