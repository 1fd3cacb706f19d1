"""Checkpoints: save during training, load after verification.

Usable alone in a plain Accelerate script.

>>> checkpoints = Checkpoints(Path("checkpoints"), accelerator)
>>> newest = checkpoints.newest()               # verified, on all ranks; None at first
>>> state = checkpoints.load(newest, model, optimizer) if newest else {"step": 0}
>>> checkpoints.save(step, model, optimizer, {"step": step})  # every rank; waits for a copy
>>> checkpoints.finish()                        # before the end
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from oneloop.basics.base_models import BaseModel
from oneloop.basics.exit_codes import Unavailable
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.basics.tensors import Models, Optimizers, named, together
from oneloop.basics.untrusted import damaged
from oneloop.checkpoint.background_save import BackgroundSaves
from oneloop.checkpoint.frozen_weights import Base
from oneloop.checkpoint.mirror import Fetcher
from oneloop.checkpoint.named_checkpoint import base_problems
from oneloop.checkpoint.optimizer_values import (
    Settings,
    decoded,
    encoded,
    load_values,
    optimizer_values,
    settings_of,
)
from oneloop.checkpoint.pieces import Piece, header_of, pieces
from oneloop.checkpoint.ranks import Ranks
from oneloop.checkpoint.save_request import SaveRequest
from oneloop.checkpoint.state_dict import buffers_of, described, load_tensors, reject_others
from oneloop.checkpoint.store import (
    STATE,
    Keep,
    Store,
    name_of,
    problems,
    read_state,
    step_in,
    step_of,
)

__all__ = ["Checkpoints", "settings_of"]


class Checkpoints(BackgroundSaves):
    """The checkpoints of one run, in a folder that all ranks share.

    Args:
        root: the folder.
        accelerator: its ranks write together.
        origin: the base model of the frozen parameters, if a checkpoint should name it instead of
            storing them.
        complete: save all that a script may change. False: frozen parameters are written once, to
            a folder beside ``root``.
        settings: entries of parameter groups that come from a recipe, which are not saved
            (:func:`oneloop.checkpoint.optimizer_values.settings_of`); None: all are saved.
        patience: factor of a save's time limit: the largest of 10 s, 3 x the slowest save, and
            size / (10 MB/s). After it, training continues without a new checkpoint, or ends if it
            needs one. 0: no limit.
        say: reports bad checkpoints, on rank 0.
    """

    def __init__(
        self,
        root: Path,
        accelerator: Accelerator,
        *,
        origin: BaseModel | None = None,
        complete: bool = True,
        settings: Settings | None = None,
        patience: float = 1.0,
        say: Callable[[str], None] = print,
    ) -> None:
        super().__init__(Store(root), Ranks(accelerator), patience=patience, say=say)
        self.gather = self.ranks.gather

        # What saves.
        self.complete = complete
        self.settings = settings
        self._base = Base(self.store, self.ranks, origin=origin, once=not complete)
        self._attempt = 0  # number of saves so far

        # The mirror.
        self.fetcher: Fetcher | None = None  # reads it
        self._counts = False  # whether checkpoints are written only there
        self._began = False  # whether the run has looked for its newest checkpoint

    def save(
        self,
        step: int,
        model: Models,
        optimizer: Optimizers,
        state: Mapping[str, Any],
        *,
        extra: Mapping[str, Tensor] | None = None,
        own: Mapping[str, Tensor] | None = None,
        about: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
        flush: Sequence[Path] = (),
    ) -> str | None:
        """Start to save models and optimizers, after the previous save has finished.

        If that takes too long, start nothing. Collective: call on every rank.

        Args:
            step: the number of the checkpoint.
            model: the prepared model, or several by name; a name is an identifier.
            optimizer: of its parameters, or several by name; a parameter may have only one.
            state: other JSON-serializable state; rank 0's is written.
            extra: more tensors, named ``ema.…``; sharded like the model, or equal on all ranks.
            own: tensors of this rank, named ``rank.<its number>.…``.
            about: entries of the manifest, such as the metric that selects the best checkpoint.
            keep: which older checkpoints to keep.
            flush: files that its state refers to, so that they must be on disk first.

        Returns:
            The error of the previous save, equal on all ranks; None if it succeeded.

        Raises:
            ValueError: models and optimizers cannot be saved by these names.
        """
        model = together(model)
        problem = self.finish(or_go_on=True)
        if self.stuck:
            return problem

        # Divide the tensors between the ranks.
        tensors, mine = self.pieces(model, optimizer, extra or {}, own or {})
        listed = described(tensors)
        for others in self.gather(described(own or {})):
            listed |= others
        header, size = header_of(mine)

        # Describe this rank's shard to its writing process.
        values = optimizer_values(model, optimizer, complete=self.complete, settings=self.settings)
        if self.complete:
            state = encoded(state)
        self._attempt += 1
        request = SaveRequest(
            root=str(self.store.root.absolute()),
            step=step,
            attempt=self._attempt,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
            header=header,
            size=size,
            state={**state, "optimizer": values},
            about={
                "ranks": self.ranks.count,
                "named": named(model, optimizer),
                **self._base.kept(model),
                **(about or {}),
            },
            bad=self.fetcher.damaged if self.fetcher is not None else [],
            keep=keep or Keep(),
            tensors=listed if self.ranks.is_main else {},
            flush=[str(file.absolute()) for file in flush],
        )

        # Write. This waits at most for a copy to host memory.
        self.begin(request, mine)
        return problem

    def pieces(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        extra: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], list[Piece]]:
        """Return the tensors that all ranks share, and what this rank writes; see :meth:`save`."""
        tensors = {**self._base.others(model), **optimizer_tensors(model, optimizer), **extra}
        shared = buffers_of(model, tensors)
        return tensors, pieces(tensors, self.ranks, of_rank_0=shared, only_here=own)

    def mirror(self, address: str, *, lease: tuple[int, Mapping[str, Any]], counts: bool) -> None:
        """Copy the checkpoints to a mirror from now on, and read from it what the folder lacks.

        Call on every rank.

        Args:
            address: of the mirror (s3, gs, file).
            lease: number and description of the run's :class:`oneloop.checkpoint.lease.Lease`.
            counts: write checkpoints only there: the folder may then differ between hosts, and
                need not last.
        """
        self.fetcher = Fetcher(address, self.store, self.ranks, self.say)
        self._counts = counts

        # Rank 0 copies the run folder. If there is none, every rank writes its own shard.
        owns = self.ranks.is_main
        if counts or owns:
            self.uploads = {
                "address": address,
                "run": str(self.store.root.parent.absolute()),
                "counts": counts,
                "lease": lease,
                "owns": owns,
            }
        if owns:
            self.start()  # it renews the lease

    def whole(self, step: int, otherwise: str) -> Path | None:
        """Return the path of a step's checkpoint; log that it is missing or damaged. Collective.

        Args:
            step: its number.
            otherwise: the consequence if it cannot be used, for the log.

        Returns:
            The same path on all ranks; None if it cannot be used.
        """
        path = self.store.root / name_of(step)
        try:
            if self.fetcher is not None and (self._counts or not self.ranks.from_main(path.is_dir)):
                return self.fetcher.fetch(step)
            wrong = self.ranks.from_main(lambda: problems(path) or base_problems(path))
        except (ValueError, Unavailable) as error:  # on all ranks
            wrong = [str(error)]
        if wrong:
            self.say(
                f"THE BEST CHECKPOINT, {path}, CANNOT BE USED: {'; '.join(wrong[:3])}; {otherwise}"
            )
        return None if wrong else path

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint, equal on all ranks; None if none exists. Collective.

        Log damaged ones, and rename those in the folder.

        Raises:
            ValueError: there are checkpoints, and none is intact; or the mirror cannot be read.
        """
        own: Path | None = None
        error: str | None = None
        if not self._counts:
            own, error = self.ranks.from_main(lambda: self.store.newest_intact(self.say))
        # later, a failing mirror must not stop a rewind
        looks = own is None or not self._began
        self._began = True
        fetched = self.fetcher.newest(own) if self.fetcher is not None and looks else None
        if fetched is None and error is not None:
            raise ValueError(error)
        return fetched or own

    def later(self, path: Path) -> list[str]:
        """Return the names of later checkpoints, also in the mirror. Collective.

        If the path is of another run, return all names.
        """
        own = path.resolve().parent == self.store.root.resolve()
        than = step_in(path.name) if own else None
        steps: list[int] = []
        if not self._counts:
            steps = self.ranks.from_main(
                lambda: [step_of(sealed) for sealed in self.store.sealed()]
            )
        if self.fetcher is not None:
            steps += self.fetcher.later(-1)
        return [name_of(step) for step in sorted(steps) if than is None or step > than]

    def load(
        self,
        folder: Path,
        model: Models,
        optimizer: Optimizers | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Load models, optimizers and the extra tensors of :meth:`save` in place.

        Collective: call on every rank.

        Args:
            folder: the checkpoint.
            model: the prepared model, or several by name.
            optimizer: of its parameters, or several by name; None: leave the state unread.
            extra: the tensors that were saved as ``extra``.
            check: receives the other state before, and may reject it by ValueError.

        Returns:
            The other state.

        Raises:
            ValueError: the checkpoint is damaged, or of another model or optimizer, or of others by
                name; or its frozen parameters are damaged and differ from those of the model.
        """
        # Verify all files, except of a copy: its blocks were verified, and the rest is empty.
        fetched = folder.name.endswith(".fetched")
        wrong = self.ranks.from_main(lambda: [] if fetched else problems(folder))
        if wrong:
            raise ValueError(
                f"checkpoint {folder} is damaged: {'; '.join(wrong)}; use another checkpoint"
            )
        state: dict[str, Any] = decoded(read_state(folder))
        if check is not None:
            check(state)
        model = together(model)
        with damaged(folder):
            reject_others(folder, model, optimizer, state.get("optimizer"))
        self._base.check(folder, model)
        own = load_tensors(folder, model, optimizer, extra=extra)
        with damaged(folder / STATE):
            if optimizer is not None:
                load_values(state["optimizer"], model, optimizer, own)
        return state
