"""Check before a run that an embedding depends on its sample only, not on others of the batch."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oneloop.basics.seeds import has_drawn, random_states, reseed
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.float64 import batch_in_float64, in_float64
from oneloop.job.sample_sums import AGREE, FLOAT64, DrawWatch, without_draws
from oneloop.job.trial_samples import Samples, make_batch
from oneloop.launch.processes import Run
from oneloop.task_protocol.protocol_checks import Contract
from oneloop.task_protocol.whole_batch import (
    Parts,
    apart,
    check_loss,
    check_rows,
    columns_of,
    parts_of,
)


class _Rows(NamedTuple):
    """Embeddings of the same samples."""

    together: Parts
    reverse: Parts  # in the reverse order
    alone: Sequence[Parts]
    again: Parts  # of the first sample
    columns: dict[str, Tensor]
    draws: bool  # whether random numbers were drawn


def check_embeddings(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples, tolerance: float
) -> None:
    """Check ``embed`` and ``batch_loss``: in eval mode, and in training mode without random draws.

    Collective under FSDP2: call on every rank.

    Args:
        contract: checks the task.
        job: what the recipe describes.
        run: this process.
        model: not wrapped by DDP.
        samples: at least two.
        tolerance: relative tolerance for rounding, unless the model can run in float64.

    Raises:
        BadInput: an embedding depends on other samples, or the loss is wrong.
    """
    embed = partial(_embedded, contract, job, run, model, samples)
    with evaluating(model):
        _check(contract, run, model, embed, tolerance)
    with torch.no_grad(), without_draws(model, run.device, embed, draws=True):
        _check(contract, run, model, embed, tolerance)


def _check(
    contract: Contract, run: Run, model: nn.Module, embed: "partial[_Rows]", tolerance: float
) -> None:
    rows = embed()
    if not rows.draws and not contract.draws:
        precise = _in_float64(run, model, embed, rows, max(AGREE, tolerance))
        if precise is not None:
            tolerance = FLOAT64.least
        found = precise or rows
        check_rows(contract, (found.together, found.reverse), found.alone, found.again, tolerance)
    check_loss(contract, rows.together, rows.columns)


def _in_float64(
    run: Run, model: nn.Module, embed: "partial[_Rows]", plain: _Rows, limit: float
) -> _Rows | None:
    """Return the embeddings in float64, or None if the model cannot run so.

    ``limit``: of the relative distance from those with the weights as they are.
    """
    wide: _Rows | None = None
    trusted = False
    try:
        with in_float64(model):
            wide = embed(wide=True)
        distances = [
            float(apart(part.cpu(), wide.together[name].cpu()))
            for name, part in plain.together.items()
        ]
        trusted = max(distances) <= limit
    except Exception:  # an operation without float64, a constant in float32, no memory
        trusted = False
    if run.sharded:
        trusted = not run.any(not trusted)
    return wide if trusted else None


def _embedded(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    samples: Samples,
    *,
    wide: bool = False,
    watch: DrawWatch | None = None,
) -> _Rows:
    """Embed the samples in both orders, each alone, and the first one twice.

    ``wide``: with batches in float64. ``watch``: find the modules that draw.
    """
    reseed(run.device, job.recipe.seed, 0, others=True)
    batches = []
    single = [[one] for one in samples]
    for some in (samples, samples[::-1], samples[:1], *single):
        batch, _ = make_batch(contract, run, some)
        batches.append((batch_in_float64(batch) if wide else batch, len(some)))
    before = random_states(run.device)
    with watch or nullcontext():
        together, reverse, again, *alone = (
            parts_of(contract, model, batch, number) for batch, number in batches
        )
    draws = has_drawn(before, run.device)
    return _Rows(together, reverse, alone, again, columns_of(job.task, batches[0][0]), draws)
