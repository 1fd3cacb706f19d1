"""The state of a run as one object, which is saved and resumed as a whole.

>>> state = RunState(model, optimizer, parts={"counters": count, "ema": ema})
>>> saved = state.resume(checkpoints, "auto")              # {} at first
>>> state.save(checkpoints, step)

Several models and optimizers, such as those of a GAN, have names:

>>> models = {"generator": generator, "discriminator": discriminator}
>>> optimizers = {"generator": optimizer_g, "discriminator": optimizer_d}
>>> state = RunState(models, optimizers, parts={"ema": ema_of_generator})
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from oneloop.basics.base_models import BaseModel
from oneloop.basics.heartbeats import BEATS, LOADING, SAVING
from oneloop.basics.seeds import random_states, reseed, set_random_states
from oneloop.basics.tensors import Models, Optimizers, named, optimizers_of, together
from oneloop.basics.untrusted import damaged
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.mirror import local_checkpoint
from oneloop.checkpoint.optimizer_trial import NotTried, of_kind, try_optimizer, try_shards
from oneloop.checkpoint.pieces import header_of
from oneloop.checkpoint.rank_buffers import RankBuffers
from oneloop.checkpoint.ranks import Ranks
from oneloop.checkpoint.state_dict import (
    load_tensors,
    model_tensors,
    reject_others,
)
from oneloop.checkpoint.store import Keep, step_in

GENERATORS = "random generators"  # their name in a checkpoint


class RunState:
    """The model, the optimizer, EMAs, and all other state that a resumed run continues.

    Args:
        model: the prepared model, or several by name. A name is an identifier. A module that
            several models use is saved once.
        optimizer: the optimizer of its parameters, or several by name. A parameter may have only
            one optimizer.
        parts: components by name. Each has a ``state_dict`` of plain values and may have
            ``load_state_dict``, and ``check_state_dict``, which rejects a saved state by ValueError
            before anything is loaded. Its ``files``, if any, are flushed to disk before a
            checkpoint that refers to them is complete. Of EMAs (:class:`oneloop.ema.EMA`) of the
            model's parameters, the tensors are saved, too. Each is of one model, and they have
            different names.
        own: names of components that belong to the run folder; they restart with another folder's
            checkpoint.
        check: receives a checkpoint's state other than tensors before it is loaded, and may raise
            ValueError.
        tried: whether the caller has tried the optimizers on a small model
            (:mod:`oneloop.checkpoint.optimizer_trial`).
        say: reports an optimizer that could not be tried.

    Raises:
        ValueError: two EMAs have one name, models and optimizers cannot be saved by these names, or
            a checkpoint cannot hold the whole state of an optimizer.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        parts: Mapping[str, Any],
        own: Sequence[str] = (),
        check: Callable[[Mapping[str, Any]], None] | None = None,
        tried: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        self.model = together(model)
        self.optimizer = optimizer
        named(self.model, optimizer)  # raises if two optimizers have the same parameter

        # The tensors of EMAs are saved, too.
        self.parts = dict(parts)
        self.emas: Sequence[Any] = [
            part for part in parts.values() if hasattr(part, "tensors") and hasattr(part, "begin")
        ]
        if len(self._extra()) < sum(len(ema.tensors()) for ema in self.emas):
            raise ValueError(
                f"the EMAs have the names {', '.join(ema.name for ema in self.emas)}, with which "
                "tensors of two EMAs have one name in a checkpoint; give them other names"
            )
        for name in self.parts.keys() & {"optimizer", GENERATORS}:
            raise ValueError(
                f"a part has the name {name}, which the state of the {name} has; give it another "
                "name"
            )
        self._own = own
        self._check = check
        self._buffers = RankBuffers(self.model)

        # Try the optimizers on a small model.
        for _, one in () if tried else optimizers_of(optimizer):
            make = partial(of_kind, one)
            like = next(self.model.parameters())
            try:
                try_optimizer(make, like)
            except NotTried as error:
                say(str(error))
                continue
            if isinstance(like, DTensor):
                try_shards(make, like)

    def _extra(self) -> dict[str, Tensor]:
        """Return the tensors of all EMAs, by their names in a checkpoint."""
        extra = {}
        for ema in self.emas:
            extra.update(ema.tensors())
        return extra

    def size(self, optimizer_share: float, origin: BaseModel | None = None) -> tuple[int, int]:
        """Return an estimate of the bytes on disk.

        Args:
            optimizer_share: bytes of optimizer state per byte of trained parameters.
            origin: the base model, if checkpoints only name it.

        Returns:
            The bytes that are written once (final weights, EMAs, frozen weights in ``base/``), and
            those of one checkpoint.
        """
        # Sum the model and its EMAs, without what a checkpoint only names.
        elsewhere = {f"model.{name}" for name in origin.names} if origin else set()
        weights = 0
        for name, tensor in (*model_tensors(self.model).items(), *self._extra().items()):
            if name not in elsewhere:
                weights += tensor.numel() * tensor.element_size()

        # Frozen parameters are written once; the optimizer has state of the others.
        trained = 0
        frozen = 0
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                trained += parameter.nbytes
            elif origin is None:
                frozen += parameter.numel() * parameter.element_size()
        return weights + frozen, weights - frozen + int(optimizer_share * trained)

    @BEATS.phase(SAVING)
    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        *,
        about: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Start to save a checkpoint with :meth:`Checkpoints.save`.

        Collective: call on every rank.
        """
        plain = {name: part.state_dict() for name, part in self.parts.items()}
        files: list[Path] = []
        for part in self.parts.values():
            files += getattr(part, "files", ())
        if checkpoints.settings is None:
            plain[GENERATORS] = checkpoints.gather(random_states(checkpoints.ranks.device))
        checkpoints.save(
            step,
            self.model,
            self.optimizer,
            plain,
            extra=self._extra(),
            own=self._buffers.tensors(checkpoints.say),
            about=about,
            keep=keep,
            flush=files,
        )

    def bytes_of_rank(self, checkpoints: Checkpoints) -> int:
        """Return the bytes that this rank writes to a checkpoint.

        The first optimizer step must have made the optimizer's state.
        """
        own = self._buffers.tensors(checkpoints.say)
        _, mine = checkpoints.pieces(self.model, self.optimizer, self._extra(), own)
        return header_of(mine)[1]

    def take(self, folder: Path) -> None:
        """Load only weights, buffers and EMAs of an earlier checkpoint, in place.

        Collective: call on every rank.
        """
        buffers = self._buffers.targets(folder)
        load_tensors(folder, self.model, extra=self._extra() | buffers)

    def _check_state(self, saved: Mapping[str, Any]) -> None:
        """Let the components reject their saved state before tensors are loaded."""
        if self._check is not None:
            self._check(saved)
        for name, part in self.parts.items():
            if name in saved and hasattr(part, "check_state_dict"):
                part.check_state_dict(saved[name])

    @BEATS.phase(LOADING)
    def resume(
        self, checkpoints: Checkpoints, asked: str, *, say: Callable[[str], None] = print
    ) -> dict[str, Any]:
        """Load a checkpoint. Collective: call on every rank.

        A component without saved state restarts if it has ``restart``.

        Args:
            checkpoints: of the run.
            asked: ``auto`` or ``never`` (the newest intact one), or a path.
            say: reports the checkpoint that is resumed from.

        Returns:
            The components' saved state; empty if there is no checkpoint.

        Raises:
            ValueError: if the checkpoint is missing or damaged, or if newer checkpoints would be
                overwritten.
        """
        # Find the checkpoint.
        if asked in ("auto", "never"):
            path = checkpoints.newest()
        else:
            path = local_checkpoint(asked)
        if path is None:
            return {}
        newer = checkpoints.later(path)
        if newer:
            raise ValueError(
                f"run.resume {asked}: this run already has {newer[-1]}, which would be lost; "
                "choose another run.dir to start from there"
            )

        # Load the tensors, and all other state.
        reject_others(path, self.model, self.optimizer)
        with damaged(path):
            buffers = self._buffers.targets(path)
        saved = checkpoints.load(
            path, self.model, self.optimizer, extra=self._extra() | buffers, check=self._check_state
        )
        if path.resolve().parent != checkpoints.store.root.resolve():
            saved = {name: value for name, value in saved.items() if name not in self._own}

        # Start the EMAs of parameters that were not trained before from the current weights.
        there = read_manifest(path)
        for ema in self.emas:
            ema.begin(ema.tensors().keys() - there["tensors"].keys())

        # Restore the components; one that is new in this run, such as an EMA, restarts.
        for name, part in self.parts.items():
            if name in saved and hasattr(part, "load_state_dict"):
                # An error of the user's own code is shown as it is.
                own = type(part).__module__.startswith(("oneloop.", "torch."))
                with damaged(path) if own else nullcontext():
                    part.load_state_dict(saved[name])
            elif hasattr(part, "restart"):
                part.restart()
        if checkpoints.complete:
            # Report parts that only the checkpoint has, or that it lacks.
            others = saved.keys() - {"optimizer", GENERATORS}
            lost = sorted(others - self.parts.keys())
            new = sorted(self.parts.keys() - others)
            if lost:
                say(
                    f"of the checkpoint, the state of {', '.join(lost)} is not used: no part has "
                    "the name"
                )
            if new:
                say(f"the checkpoint has no state of {', '.join(new)}, which begins without one")
        before = there["about"].get("ranks")
        ranks = checkpoints.ranks
        if buffers and before != ranks.count:
            say(
                f"the run had {before} processes and continues on {ranks.count}, each with "
                "the buffers of rank 0; if training changes them, it differs from a run without a "
                "stop"
            )
        if checkpoints.settings is None:
            _restore_generators(saved.get(GENERATORS, []), ranks, step_in(path.name), say)
        source = checkpoints.fetcher.source(path) if checkpoints.fetcher is not None else path
        say(f"resuming from {source}")
        return saved


def _restore_generators(
    states: Sequence[Any], ranks: Ranks, step: int | None, say: Callable[[str], None]
) -> None:
    """Restore the states of this rank's random generators."""
    # Another kind of device has other generators, too.
    device = ranks.device
    count = len(states)
    own = states[ranks.rank] if count == ranks.count else ()
    if len(own) == len(random_states(device)):
        set_random_states(own, device)
        return
    reseed(device, torch.initial_seed(), step or 0, ranks.rank, others=True)
    say(
        f"the checkpoint has the random generators of {count} processes, and there are "
        f"{ranks.count} on {device.type}: they are seeded by seed, step and rank, so dropout "
        "draws other numbers than in a run without a stop"
    )
