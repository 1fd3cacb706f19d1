"""What a task promises, tried on real samples: each member is called once as a run calls it, and what is wrong is told.

>>> contract = Contract(task)
>>> batch = contract.collated(samples)
>>> weight = contract.weight(batch)
>>> loss, outputs = contract.loss(model, batch)
"""

import inspect
import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.exit_codes import BadInput, Inexact

_TAKES: dict[str, tuple[str, ...]] = dict.fromkeys(("model", "train_set", "eval_sets", "metrics", "state_dict"), ())
_TAKES |= {"collate": ("samples",), "weight": ("batch",), "loss": ("model", "batch"), "save": ("model", "folder")}
_TAKES |= {"update": ("metrics", "batch", "outputs"), "show": ("sample", "outputs"), "generate": ("model", "batch")}
_TAKES |= {"load_state_dict": ("state",)}
"""what each member is called with"""


def named(task: Any) -> str:
    """``my_task.py: Sines``: the file of a task's class, and its name."""
    kind = type(task)
    try:
        return f"{inspect.getsourcefile(kind)}: {kind.__name__}"
    except TypeError:  # of a class typed into an interpreter
        return kind.__name__


def theirs(task: Any, member: str, call: Callable[[], Any]) -> Any:
    """The result of ``call``, which is someone else's code.

    Raises:
        BadInput: whatever it raised, with file and line. (Too little memory is passed on as it is.)
    """
    try:
        return call()
    except (BadInput, Inexact, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):
            raise
        if isinstance(error, ValueError) and _by_oneloop(task, error):
            raise BadInput(str(error)) from error  # said for the user by a task of oneloop
        raise BadInput(
            f"{named(task)}.{member} failed: {type(error).__name__}: {error} ({_place(task, error)})"
        ) from error


def _by_oneloop(task: Any, error: Exception) -> bool:
    """Whether a packaged task itself raised it."""
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return type(task).__module__.startswith("oneloop.") and raised.is_relative_to(Path(__file__).parents[1])


def _place(task: Any, error: Exception) -> str:
    """File and line of the task's own code where it was raised; of the innermost code, where that is another's."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        own = inspect.getsourcefile(type(task))
    except TypeError:
        own = None
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{frame.filename}:{frame.lineno}"


def check_signatures(task: Any) -> None:
    """Rejects members that cannot be called as a run calls them.

    Raises:
        BadInput: names file and member.
    """
    for member, takes in _TAKES.items():
        if callable(method := getattr(task, member, None)):
            try:
                inspect.signature(method).bind(*takes)
            except TypeError as error:
                given, write = ", ".join(takes), ", ".join(("self", *takes))
                why = f"{named(task)}.{member} is called with ({given}), and that does not fit: {error}"
                raise BadInput(f"{why}; write def {member}({write})") from None
            except ValueError:  # of a function written in C, which tells nothing
                continue
    sample_weight, unit = getattr(task, "sample_weight", None), getattr(task, "unit", "samples")
    if sample_weight is not None and not (_is_number(sample_weight) and 0 < sample_weight < math.inf):
        raise BadInput(f"{named(task)}.sample_weight is {sample_weight!r}; a number above 0 is needed, or None")
    if unit not in ("samples", "tokens"):
        raise BadInput(f'{named(task)}.unit is {unit!r}; what the weight counts is "samples" or "tokens"')


class Contract:
    """A task's members, called and checked.

    Args:
        task: whose members they are.

    Every method raises BadInput with the task's file, the member, what it returned and what to do.
    """

    def __init__(self, task: Any) -> None:
        self.task = task
        self.additive = bool(getattr(task, "additive", True))
        """whether the task says that a batch's loss is the sum of its samples'"""
        self.draws = False
        """whether collate was seen to draw random numbers"""
        self._keys: list[str] | None = None

    def wrong(self, member: str, returned: str, fix: str) -> BadInput:
        """The error that says so."""
        return BadInput(f"{named(self.task)}.{member} {returned}; {fix}")

    def state(self) -> Any:
        """What the task keeps of itself, as it comes back from a checkpoint: plain values."""
        state = theirs(self.task, "state_dict", self.task.state_dict)
        try:
            if not isinstance(state, dict):
                raise TypeError(f"{_kind(state)} is not a dict")
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            advice = "return a dict of numbers, texts, lists and dicts; tensors belong into buffers of the model"
            raise self.wrong("state_dict", f"cannot be saved as it is ({error})", advice) from None

    def collated(self, samples: Sequence[Any]) -> dict[str, Any]:
        """A batch: a dict, with the same keys each time."""
        batch = theirs(self.task, "collate", lambda: self.task.collate(list(samples)))
        if not isinstance(batch, dict) or not all(isinstance(name, str) for name in batch):
            raise self.wrong("collate", f"returned {_kind(batch)}", "return a dict of tensors by name")
        keys = sorted(batch)
        if self._keys is not None and keys != self._keys:
            found = (
                f"returned the keys {', '.join(keys)} for {len(samples)} samples, and {', '.join(self._keys)} before"
            )
            raise self.wrong("collate", found, "return the same keys each time")
        self._keys = keys
        return batch

    def weight(self, batch: Mapping[str, Any], *, samples: int, trained: bool = True) -> float:
        """What a batch of so many samples weighs; ``sample_weight`` speaks of those that are ``trained`` on."""
        fix = "return a 0-dim tensor on the host: how many samples or target tokens the batch counts for"
        found = theirs(self.task, "weight", lambda: self.task.weight(batch))
        if not isinstance(found, Tensor) or found.ndim or found.is_complex():
            raise self.wrong("weight", f"returned {_kind(found)}", fix)
        if found.requires_grad or found.device.type != "cpu":
            where = "with a gradient" if found.requires_grad else f"on {found.device}"
            raise self.wrong("weight", f"returned a tensor {where}", fix)
        weight = float(found)
        if not 0 <= weight < math.inf:
            raise self.wrong("weight", f"returned {weight}", "a weight is finite and never below 0")
        each = getattr(self.task, "sample_weight", None)
        if trained and each is not None and not math.isclose(weight, each * samples, rel_tol=1e-6):
            found = f"returned {weight:g} for {samples} samples, but sample_weight is {each:g}"
            raise self.wrong("weight", found, "remove sample_weight, or return the same value from weight")
        return weight

    def loss(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The summed loss, and the outputs."""
        fix = "return (loss, outputs): the SUM of the losses as a 0-dim tensor, and a dict of detached tensors"
        found = theirs(self.task, "loss", lambda: self.task.loss(model, batch))
        if not isinstance(found, tuple) or len(found) != 2:
            raise self.wrong("loss", f"returned {_kind(found)}", fix)
        loss, outputs = found
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            raise self.wrong("loss", f"returned {_kind(loss)} as the loss", fix)
        if outputs is not None and not isinstance(outputs, Mapping):
            raise self.wrong("loss", f"returned {_kind(outputs)} as the outputs", fix)
        if torch.is_grad_enabled() and not loss.requires_grad:
            advice = "compute it from the model's outputs, without detach(), .item() or torch.no_grad()"
            raise self.wrong("loss", "returned a loss without a gradient in training", advice)
        return loss, dict(outputs or {})

    def measured(self, batch: Mapping[str, Any], outputs: Mapping[str, Any], device: torch.device) -> None:
        """Metrics take in a batch, where the task has any."""
        if not hasattr(self.task, "metrics"):
            return
        metrics = theirs(self.task, "metrics", lambda: self.task.metrics().to(device))
        theirs(self.task, "update", lambda: self.task.update(metrics, batch, outputs))
        try:
            computed = metrics.compute()
        except Exception:  # of so few samples
            return
        if not isinstance(computed, Mapping):
            raise self.wrong("metrics", f"computes {_kind(computed)}", "let compute return a dict of named metrics")

    @staticmethod
    def is_double(once: float, twice: float, tolerance: float) -> bool:
        """Whether ``twice`` is twice ``once``, up to this relative tolerance. Values not finite say nothing."""
        finite = math.isfinite(once) and math.isfinite(twice)
        return not finite or abs(twice - 2 * once) <= tolerance * abs(2 * once)

    def doubles(self, member: str, once: float, twice: float, tolerance: float) -> None:
        """One sample twice is twice one sample.

        Args:
            member: ``weight`` or ``loss``.
            once: its value for one sample.
            twice: for a batch that holds it twice.
            tolerance: relative, of rounding.
        """
        if self.is_double(once, twice, tolerance):
            return
        if member == "weight":
            fix = "the weight of a batch is the sum of its samples'"
        elif abs(twice - once) <= tolerance * abs(once):
            fix = "that is a mean: return the SUM over samples (reduction='sum'); the loop divides once, by the weight"
        else:
            fix = (
                "another parallel layout would train a different model: return the sum of the samples' losses."
                " If that is impossible (contrastive losses, mixup), set additive = False in the class"
            )
        raise self.wrong(member, f"returned {once:.6g} for a sample and {twice:.6g} for the same sample twice", fix)

    def adds_up(self, whole: float, parts: Sequence[float], tolerance: float) -> None:
        """In training, the loss of a batch is the sum of the losses of its parts. Values not finite say nothing."""
        total, size = math.fsum(parts), math.fsum(map(abs, parts))
        if not math.isfinite(whole) or not math.isfinite(total) or abs(whole - total) <= tolerance * size:
            return
        raise self.wrong(
            "loss",
            f"returned {whole:.6g} in training for samples whose losses are {' + '.join(f'{p:.6g}' for p in parts)}",
            "another parallel layout would train a different model: let each sample's loss depend only on that sample."
            " If that is impossible (auxiliary losses, batch statistics, mixup), set additive = False in the class",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = "0-dim" if not value.ndim else f"of shape {tuple(value.shape)}"
        return f"a tensor {shape}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
