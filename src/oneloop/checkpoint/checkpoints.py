"""Checkpoints: save while training goes on, load what verifies. Works alone in a plain Accelerate script.

>>> checkpoints = Checkpoints(Path("checkpoints"), accelerator)
>>> newest = checkpoints.newest()                   # verified, on all ranks; None at first
>>> state = checkpoints.load(newest, model, optimizer) if newest else {"step": 0}
>>> checkpoints.save(step, model, optimizer, {"step": step})       # every rank; waits for a copy to host memory
>>> checkpoints.finish()                            # before the end
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.base_models import BaseModel
from oneloop.basics.tensors import optimizer_tensors
from oneloop.checkpoint import writer
from oneloop.checkpoint.frozen_weights import Base
from oneloop.checkpoint.named_checkpoint import base_problems
from oneloop.checkpoint.saving import UnderWay
from oneloop.checkpoint.state_dict import (
    buffers_of,
    described,
    header_of,
    load_tensors,
    load_values,
    optimizer_values,
    pieces,
)
from oneloop.checkpoint.store import Keep, Store, name_of, problems


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks share.

    Args:
        root: the folder.
        accelerator: its ranks write together.
        origin: what frozen parameters were read from, where a checkpoint should name it instead of holding them.
        sync: write in the training process instead of another one.
        max_failures: failing saves in a row that do not end the run.
        patience: factor of the time that a save may take (ten seconds, three times the longest before, ten megabytes a
            second) before training goes on without a new one, and ends where it must have one; 0: any time.
        say: how a person is told of bad checkpoints, on rank 0.
    """

    def __init__(
        self,
        root: Path,
        accelerator: Accelerator,
        *,
        origin: BaseModel | None = None,
        sync: bool = False,
        max_failures: int = 3,
        patience: float = 1.0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.store = Store(root)
        self.rank, self.ranks = accelerator.process_index, accelerator.num_processes
        self._sync, self._say = sync, say
        self._host: Any = dist.new_group(backend="gloo") if self.ranks > 1 else None
        self._base = Base(self.store, origin=origin, rank=self.rank, agree=self._all, say=say)
        self._attempt = 0
        how: dict[str, Any] = {"agree": self._all if self.ranks > 1 else None, "pin": accelerator.device.type == "cuda"}
        how |= {"max_failures": max_failures, "patience": patience, "say": say}
        self._under_way = UnderWay(self.store, rank=self.rank, **how)

    # --- saving ---

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: Mapping[str, Any],
        *,
        extra: Mapping[str, Tensor] | None = None,
        about: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
        flush: Sequence[Path] = (),
    ) -> str | None:
        """Begins to save; the last save is finished first, and where that takes too long nothing is begun. Every rank
        must get here.

        Args:
            step: names the checkpoint.
            model: as prepared.
            optimizer: over its parameters.
            state: what else is to be kept, as JSON can hold it; rank 0's is written.
            extra: more tensors, named ``ema.…``; sharded as the model's are, or the same on all ranks.
            about: for the manifest (the metric that the best is chosen by).
            keep: which older ones to leave.
            flush: files that have to be on disk before it is sealed, since its state tells of them.

        Returns:
            What went wrong with the last save, alike on all ranks; None where nothing did.
        """
        problem = self._under_way.finish(or_go_on=True)
        if self._under_way.stuck:
            return problem
        tensors = self._base.others(model) | optimizer_tensors(model, optimizer) | dict(extra or {})
        mine = pieces(tensors, rank=self.rank, ranks=self.ranks, of_rank_0=buffers_of(model))
        header, size = header_of(mine)
        self._attempt += 1
        request = writer.SaveRequest(
            root=str(self.store.root.absolute()),
            step=step,
            attempt=self._attempt,
            rank=self.rank,
            ranks=self.ranks,
            header=header,
            size=size,
            state={**state, "optimizer": optimizer_values(model, optimizer)},
            about={"ranks": self.ranks, **self._base.kept(model), **(about or {})},
            keep=vars(keep or Keep()),
            tensors=described(tensors) if self.rank == 0 else {},
            flush=[str(file.absolute()) for file in flush],
        )
        if self._sync:
            self._under_way.write_here(request, mine)
            return self._under_way.finish() or problem
        self._under_way.begin(request, mine)
        return problem

    def poll(self) -> str | None:
        """This rank's problem with the save under way, if it is known by now; a microsecond, without a wait."""
        return self._under_way.poll()

    def finish(self) -> str | None:
        """Waits for the save under way. Every rank must get here.

        Returns:
            What went wrong, alike on all ranks; None where the checkpoint is sealed, or none was under way.

        Raises:
            OSError: on all ranks: more than ``max_failures`` saves in a row have failed, or this one takes too long.
        """
        return self._under_way.finish()

    def _all(self, value: Any) -> list[Any]:
        values: list[Any] = [value]
        if self._host is not None:
            values = [None] * self.ranks
            dist.all_gather_object(values, value, group=self._host)
        return values

    def close(self) -> None:
        """Ends the writing process."""
        self._under_way.close()

    # --- loading ---

    def whole(self, step: int, otherwise: str) -> bool:
        """Whether the checkpoint of a step is there and verifies, the same on all ranks; where not, a person is told,
        and what happens otherwise."""
        path = self.store.root / name_of(step)
        wrong: list[str] = []
        if self.rank == 0:
            wrong = (problems(path) or base_problems(path)) if path.is_dir() else ["it does not exist"]
            if wrong:
                self._say(f"THE BEST CHECKPOINT, {path}, CANNOT BE USED: {'; '.join(wrong[:3])}; {otherwise}")
        return not self._all(wrong)[0]

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies, the same on all ranks; bad ones are told of and set aside.

        Raises:
            ValueError: some were sealed, and none is good.
        """
        chosen: tuple[str | None, str | None] = (None, None)
        if self.rank == 0:
            self.store.sweep(drafts=True)
            bad: list[str] = []
            for path, wrong in self.store.newest_good():
                if not wrong:
                    chosen = (str(path), None)
                    break
                bad.append(f"checkpoint {path} is damaged and was skipped: {'; '.join(wrong)}")
            if bad and chosen[0] is None:
                chosen = (None, "; ".join(bad) + "; no good one is left: restore one, or choose another run.dir")
            else:
                for line, (path, _) in zip(bad, list(self.store.newest_good()), strict=False):
                    self._say(f"{line}; kept as {self.store.set_aside(path)}")
        chosen = self._all(chosen)[0]
        if chosen[1] is not None:
            raise ValueError(chosen[1])
        return Path(chosen[0]) if chosen[0] else None

    def load(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        extra: Mapping[str, Tensor] | None = None,
        check: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Loads model, optimizer and extra tensors in place and returns the rest. Every rank must get here.

        Args:
            folder: of the checkpoint.
            model: as prepared.
            optimizer: over its parameters.
            extra: more tensors, as :meth:`save` was given them.
            check: is shown the rest before anything is loaded, and may reject it.

        Raises:
            ValueError: the checkpoint is damaged, or of another model; or its frozen parameters are, and the model as
                it is now has others.
        """
        wrong = self._all(problems(folder) if self.rank == 0 else [])[0]
        if wrong:
            raise ValueError(f"checkpoint {folder} is damaged: {'; '.join(wrong)}; use another checkpoint")
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        if check is not None:
            check(state)
        self._base.check(folder, model)
        load_tensors(folder, model, optimizer, extra=extra)
        if optimizer is not None:
            load_values(state["optimizer"], model, optimizer)
        return state
