"""What a task generates in an evaluation: for which samples, and its texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oneloop.basics.generation import TEXTS
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


def for_metrics(
    task: Any, batch: Mapping[str, Any], made: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Any]:
    """Return what ``update_generated`` gets besides the metrics.

    Args:
        task: for the message.
        batch: with the samples' ``index``.
        made: the result of :func:`oneloop.basics.generation.generated`.

    Returns:
        The batch with all that was generated, and the texts; without texts all that was generated.

    Raises:
        ValueError: the texts are not a list of one text for each sample.
    """
    texts = made.get(TEXTS, made)
    if texts is made:
        return batch, made
    samples = len(batch["index"])
    is_list = isinstance(texts, list | tuple)
    if is_list and len(texts) == samples and all(isinstance(text, str) for text in texts):
        return {**made, **batch}, list(texts)

    raise ValueError(
        f"{named(task, 'generate')} must return a list of one text (str) for each sample, or a "
        f"dict; it returned {texts!r:.200} for {samples} samples"
    )
