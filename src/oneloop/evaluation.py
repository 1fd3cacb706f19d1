"""Exact distributed evaluation: every sample counts once, on any number of ranks."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn

from oneloop.basics.heartbeats import BEATS, METRICS
from oneloop.basics.progress import tracked
from oneloop.basics.seeds import reseed
from oneloop.basics.tensors import reshard, share_buffers
from oneloop.data.sample_reader import CannotSend, Reader, sample_reader
from oneloop.data.seeded_samples import Place, SeededSamples
from oneloop.data.step_batches import Batch, CollateWithWeight, loader, transferred
from oneloop.ema import EMA
from oneloop.show.examples import Examples, Shows
from oneloop.task_protocol.evaluation_metrics import (
    Metrics,
    adapted,
    matrices,
    prefix,
    scalars,
)
from oneloop.task_protocol.evaluation_sums import Apart, Together, WholeBatches, computed
from oneloop.task_protocol.generated import Generation, generated_metrics, generating_weights
from oneloop.task_protocol.metric_collection import on_device
from oneloop.task_protocol.protocol import Objective
from oneloop.task_protocol.whole_batch import is_whole_batch


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
    examples: Examples | None = None,
    name: str = "",
    exact: bool = False,
    window: int | None = None,
    pinned: bool = True,
    generation: Generation | None = None,
) -> dict[str, float] | None:
    """Return loss (weighted as in training) and metrics. Collective: call on every rank.

    Args:
        task: has ``collate``, ``weight``, ``loss`` (or ``embed`` with ``batch_loss``) and,
            optionally, ``metrics``.
        model: as prepared for training.
        dataset: map-style.
        accelerator: its ranks share the samples.
        micro: micro-batch size per rank.
        workers: number of data loading processes.
        dtype: dtype of floating-point inputs.
        seed: seed of random data sets.
        interrupted: called once per micro-batch, equal on all ranks; True ends the evaluation.
        examples: collects samples to show, if the task can show them, and matrices.
        name: name of the set, for messages.
        exact: bit-identical sums on any number of ranks; ValueError for a metric that has none.
        window: samples of a loss over a whole batch (default: ``micro``); the last may be smaller.
        pinned: keep batches in pinned host memory on CUDA.
        generation: for which samples the task generates, for its ``generated_metrics``.

    Returns:
        ``{"loss": …, "accuracy": …}``, equal on all ranks; for a mixture also ``loss/NAME``; None
        if interrupted.
    """
    sources = getattr(dataset, "sources", None) or {"": range(len(dataset))}
    ranks = accelerator.num_processes
    share = share_of([*sources.values()], micro, ranks, accelerator.process_index)
    device = accelerator.device
    keyed = SeededSamples(dataset, seed=seed, name=name)
    collate = CollateWithWeight(task.collate, task.weight, dtype=dtype)  # weights may differ

    measured = on_device(task.metrics(), device) if hasattr(task, "metrics") else None
    kind = Apart if exact else Together
    sums: Together | Apart | WholeBatches = kind(task, len(sources), device, measured, ranks=ranks)
    if is_whole_batch(task):
        sums = WholeBatches(
            task, measured, share.cut, micro=micro, window=window or micro, seed=(device, seed)
        )
    loading = _Loading(keyed, collate, workers, device, pinned)

    # Run the forwards.
    share_buffers(model)
    with evaluating(model), closing(loading.weighed(share)) as weighed:
        batches = tracked(weighed, "evaluating", total=len(share.places))
        for source, (batch, weight) in zip(share.sources, batches, strict=True):
            if interrupted():
                return None
            outputs = sums.batch(model, batch, source, weight, idle=share.idle)
            if examples is not None and source is not None:
                examples.take(batch, outputs)
        if examples is not None and hasattr(task, "show"):
            _look(examples, task, model, loading, micro, accelerator)

    with BEATS.phase(METRICS):  # collective: sum over the ranks
        results = _losses([*sources], *sums.summed(accelerator, each=len(share.places)))
        if measured is not None:
            results |= _computed(task, adapted(measured), accelerator, examples)

    if generation is None:
        return results
    made = _generated(task, model, loading, generation, accelerator, interrupted, exact=exact)
    return None if made is None else results | made


def _generated(
    task: Any,
    model: nn.Module,
    loading: "_Loading",
    generation: Generation,
    accelerator: Accelerator,
    interrupted: Callable[[], bool],
    *,
    exact: bool,
) -> dict[str, float] | None:
    """Return the metrics of what the task generates; None if interrupted. Collective."""
    # The micro-batches do not depend on the number of ranks.
    indices = generation.indices(len(loading.samples))
    ranks, rank = accelerator.num_processes, accelerator.process_index
    share = share_of([range(len(indices))], generation.batch, ranks, rank).of(indices)

    with evaluating(model), closing(loading.weighed(share)) as weighed:
        batches = (batch for batch, _ in weighed)
        shown = tracked(batches, "generating", total=len(share.places))
        return generated_metrics(
            task,
            model,
            zip(share.sources, shown, strict=True),
            idle=share.idle,
            accelerator=accelerator,
            interrupted=interrupted,
            exact=exact,
        )


def _losses(
    sources: Sequence[str], totals: Sequence[float], weights: Sequence[float]
) -> dict[str, float]:
    metrics = {"loss": math.fsum(totals) / math.fsum(weights)}
    if len(totals) > 1:
        for name, total, weight in zip(sources, totals, weights, strict=True):
            if weight:
                metrics[f"loss/{name}"] = total / weight
    return metrics


@dataclass(frozen=True)
class _Loading:
    """How an evaluation loads its batches."""

    samples: SeededSamples
    collate: CollateWithWeight
    workers: int
    device: torch.device
    pinned: bool

    def weighed(self, share: "Share") -> Generator[tuple[Batch, float]]:
        """Yield the batches on the device with their weights; copy the next one meanwhile.

        All generators are seeded before each batch, so that a forward draws the same numbers at
        each evaluation, on any number of ranks. Close it after an exception: else the data workers
        stay alive.
        """
        weights: deque[float] = deque()
        loaded = loader(
            self.samples,
            self.collate,
            share.places,
            workers=self.workers,
            device=self.device,
            pinned=self.pinned,
        )

        def batches() -> Iterator[Batch]:
            for batch, weight in loaded:
                weights.append(weight)
                yield batch

        on_device = transferred(batches(), self.device, pinned=self.pinned)
        for number, batch in enumerate(on_device, start=share.first):
            reseed(self.device, self.samples.seed, number, others=True)
            yield batch, weights.popleft()


def _computed(
    task: Any, metrics: Metrics, accelerator: Accelerator, examples: Examples | None
) -> dict[str, float]:
    values = computed(metrics)
    if examples is not None:
        examples.matrices = matrices(task, values)
    return scalars(values)


def _look(
    examples: Examples,
    task: Objective,
    model: nn.Module,
    loading: "_Loading",
    micro: int,
    accelerator: Accelerator,
) -> None:
    samples = loading.samples
    chosen = sample_reader(partial(_chosen, samples, loading.collate), workers=loading.workers)
    with BEATS.phase(METRICS), chosen as read:
        load = partial(_on_device, read, loading.device)
        try:
            examples.look(
                cast(Shows, task),
                model,
                len(samples),
                load,
                micro=micro,
                accelerator=accelerator,
            )
        except CannotSend as error:  # on all ranks, which load the same samples
            examples.problem = f"a data worker cannot send a sample ({error})"


def _chosen(
    keyed: SeededSamples, collate: CollateWithWeight, indices: list[int]
) -> tuple[list[Any], Batch]:
    """Return the samples of these indices, and their batch."""
    samples = keyed.good([(0, index) for index in indices])
    batch, _ = collate(samples)
    return [sample for _, sample in samples], batch


def _on_device(read: Reader, device: torch.device, indices: list[int]) -> tuple[list[Any], Batch]:
    """Return the samples of these indices, and their batch on the device."""
    samples, batch = read(indices)
    return samples, next(transferred(iter([batch]), device))


@dataclass(frozen=True)
class Share:
    """The micro-batches of one rank."""

    places: list[list[Place]]
    # source of each micro-batch; None: it repeats samples, and does not count
    sources: list[int | None]
    first: int  # index of the first micro-batch among those of all ranks
    cut: list[tuple[int, range]]  # source and samples of each micro-batch, of all ranks in order

    @property
    def idle(self) -> bool:
        """Whether no micro-batch of this rank counts."""
        return all(source is None for source in self.sources)

    def of(self, indices: Sequence[int]) -> "Share":
        """Return the same share of a subset: its sample i is sample ``indices[i]`` of the set."""
        places = []
        for micro_batch in self.places:
            places.append([(epoch, indices[index]) for epoch, index in micro_batch])
        return replace(self, places=places)


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
    examples: Examples | None = None,
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
    results: dict[str, dict[str, float]] = {}
    holding: dict[str, Callable[[], Any]] = {"raw": nullcontext}
    for ema in emas:
        holding[ema.name] = ema.swapped

    # Examples and what is generated come from one kind of weights.
    generating = generating_weights([*holding][1:])
    if examples is not None:
        examples.weights = generating
    for weights, held in holding.items():
        results[weights] = {}
        here = weights == generating
        shown = examples if here else None
        with held():
            for name, dataset in sets.items():
                metrics = evaluate(
                    task,
                    model,
                    dataset,
                    examples=shown,
                    name=name,
                    generation=generation if here else None,
                    **options,
                )
                shown = None
                if metrics is None:
                    return None
                for metric, value in metrics.items():
                    results[weights][f"{prefix(name)}/{metric}"] = value
    return results
