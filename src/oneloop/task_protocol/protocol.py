"""The task protocol: any class with these members is a task."""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.loaded_step import LOADED_FOR
from oneloop.task_protocol.user_code import named


class Objective(Protocol):
    """What training minimizes: methods that make a batch, its weight and its loss."""

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return samples as one batch.

        Args:
            samples: items of a data set.

        Returns:
            Tensors or lists by name, on the host, with the same names each time. oneloop adds
            "index", (samples,): the indices of the samples.
        """

    def weight(self, batch: dict[str, Any]) -> Tensor:
        """Return what the loss is divided by.

        Args:
            batch: a batch of ``collate``.

        Returns:
            The number of samples or of target tokens; 0-dim, on the host.
        """

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the SUM of the losses over what ``weight`` counts, and detached outputs.

        In training, 0-dim outputs are logged as train/NAME: their mean over the micro-batches,
        weighted by ``weight``.

        Args:
            model: the model; call ``model(...)`` itself.
            batch: a batch of ``collate``, on the device.

        Returns:
            The sum, 0-dim, and outputs by name: (samples, …), or 0-dim.
        """


RECORDED: ContextVar[dict[str, Any] | None] = ContextVar("RECORDED", default=None)
"""classes and image shape of a run, so that ``oneloop predict`` needs no training data; None: a
task reads its data"""


class Task(Objective, Protocol):
    """What a run trains.

    Avoid ``.item()``, boolean indexing and other data-dependent shapes: each is a device sync.

    The page docs/reference/task.md describes the optional members: ``embed`` with ``batch_loss``
    and ``batch_columns`` instead of ``loss``, ``metrics`` with ``update``, ``show``, ``generate``,
    ``writes``, ``samples_of``, ``predicted``, ``save``, ``state_dict`` with ``load_state_dict``,
    ``before_run``, ``sample_weight``, ``unit``, ``additive``, ``classes``, ``notes`` and
    ``progress``.

    Packaged tasks also have:

    - ``needs: dict[str, str]``: class attribute; arguments that require a value of another
      argument, such as ``{"width": "model=cnn", "held_out": "data!=digits|mnist"}``; otherwise they
      are rejected.
    - ``origin``: set by ``model``, an :class:`oneloop.basics.base_models.BaseModel` if the frozen
      parameters are those of a base model. Checkpoints and ``final/`` then name the base model, and
      hold only the other parameters.
    - ``merge(model) -> nn.Module``: an equivalent model without an origin.
    """

    def model(self) -> nn.Module:
        """Return a new model, with weights from torch's global generator."""

    def train_set(self) -> Any:
        """Return a map-style data set: ``len(data)`` and ``data[index]``.

        Its random numbers must come from a global generator (torch, random, numpy).
        """

    def eval_sets(self) -> dict[str, Any]:
        """Return map-style data sets by name.

        "validation" is logged as eval/…, and others as NAME/…; "test" is evaluated only at the end.
        """


class Progress:
    """Progress of a run: the same for any parallel layout, and after a resume.

    While a sample is loaded or collated, also ahead or in a data worker, it is that of the step for
    which it is loaded.

    Args:
        position: returns how many samples were drawn before this step.
        batch: global batch size in samples.
        total: steps of the run.
    """

    def __init__(self, position: Callable[[], int], batch: int, total: int) -> None:
        self._trained = position
        self._batch = batch
        self.total = total

    def __reduce__(self) -> tuple[Any, ...]:  # another process gets the progress of now
        return Progress, (partial(int, self._position()), self._batch, self.total)

    def _position(self) -> int:
        loaded_for = LOADED_FOR.get()
        return self._trained() if loaded_for is None else loaded_for

    @property
    def step(self) -> int:
        """Number of steps before this one, including skipped bad steps."""
        return self._position() // self._batch

    @property
    def share(self) -> float:
        """Completed share of the run, from 0 to 1."""
        return min(1.0, self.step / self.total)


_NEEDED = ("model", "train_set", "eval_sets", "collate", "weight")


def check(task: Any) -> None:
    """Raise ValueError if a method of a task is missing, or an attribute is wrong."""
    # Choose the methods of the loss: over each sample, or over the whole batch.
    whole = hasattr(task, "batch_loss") or (hasattr(task, "embed") and not hasattr(task, "loss"))
    loss = ("embed", "batch_loss") if whole else ("loss",)
    if whole and _has(task, "loss"):
        raise ValueError(
            f"task.name {type(task).__name__} has both loss and batch_loss; remove one of them"
        )

    # Find what is missing.
    missing = [name for name in (*_NEEDED, *loss) if not _has(task, name)]
    if hasattr(task, "metrics") and not callable(getattr(task, "update", None)):
        missing.append("update (since it has metrics)")
    if hasattr(task, "state_dict") != hasattr(task, "load_state_dict"):
        missing.append("load_state_dict" if hasattr(task, "state_dict") else "state_dict")
    if missing:
        raise ValueError(
            f"task.name {type(task).__name__} is not a task: it lacks {', '.join(missing)} (see "
            "oneloop.task_protocol.protocol.Task)"
        )

    # Check the attributes.
    unit = getattr(task, "unit", "samples")
    if unit not in ("samples", "tokens"):
        raise BadInput(f'{named(task, "unit")} must be "samples" or "tokens", got {unit!r}')


def _has(task: Any, name: str) -> bool:
    """Whether a task has this method. A stub that it inherits from the protocol is none."""
    method = getattr(task, name, None)
    return callable(method) and getattr(method, "__func__", None) is not getattr(Task, name, ())


def check_sets(train: Any, evals: dict[str, Any]) -> None:
    """Raise ValueError, with its name, if a data set is empty or not map-style."""
    if not isinstance(evals, dict):
        raise ValueError(
            f"task: eval_sets() returned a {type(evals).__name__}; a dict of data sets by name "
            "is needed"
        )
    for name, dataset in {"train": train, **evals}.items():
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"task: the {name} set is a {type(dataset).__name__}, a stream without length or "
                "items, which cannot be shuffled or resumed exactly; give a map-style data set: "
                "write a stream to Parquet, or index its offsets (docs/how-to/from-streams.md)"
            )
        if len(dataset) == 0:
            raise ValueError(f"task: the {name} set is empty; it needs at least one sample")
