"""The task protocol: any class with these members is a task."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from oneloop.tasks.protocol_checks import check_signatures


class Objective(Protocol):
    """What is minimized: how samples become a batch, what it weighs, and what it costs."""

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """One batch of samples."""

    def weight(self, batch: dict[str, Any]) -> Tensor:
        """How much this batch counts: its samples, or its target tokens. 0-dim, on the host."""

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """SUM of the losses over what ``weight`` counts (0-dim), and detached outputs.

        Outputs that are 0-dim metrics in training are logged as train/NAME: their mean over the micro-batches, each
        counting by its weight.
        """


class Task(Objective, Protocol):
    """What is learned. No ``.item()``, no boolean indexing, no other data-dependent shape: each is a device wait.

    Optional members:
        ``sample_weight: float``: what every sample weighs, where that is the same for all; spares a sum per step.
        ``unit: str``: what the weight counts, "samples" (default) or "tokens".
        ``needs: dict[str, str]``: of the class: arguments that have an effect only with a value of another one,
        ``{"width": "model=cnn", "held_out": "data!=digits|mnist"}``; given without it, they are rejected.
        ``notes: list[str]``: lines for a person to read at the start.
        ``additive: bool``: False says that the loss of a batch is not the sum of its samples' (contrastive losses,
        mixup drawn in ``loss``, auxiliary losses over the batch); a run then promises the same bits for the same split
        only, and says so.
        ``metrics()`` with ``update(metrics, batch, outputs) -> None``: what is measured beside the loss, a new
        :class:`oneloop.tasks.evaluation_metrics.Metrics` (sums over samples, and the metrics that they make) or a
        ``torchmetrics.MetricCollection``.
        ``save(model, folder) -> None``: more files for ``final/`` (a tokenizer, a config).
        ``origin``: after ``model``, an :class:`oneloop.basics.base_models.BaseModel` if the frozen parameters are
        those of a base model. Checkpoints and ``final/`` then name the base model, and hold only the other parameters.
        ``merge(model) -> nn.Module``: a model without an origin, which says the same as this one.
        ``show(sample, outputs) -> dict``: how a person sees one held-out sample, given the rows of ``outputs`` that are
        its own: any of "image" (a tensor of (channels, height, width) or (height, width), of any range), "text",
        "tokens" (pairs of text and loss), "target" and "prediction" (text, numbers, or pictures and masks, which are
        laid beside the image), "right" (without it nothing is judged), "confidence", "prompt" and "continuation". The
        worst are those with the largest mean ``outputs["loss"]`` (samples, or samples x positions).
        ``generate(model, batch) -> dict[str, Tensor]``: more outputs, of the few samples that are shown at every
        evaluation (not of the worst). Every process calls it with the same samples, and must call the model equally
        often. Under FSDP2 only ``model(...)`` itself can be called.
        ``writes: bool``: True has ``oneloop predict`` call ``generate`` too, of every sample: it must then call the
        model equally often for any samples.
        ``progress``: an attribute (None in the class) in which a run puts a :class:`Progress`, for a ``loss`` that
        changes along the run (a warm-up of one of its terms, say).
        ``samples_of(data, *, labelled) -> Dataset``: every row of another place, in its order, for ``oneloop evaluate``
        (labelled) and ``predict`` (not: any label will do).
        ``predicted(batch, outputs) -> dict[str, list]``: columns of what ``predict`` writes, an entry for each sample.
        Without it the outputs themselves are written.
        ``state_dict() -> dict`` with ``load_state_dict(state) -> None``: what the task keeps from step to step beside
        the model's weights and buffers, in plain numbers, texts, lists and dicts; it goes into checkpoints and
        ``final/``. It must be the same on every process; what ``collate`` keeps is not (it runs ahead, elsewhere).
        ``classes: list[str]``: names of the rows and columns of a confusion matrix among ``metrics``.
    """

    def model(self) -> nn.Module:
        """A new model, its weights drawn from torch's global generator."""

    def train_set(self) -> Any:
        """Map-style data set. What is random in it must come from a global generator (torch, random, numpy)."""

    def eval_sets(self) -> dict[str, Any]:
        """Map-style data sets by name; "validation" is logged as eval/…, "test" is evaluated at the end only."""


class Progress:
    """How far a run is: the same for any split of the batch, and after a resume.

    Args:
        position: says how many samples were drawn from the order before this step.
        batch: global batch, in samples.
        total: steps of the run.
    """

    def __init__(self, position: Callable[[], int], batch: int, total: int) -> None:
        self._position, self._batch, self.total = position, batch, total

    @property
    def step(self) -> int:
        """Steps before this one, those included that were left out as bad."""
        return self._position() // self._batch

    @property
    def share(self) -> float:
        """Of the run, from 0 to 1."""
        return min(1.0, self.step / self.total)


_NEEDED = ("model", "train_set", "eval_sets", "collate", "weight", "loss")


def check(task: Any) -> None:
    """Rejects what is not a task.

    Raises:
        ValueError: names what is missing, or cannot be called as it is called.
    """
    missing = [name for name in _NEEDED if not callable(getattr(task, name, None)) or _is_stub(task, name)]
    if hasattr(task, "metrics") and not callable(getattr(task, "update", None)):
        missing.append("update (since it has metrics)")
    if hasattr(task, "state_dict") != hasattr(task, "load_state_dict"):
        missing.append("load_state_dict" if hasattr(task, "state_dict") else "state_dict")
    if missing:
        lacks = f"it lacks {', '.join(missing)} (see oneloop.tasks.protocol.Task)"
        raise ValueError(f"task.name {type(task).__name__} is not a task: {lacks}")
    check_signatures(task)


def _is_stub(task: Any, name: str) -> bool:
    """Whether the member is the protocol's own, inherited and not written."""
    return getattr(getattr(task, name), "__func__", None) is getattr(Task, name)


def check_sets(train: Any, evals: dict[str, Any]) -> None:
    """Rejects data sets that cannot be used.

    Raises:
        ValueError: names the set.
    """
    if not isinstance(evals, dict):
        raise ValueError(f"task: eval_sets() returned a {type(evals).__name__}; a dict of data sets by name is needed")
    for name, dataset in {"train": train, **evals}.items():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            kind = type(dataset).__name__
            raise ValueError(f"task: the {name} set is a {kind} without length or items; give a map-style one")
        if len(dataset) == 0:
            raise ValueError(f"task: the {name} set is empty; it needs at least one sample")
