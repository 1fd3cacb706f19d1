"""The state of a run as one object, which is saved and resumed as a whole.

>>> state = RunState(model, optimizer, emas=[ema], parts={"counters": count, "ema": ema})
>>> saved = state.resume(checkpoints, "auto")              # {} at first
>>> state.save(checkpoints, step)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.base_models import BaseModel
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.mirror import local_checkpoint
from oneloop.checkpoint.state_dict import load_tensors, model_tensors
from oneloop.checkpoint.store import Keep, read_manifest


class Average(Protocol):
    """An EMA: its tensors, saved in addition to its ``state_dict``."""

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by their names in a checkpoint."""

    def begin(self, names: Collection[str]) -> None:
        """Reset these tensors of the EMA to the current weights."""


class RunState:
    """The model, the optimizer, EMAs, and all other state that a resumed run continues.

    Args: ``model``: the prepared model. ``optimizer``: the optimizer of its parameters. ``emas``:
    EMAs of its parameters. ``parts``: components by name. Each has a ``state_dict`` of plain values
    and may have ``load_state_dict``. Its ``files``, if any, are flushed to disk before a checkpoint
    that refers to them is complete.
    ``own``: names of components that belong to the run folder; they restart with another folder's
        checkpoint.
    ``check``: receives a checkpoint's state other than tensors before it is loaded, and may raise
        ValueError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        emas: Sequence[Average] = (),
        parts: Mapping[str, Any],
        own: Sequence[str] = (),
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.model, self.optimizer, self.emas = model, optimizer, emas
        self.parts, self._own, self._check = dict(parts), own, check

    def _extra(self) -> dict[str, Tensor]:
        return {name: tensor for ema in self.emas for name, tensor in ema.tensors().items()}

    def size(self, optimizer_share: float, origin: BaseModel | None = None) -> tuple[int, int]:
        """Return an estimate of the bytes that are written once (final weights, EMAs, frozen
        weights in ``base/``) and of those of one checkpoint.

        Args: ``optimizer_share``: bytes of optimizer state per byte of trained parameters.
        ``origin``: the base model, if checkpoints only name it.
        """
        elsewhere = {f"model.{name}" for name in origin.names} if origin else set()
        held = {
            name: tensor
            for name, tensor in model_tensors(self.model).items()
            if name not in elsewhere
        }
        weights = sum(
            tensor.numel() * tensor.element_size()
            for tensor in (*held.values(), *self._extra().values())
        )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parameters = [] if origin else self.model.parameters()
        frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        return weights + frozen, weights - frozen + int(
            optimizer_share * sum(p.nbytes for p in trained)
        )

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        *,
        about: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Start to save a checkpoint with :meth:`Checkpoints.save`. Collective: call on every
        rank."""
        plain = {name: part.state_dict() for name, part in self.parts.items()}
        files = [file for part in self.parts.values() for file in getattr(part, "files", ())]
        more: dict[str, Any] = {
            "extra": self._extra(),
            "about": about,
            "keep": keep,
            "flush": files,
        }
        checkpoints.save(step, self.model, self.optimizer, plain, **more)

    def take(self, folder: Path) -> None:
        """Load only weights and EMAs of an earlier checkpoint, in place. Collective: call on every
        rank."""
        load_tensors(folder, self.model, extra=self._extra())

    def needs(self, folder: Path) -> list[tuple[Path, int, int]]:
        """Return the bytes of a checkpoint's files that this rank reads (``needed`` of
        load_tensors)."""
        needed: list[tuple[Path, int, int]] = []
        load_tensors(folder, self.model, self.optimizer, extra=self._extra(), needed=needed)
        return needed

    def resume(
        self, checkpoints: Checkpoints, asked: str, *, say: Callable[[str], None] = print
    ) -> dict[str, Any]:
        """Load the checkpoint that ``asked`` selects: ``auto`` or ``never`` (the newest intact
        one), or a path.

        Return the components' saved state; empty if there is no checkpoint. A component without
        saved state restarts if it has ``restart``. Collective: call on every rank. Raise ValueError
        if the checkpoint is missing or damaged, or if newer checkpoints would be overwritten."""
        path = (
            checkpoints.newest(self.needs)
            if asked in ("auto", "never")
            else local_checkpoint(asked)
        )
        if path is None:
            return {}
        own = path.resolve().parent == checkpoints.store.root.resolve()
        if newer := checkpoints.later(path):
            why = f"this run already has {newer[-1]}, which would be lost"
            raise ValueError(
                f"run.resume {asked}: {why}; choose another run.dir to start from there"
            )
        saved = checkpoints.load(
            path, self.model, self.optimizer, extra=self._extra(), check=self._check
        )
        if not own:
            saved = {name: value for name, value in saved.items() if name not in self._own}
        # format 1 does not list the tensors
        there = read_manifest(path).get("tensors") or self._extra()
        for ema in self.emas:
            # parameters that were not trained before
            ema.begin(ema.tensors().keys() - there.keys())
        for name, part in self.parts.items():
            if name in saved and hasattr(part, "load_state_dict"):
                part.load_state_dict(saved[name])
            elif hasattr(part, "restart"):
                part.restart()  # an EMA that is new in this run starts from the current weights
        say(
            "resuming from "
            f"{checkpoints.fetcher.source(path) if checkpoints.fetcher is not None else path}"
        )
        return saved
