"""The state of a run as one thing: saved as a whole, and resumed as a whole.

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
from oneloop.checkpoint.state_dict import load_tensors, model_tensors
from oneloop.checkpoint.store import Keep, name_of, read_manifest


class Average(Protocol):
    """What is saved of an average beside its ``state_dict``."""

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their names in a checkpoint."""

    def begin(self, names: Collection[str]) -> None:
        """Of these tensors it becomes the weights of now."""


class RunState:
    """Model, optimizer, averages, and all else that goes on where it was.

    Args:
        model: as prepared.
        optimizer: over its parameters.
        emas: averages of its parameters.
        parts: by name, what has a ``state_dict`` of plain values, and takes it back by ``load_state_dict`` where it has
            one; ``files`` of it are on disk before a checkpoint that tells of them.
        own: names of parts that belong to a run's own folder: they do not go on from another folder's checkpoint.
        check: is shown what a checkpoint holds beside tensors before it is loaded, and may reject it.
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
        """Bytes of what is written once (the weights with their averages at the end, frozen ones in ``base/``), and of
        a checkpoint, about.

        Args:
            optimizer_share: bytes of the optimizer's state for each byte of the trained parameters.
            origin: of what is only named.
        """
        elsewhere = {f"model.{name}" for name in origin.names} if origin else set()
        held = {name: tensor for name, tensor in model_tensors(self.model).items() if name not in elsewhere}
        weights = sum(tensor.numel() * tensor.element_size() for tensor in (*held.values(), *self._extra().values()))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parameters = [] if origin else self.model.parameters()
        frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        return weights + frozen, weights - frozen + int(optimizer_share * sum(p.nbytes for p in trained))

    def save(
        self, checkpoints: Checkpoints, step: int, *, about: Mapping[str, Any] | None = None, keep: Keep | None = None
    ) -> None:
        """Begins a checkpoint, as :meth:`Checkpoints.save`. Every rank must get here."""
        plain = {name: part.state_dict() for name, part in self.parts.items()}
        files = [file for part in self.parts.values() for file in getattr(part, "files", ())]
        more: dict[str, Any] = {"extra": self._extra(), "about": about, "keep": keep, "flush": files}
        checkpoints.save(step, self.model, self.optimizer, plain, **more)

    def take(self, checkpoints: Checkpoints, step: int) -> None:
        """Puts the weights and averages of an earlier checkpoint in place, and nothing else of it. Every rank must get
        here.

        Raises:
            ValueError: there is no such checkpoint.
        """
        load_tensors(checkpoints.store.root / name_of(step), self.model, extra=self._extra())

    def resume(self, checkpoints: Checkpoints, asked: str, *, say: Callable[[str], None] = print) -> dict[str, Any]:
        """Loads what ``asked`` says: ``auto`` (the newest good checkpoint), ``never``, or a checkpoint's path.

        A part that the checkpoint has not restarts, where it can. Every rank must get here.

        Returns:
            The parts' saved state; empty where nothing was ever sealed.

        Raises:
            ValueError: there is no such checkpoint, it is damaged, or newer ones would be overwritten.
        """
        path = checkpoints.newest() if asked in ("auto", "never") else Path(asked).expanduser()
        if path is None:
            return {}
        own = path.resolve().parent == checkpoints.store.root.resolve()
        newer = [other.name for other in checkpoints.store.sealed() if other.name > path.name or not own]
        if newer:
            why = f"this run already has {newer[-1]}, which would be lost"
            raise ValueError(f"run.resume {asked}: {why}; choose another run.dir to start from there")
        saved = checkpoints.load(path, self.model, self.optimizer, extra=self._extra(), check=self._check)
        if not own:
            saved = {name: value for name, value in saved.items() if name not in self._own}
        there = read_manifest(path).get("tensors") or self._extra()  # the first format does not tell
        for ema in self.emas:
            ema.begin(ema.tensors().keys() - there.keys())  # of what was not trained before
        for name, part in self.parts.items():
            if name in saved and hasattr(part, "load_state_dict"):
                part.load_state_dict(saved[name])
            elif hasattr(part, "restart"):
                part.restart()  # an average that is new in this run: it begins with the weights of now
        say(f"resuming from {path}")
        return saved
