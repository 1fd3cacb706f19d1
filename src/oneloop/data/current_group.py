"""The group that a :class:`oneloop.data.loader.Loader` trains, from its first batch to its last."""

from typing import NoReturn

from accelerate import Accelerator
from accelerate.state import GradientState

from oneloop.basics.update_count import UPDATES

_NEWEST = "oneloop"  # in the settings of Accelerate: the group that has begun last


class CurrentGroup:
    """The group that a Loader has handed out: how many batches were used, whether it is trained.

    From its first batch to its last it belongs to the accelerator, which counts the batches in
    ``accumulate()`` and adds up their gradients. Nothing else may begin in between.

    Args:
        accelerator: of the Loader; several Loaders may have it. None: the group belongs to the
            Loader alone.
        number: batches of a group, on this process.
        batch_size: of the Loader, which messages name.
    """

    def __init__(self, accelerator: Accelerator | None, number: int, batch_size: int) -> None:
        self.accelerator = accelerator
        self.number = number
        self.loader = f"the Loader with batch_size {batch_size}"
        self.requested = 1  # micro-batches that the user has set in the accelerator
        self.updated = False  # whether an update of any group of the Loader was seen
        self.hand_out(0)

    def hand_out(self, step: int) -> None:
        """Make this step (from 1) the current one; 0: none."""
        self.step = step
        self.taken = 0  # batches that were used
        self.ended = False  # whether the loop over its batches has ended
        self.begun = 0  # updates of this process, when its first batch was used

    def take(self) -> None:
        """Count a batch that is about to be used."""
        if not self.taken:
            self._begin()
        self.was_updated()
        self.taken += 1

    def was_updated(self) -> bool:
        """Return whether an optimizer has stepped after the last batch was handed out.

        Raises:
            RuntimeError: it has stepped before.
        """
        updated = self.taken > 0 and UPDATES.number > self.begun
        if updated:
            self._reject(self.taken, "an optimizer step in a group", self.loader)
            self.updated = True
        return updated

    def reject_inside(self, event: str) -> "CurrentGroup":
        """Raise RuntimeError if a group of this Loader, or of its accelerator, is not complete.

        Args:
            event: what happens now, of this Loader.

        Returns:
            The group that has begun last, of all Loaders of the accelerator.
        """
        accelerator = self.accelerator
        newest = self
        if accelerator:
            newest = accelerator.gradient_state.plugin_kwargs.get(_NEWEST, self)
        newest._reject(newest.taken, event, self.loader)

        # All batches may be handed out at once: accelerate knows whether they are trained.
        if accelerator and newest.taken and not accelerator.sync_gradients:
            newest._reject(accelerator.step, event, self.loader)
        return newest

    def reject_other_steps(self) -> None:
        """Raise RuntimeError if Accelerate divides losses by a number unknown to ``factor``."""
        known = self.number if self.accelerator else 1
        if GradientState._shared_state and GradientState().num_steps != known:
            raise RuntimeError(
                f"an Accelerator of this process has gradient_accumulation_steps "
                f"{GradientState().num_steps}, by which its backward() divides losses, but "
                f"{self.loader} expects {known}. If this Loader has no accelerator, give it "
                "accelerator=. If another Loader has begun a group, train each group before the "
                "next one begins, or give both Loaders one number of micro-batches"
            )

    def _begin(self) -> None:
        """Let ``accumulate()`` count the batches of this group, whatever happened before.

        A state may have been loaded, the setting changed by another Accelerator or Loader, or a
        prepared DataLoader left at its last batch.
        """
        accelerator = self.accelerator
        if accelerator:
            _reject_schedulers(accelerator)
            event = f"step {self.step}"
            newest = self.reject_inside(event)

            # Batches that were kept for later would be trained with the number of this group.
            trained = accelerator.step or UPDATES.number > newest.begun
            if newest.taken and not trained and newest.number not in (1, self.number):
                newest._raise(0, event, self.loader)

            self.requested = requested_steps(accelerator)
            settings = accelerator.gradient_state.plugin_kwargs
            settings["sync_with_dataloader"] = False
            settings["num_steps"] = self.number
            settings[_NEWEST] = self
            accelerator.step = 0
        self.reject_other_steps()
        self.begun = UPDATES.number

    def _reject(self, done: int, event: str, loader: str) -> None:
        """Raise RuntimeError if some batches of this group are done, and others are not."""
        if done % self.number:
            self._raise(done % self.number, event, loader)

    def _raise(self, done: int, event: str, loader: str) -> NoReturn:
        raise RuntimeError(
            f"{event} of {loader} comes inside step {self.step} of {self.loader}, after batch "
            f"{done} of its {self.number}. A group makes one update: use all its batches before "
            "that (with Accelerate, each inside accumulate), or keep them with "
            "batches = list(group). Gradients of a group that was left remain: make accelerator, "
            "model, optimizer and Loader again, and load a state"
        )


def requested_steps(accelerator: Accelerator) -> int:
    """Return the ``gradient_accumulation_steps`` that the user has set, not a Loader."""
    steps: int = accelerator.gradient_accumulation_steps
    newest = accelerator.gradient_state.plugin_kwargs.get(_NEWEST)
    return newest.requested if newest and newest.number == steps else steps


def _reject_schedulers(accelerator: Accelerator) -> None:
    """Raise ValueError if the accelerator has prepared a scheduler, which then counts processes."""
    for scheduler in accelerator._schedulers:
        if scheduler.step_with_optimizer and not scheduler.split_batches:
            raise ValueError(
                f"the accelerator has prepared the scheduler {type(scheduler.scheduler).__name__}, "
                "so that each step() counts once for each process; do not prepare it: step it once "
                "after the loop over a group, and save it by register_for_checkpointing. Or create "
                "Accelerator(step_scheduler_with_optimizer=False)"
            )
