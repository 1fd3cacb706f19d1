"""Exact distributed evaluation: every sample counts once, on any number of ranks."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from oneloop.basics.generation import generated
from oneloop.basics.heartbeats import BEATS, METRICS
from oneloop.basics.progress import tracked
from oneloop.basics.seeds import reseed
from oneloop.basics.tensors import reshard, share_buffers
from oneloop.data.sample_reader import CannotSend, sample_reader
from oneloop.data.seeded_samples import Place, SeededSamples
from oneloop.data.step_batches import Batch, CollateWithWeight, loader, transferred
from oneloop.ema import EMA
from oneloop.task_protocol.evaluation_metrics import make_metrics, prefix, scalars
from oneloop.task_protocol.evaluation_sums import Rows, loss_sums, whole_batch_sums
from oneloop.task_protocol.generated import Generation, for_metrics, generating_weights
from oneloop.task_protocol.metric_states import RankMetrics
from oneloop.task_protocol.protocol import Objective
from oneloop.task_protocol.whole_batch import columns_of, is_whole_batch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Use eval mode without gradients in this context.

    Afterwards restore the mode of every module, and FSDP2's shards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        reshard(model)


def evaluate(
    task: Objective,
    model: nn.Module,
    dataset: Any,
    *,
    accelerator: Accelerator,
    micro: int,
    workers: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    interrupted: Callable[[], bool] = lambda: False,
    examples: Any = None,
    name: str = "",
    exact: bool = False,
    window: int | None = None,
    pinned: bool = True,
    generation: Generation | None = None,
) -> dict[str, float] | None:
    """Return loss (weighted as in training) and metrics. Collective: call on every rank.

    Args:
        task: has ``collate``, ``weight``, ``loss`` (or ``embed``, ``batch_loss``); ``metrics``.
        model: as prepared for training.
        dataset: map-style.
        accelerator: its ranks share the samples.
        micro: micro-batch size per rank.
        workers: number of data loading processes.
        dtype: dtype of floating-point inputs.
        seed: seed of random data sets.
        interrupted: called once per micro-batch, equal on all ranks; True ends the evaluation.
        examples: collects samples to show, if the task can show them, and matrices
            (:class:`oneloop.tools.report.examples.Examples`).
        name: name of the set, for messages.
        exact: bit-identical losses and metrics on any number of ranks.
        window: samples of a loss over a whole batch (default: ``micro``); the last may be smaller.
        pinned: keep batches in pinned host memory on CUDA.
        generation: for which samples the task generates, for its ``generated_metrics``.

    Returns:
        Metrics by name, equal on all ranks; of a mixture also ``loss/NAME``; None if interrupted.
    """
    sources = getattr(dataset, "sources", None) or {"": range(len(dataset))}
    spans = [*sources.values()]
    ranks, rank = accelerator.num_processes, accelerator.process_index
    share = share_of(spans, micro, ranks, rank)
    device = accelerator.device
    keyed = SeededSamples(dataset, seed=seed, name=name)
    collate = CollateWithWeight(task.collate, task.weight, dtype=dtype)  # weights may differ

    whole = is_whole_batch(task)
    losses = list[tuple[int, Tensor, float]]()
    rows = list[tuple[Rows, float]]()  # of a whole-batch loss, and their weight
    metrics = None
    if hasattr(task, "metrics"):
        made = make_metrics(task, "metrics", device)
        add = task.update  # type: ignore[attr-defined]
        metrics = RankMetrics(made, add, ranks=1 if whole else ranks, exact=exact)

    def load(share: Share, what: str) -> Generator[tuple[int | None, Batch, float]]:
        """Yield the source of each micro-batch, the batch on the device, and its weight.

        All generators are seeded before each batch, so that a forward draws the same numbers at
        each evaluation, on any number of ranks. Close it after an exception: else the data workers
        stay alive.
        """
        host = loader(keyed, collate, share.places, workers=workers, device=device, pinned=pinned)
        batches = transferred(host, device, pinned=pinned)
        shown = tracked(zip(share.sources, batches, strict=True), what, total=len(share.places))
        for number, (source, (batch, weight)) in enumerate(shown, start=share.first):
            reseed(device, seed, number, others=True)
            yield source, batch, weight

    # Run the forwards.
    share_buffers(model)
    with evaluating(model), closing(load(share, "evaluating")) as loaded:
        for source, batch, weight in loaded:
            if interrupted():
                return None
            if whole:
                outputs = task.embed(model, batch)  # type: ignore[attr-defined]
                rows.append(((outputs, columns_of(task, batch)), weight))
            else:
                loss, outputs = task.loss(model, batch)
            if source is None:
                continue  # a repeated micro-batch, which does not count
            if not whole:
                losses.append((source, loss.detach().clone(), weight))
                if metrics is not None:
                    metrics.update(batch, outputs)
            if examples is not None:
                examples.take(batch, outputs)

        # Show the chosen samples, if the task can show them.
        if examples is not None and hasattr(task, "show"):
            chosen = sample_reader(partial(_chosen, keyed, collate), workers=workers)
            with BEATS.phase(METRICS), chosen as read:
                try:
                    examples.look(task, model, len(dataset), read, device=device, micro=micro)
                except CannotSend as error:  # on all ranks, which load the same samples
                    examples.problem = f"a data worker cannot send a sample ({error})"

    with BEATS.phase(METRICS):
        # The mean loss of all samples; of several sources also that of each one.
        if whole:
            sums, (parts, columns) = whole_batch_sums(
                task,
                rows,
                sources=spans,
                cut=share.cut,
                window=window or micro,
                device=device,
                seed=seed,
            )
        else:
            sums = loss_sums(losses, len(sources), exact=exact)
        totals, weights = zip(*sums, strict=True)
        results = {"loss": math.fsum(totals) / math.fsum(weights)}
        for source_name, (total, weight) in zip(sources, sums, strict=True):
            if len(sources) > 1 and weight:
                results[f"loss/{source_name}"] = total / weight

        # Metrics of a whole-batch loss see the whole set at once.
        if metrics is not None:
            if whole:
                metrics.update(columns, parts)
            values = metrics.compute()
            if examples is not None:
                examples.draw(task, values)
            results |= scalars(values)
    if generation is None:
        return results

    # Generate. The micro-batches do not depend on the number of ranks.
    indices = generation.indices(len(dataset))
    share = share_of([range(len(indices))], generation.batch, ranks, rank)
    places = [[(0, indices[number]) for _, number in row] for row in share.places]
    made = make_metrics(task, "generated_metrics", device)
    add = task.update_generated  # type: ignore[attr-defined]
    metrics = RankMetrics(made, add, ranks=ranks, exact=exact)
    share = replace(share, places=places)
    with evaluating(model), closing(load(share, "generating")) as loaded:
        for source, batch, _ in loaded:
            if interrupted():
                return None
            texts = for_metrics(task, batch, generated(task, model, batch))
            if source is not None:
                metrics.update(*texts)
    with BEATS.phase(METRICS):
        return results | scalars(metrics.compute())


def _chosen(
    keyed: SeededSamples, collate: CollateWithWeight, indices: list[int]
) -> tuple[list[Any], Batch]:
    """Return the samples of these indices, and their batch on the host."""
    samples = keyed.good([(0, index) for index in indices])
    return [sample for _, sample in samples], collate(samples)[0]


@dataclass(frozen=True)
class Share:
    """The micro-batches of one rank."""

    places: list[list[Place]]
    # source of each micro-batch; None: it repeats samples, and does not count
    sources: list[int | None]
    first: int  # index of the first micro-batch among those of all ranks
    cut: list[tuple[int, range]]  # source and samples of each micro-batch, of all ranks in order


def share_of(sources: Sequence[range], micro: int, ranks: int, rank: int) -> Share:
    """Return this rank's micro-batches: consecutive ones, so that it reads adjacent samples.

    Each micro-batch has samples of one source only. FSDP2 needs equal forward counts, so a rank
    without micro-batches left repeats the first one, and does not count it.
    """
    # Cut each source into micro-batches.
    cut = []
    for number, source in enumerate(sources):
        for start in range(source.start, source.stop, micro):
            cut.append((number, range(start, min(start + micro, source.stop))))

    # Take this rank's range of them.
    each = math.ceil(len(cut) / ranks)
    first = rank * each
    places: list[list[Place]] = []
    counted: list[int | None] = []
    for at in range(first, first + each):
        left = at < len(cut)
        number, samples = cut[at if left else 0]
        places.append([(0, index) for index in samples])
        counted.append(number if left else None)
    return Share(places, counted, first, cut)


def evaluate_all(
    task: Objective,
    model: nn.Module,
    sets: Mapping[str, Any],
    *,
    emas: Iterable[EMA] = (),
    examples: Any = None,
    generation: Generation | None = None,
    **options: Any,
) -> dict[str, dict[str, float]] | None:
    """:func:`evaluate` several sets, with the weights and with each EMA.

    Args:
        task: See :func:`evaluate`.
        model: As prepared for training.
        sets: Data sets by name.
        emas: Averages of the model's weights.
        examples: Collects samples of the first set to show, with the first EMA, if there is one.
        generation: For which samples the task generates, with these weights, too.
        options: Other arguments of :func:`evaluate`.

    Returns:
        ``{"raw": {"eval/loss": …, "test/loss": …}, "ema": …}``; None if interrupted.
    """
    # Each kind of weights is in the model within its context.
    contexts: dict[str, Any] = {"raw": nullcontext()}
    for ema in emas:
        contexts[ema.name] = ema.swapped()

    # Examples and what is generated come from one kind of weights.
    generating = generating_weights([*contexts][1:])
    if examples is not None:
        examples.weights = generating
    results: dict[str, dict[str, float]] = {}
    for weights, context in contexts.items():
        results[weights] = {}
        with context:
            for number, (name, dataset) in enumerate(sets.items()):
                metrics = evaluate(
                    task,
                    model,
                    dataset,
                    examples=examples if weights == generating and not number else None,
                    name=name,
                    generation=generation if weights == generating else None,
                    **options,
                )
                if metrics is None:
                    return None
                for metric, value in metrics.items():
                    results[weights][f"{prefix(name)}/{metric}"] = value
    return results
