"""What a task generates in an evaluation: for which samples, and for which metrics."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oneloop.basics.generation import TEXTS, TIES, generated
from oneloop.basics.heartbeats import BEATS, METRICS
from oneloop.basics.tensors import summed
from oneloop.task_protocol.evaluation_metrics import adapted, scalars
from oneloop.task_protocol.evaluation_sums import computed
from oneloop.task_protocol.metric_collection import on_device
from oneloop.task_protocol.metric_states import MetricStates
from oneloop.task_protocol.user_code import named

_AT_ONCE = 8  # samples that are generated together, by default
_MEMBERS = ("generate", "generated_metrics", "update_generated")


@dataclass(frozen=True)
class Generation:
    """For which samples of each evaluated set a task generates.

    Args:
        samples: number of samples, evenly spread over the set; None: all of them.
        batch: samples that are generated together. It must not depend on the number of ranks:
            then the padding, and so the result, does not depend on it either.
    """

    samples: int | None = None
    batch: int = _AT_ONCE

    @classmethod
    def of(cls, samples: int | Literal["all"], batch: int | None) -> "Generation | None":
        """Return the generation of a recipe: ``eval.generate`` and ``eval.micro``; 0: None."""
        if not samples:
            return None
        return cls(None if samples == "all" else samples, batch or _AT_ONCE)

    def indices(self, size: int) -> list[int]:
        """Return the indices of the samples in a set of this size."""
        if self.samples is None or self.samples >= size:
            return list(range(size))
        return [place * size // self.samples for place in range(self.samples)]


def generating_weights(emas: Sequence[str]) -> str:
    """Return the weights that generate in an evaluation: those of the first EMA, else ``raw``.

    Args:
        emas: names of the EMAs that are evaluated.
    """
    return emas[0] if emas else "raw"


def check_generates(task: Any, eval_sets: Mapping[str, Any]) -> None:
    """Raise ValueError if a task or its data lack what ``eval.generate`` needs.

    Args:
        task: of the run.
        eval_sets: its evaluation sets by name. A set with the attribute ``cut_references``, a text
            that is not empty, is rejected with this text; so is a mixture that holds one.
    """
    if not eval_sets:
        raise ValueError(
            "eval.generate: the task has no validation set; add one to eval_sets(), or remove it"
        )
    missing = [name for name in _MEMBERS if not callable(getattr(task, name, None))]
    if missing:
        raise ValueError(
            f"eval.generate: the task {type(task).__name__} has no {', '.join(missing)}; add the "
            "missing methods (docs/how-to/generate-while-training.md), or remove eval.generate"
        )
    for name, dataset in eval_sets.items():
        mixed = getattr(dataset, "sets", None)
        parts = mixed.values() if isinstance(mixed, Mapping) else [dataset]
        for part in parts:
            cut = getattr(part, "cut_references", "")
            if cut:
                raise ValueError(f"eval.generate cannot compare texts of the {name} set: {cut}")


def made_for_metrics(task: Any, made: Mapping[str, Any], *, samples: int) -> Any:
    """Return what ``update_generated`` gets: the texts, or without texts all that was generated.

    Args:
        task: for the message.
        made: the result of :func:`generated`.
        samples: number of samples of the batch.

    Raises:
        ValueError: the texts are not a list of one text for each sample, or ``near_ties`` is not a
            tensor of one bool for each sample.
    """
    if TIES in made:
        _check_ties(task, made[TIES], samples)
    if TEXTS not in made:
        return made
    texts = made[TEXTS]
    is_list = isinstance(texts, list | tuple)
    if is_list and len(texts) == samples and all(isinstance(text, str) for text in texts):
        return list(texts)

    # Describe what is wrong: the type, an entry, or the number.
    found = f"a {type(texts).__name__}"
    if is_list:
        strange = [type(text).__name__ for text in texts if not isinstance(text, str)]
        found = f"a list with entries of type {strange[0]}" if strange else f"{len(texts)} texts"
    raise ValueError(
        f"{named(task, 'generate')} must return a list of one text (str) for each sample, or a "
        f"dict; it returned {found} for {samples} samples"
    )


def _check_ties(task: Any, ties: Any, samples: int) -> None:
    """Raise ValueError if the entry ``near_ties`` is not a tensor of one bool for each sample."""
    found = f"a {type(ties).__name__}"
    if isinstance(ties, Tensor):
        if ties.dtype == torch.bool and ties.shape == (samples,):
            return
        found = f"{str(ties.dtype)[6:]} of shape {tuple(ties.shape)}"
    raise ValueError(
        f"{named(task, 'generate')} must return {TIES!r} as a bool tensor of shape ({samples},), "
        f"True for each text that rounding could change; it returned {found}; correct it, or leave "
        "it out"
    )


class _NearTies:
    """Counts samples that rounding could change, if a task finds them."""

    def __init__(self, task: Any, device: torch.device) -> None:
        self._task = task
        self._batches = 0
        self._looked = 0  # batches in which the task looked for near ties
        self._found = torch.zeros((), dtype=torch.int64, device=device)  # samples with one

    def add(self, made: Mapping[str, Any], *, counts: bool) -> None:
        """Add what was generated for a batch; ``counts``: its samples count."""
        self._batches += 1
        if TIES in made:
            self._looked += 1
            if counts:
                self._found += made[TIES].sum()

    def total(self) -> float | None:
        """Return the number of samples of all ranks; None: the task does not look for near ties.

        Collective: call on every rank.

        Raises:
            ValueError: the task has looked for them in some batches only; raised on all ranks.
        """
        own = [self._batches, self._looked, int(self._found)]
        batches, looked, found = summed(self._found.new_tensor(own)).tolist()
        if looked not in (0, batches):
            raise ValueError(
                f"{named(self._task, 'generate')} returned {TIES!r} for {looked} of {batches} "
                "batches; return it for each batch, or for none"
            )
        return float(found) if looked else None


def generated_metrics(
    task: Any,
    model: nn.Module,
    batches: Iterable[tuple[int | None, Mapping[str, Any]]],
    *,
    idle: bool,
    accelerator: Any,
    interrupted: Callable[[], bool],
    exact: bool,
) -> dict[str, float] | None:
    """Generate, and return the metrics over all ranks. Collective: call on every rank.

    They are computed as if one process had seen all micro-batches, in order. ``near_ties`` is the
    number of samples that rounding could change, if the task finds them.

    Args:
        task: has ``generate``, ``generated_metrics`` and ``update_generated``.
        model: in eval mode.
        batches: micro-batches on the device, equally many on all ranks, each with its source; None:
            it repeats samples, and does not count.
        idle: whether no micro-batch of this rank counts.
        accelerator: of the ranks.
        interrupted: called once per micro-batch, equal on all ranks; True ends the evaluation.
        exact: bit-identical sums on any number of ranks.

    Returns:
        Metrics by name; None if interrupted.

    Raises:
        ValueError: ``generate`` returned something else than before the run.
    """
    device = accelerator.device
    metrics = on_device(task.generated_metrics(), device)
    states = MetricStates(metrics, apart=exact, ranks=accelerator.num_processes)
    near_ties = _NearTies(task, device)
    micro_batches = 0
    for source, batch in batches:
        if interrupted():
            return None
        made = generated(task, model, batch)
        given = made_for_metrics(task, made, samples=len(batch["index"]))
        if source is not None or idle:
            task.update_generated(metrics, batch, given)

        # A rank without samples only needs the attributes that an update sets.
        if source is not None:
            states.micro_batch()
        elif idle:
            states.clear()
        near_ties.add(made, counts=source is not None)
        micro_batches += 1

    with BEATS.phase(METRICS):
        states.combine(accelerator, each=micro_batches)
        values = computed(adapted(metrics, "generated_metrics"))
        results = scalars(values, "generated_metrics")
        total = near_ties.total()
        if total is not None:
            results[TIES] = total
    return results
