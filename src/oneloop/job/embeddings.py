"""Check before a run that an embedding depends on its sample only, not on others of the batch."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oneloop.basics.seeds import reseed
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.float64 import batch_in_float64, in_float64
from oneloop.job.halves import AGREE, FLOAT64, without_draws
from oneloop.job.restore import has_drawn, random_states
from oneloop.job.trial_passes import Samples, make_batch
from oneloop.launch.processes import Run
from oneloop.tasks.protocol_checks import Contract
from oneloop.tasks.whole_batch import Parts, apart, check_loss, check_rows, columns_of, parts_of


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
    check_loss(contract, rows.together, rows.columns)
    if rows.draws or contract.draws:
        return

    # In float64, rounding hides no difference.
    wide: _Rows | None = None
    try:
        with in_float64(model):
            wide = embed(wide=True)
        limit = max(AGREE, tolerance)
        trusted = all(
            float(apart(part.cpu(), wide.together[name].cpu())) <= limit
            for name, part in rows.together.items()
        )
    except Exception:  # an operation without float64, a constant in float32, no memory
        trusted = False
    if run.sharded:
        trusted = not run.any(not trusted)
    if trusted and wide is not None:
        rows = wide
        tolerance = FLOAT64.least
    check_rows(contract, (rows.together, rows.reverse), rows.alone, rows.again, tolerance)


def _embedded(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    samples: Samples,
    *,
    wide: bool = False,
) -> _Rows:
    """Embed the samples in both orders, each alone, and the first one twice.

    ``wide``: with batches in float64.
    """
    reseed(run.device, job.recipe.seed, 0, others=True)
    before = random_states(run.device)
    batches = []
    for some in (samples, samples[::-1], samples[:1], *([one] for one in samples)):
        batch, _ = make_batch(contract, run, some)
        batches.append((batch_in_float64(batch) if wide else batch, len(some)))
    together, reverse, again, *alone = (
        parts_of(contract, model, batch, number) for batch, number in batches
    )
    draws = has_drawn(before, run.device)
    return _Rows(together, reverse, alone, again, columns_of(job.task, batches[0][0]), draws)
