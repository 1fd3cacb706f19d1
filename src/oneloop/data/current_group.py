"""The group that a :class:`oneloop.data.loader.Loader` trains: is it complete, does it count?"""

from typing import NoReturn

from accelerate import Accelerator
from accelerate.state import GradientState
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

# in the settings of Accelerate: the ``gradient_accumulation_steps`` before the first group
_REQUESTED = "requested before oneloop"
_optimizer_steps = 0  # of this process


def _count(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count)


class CurrentGroup:
    """The group that a Loader has handed out: how many batches were used, and does it count?

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
        self.hand_out()

    def hand_out(self) -> None:
        """Begin with a group of which no batch was used."""
        self.taken = 0  # batches that were used
        self.ended = False  # whether the loop over its batches has ended, and used the last one

    def take(self) -> None:
        """Count a batch that is about to be used."""
        if not self.taken:
            self._begin()
        self.taken += 1
        # before this batch: optimizer steps, and operations that autograd has recorded
        self.steps_before = _optimizer_steps
        self.recorded_before = _get_sequence_nr()

    def end(self) -> None:
        """Note that the loop over the batches has ended, unless it only keeps them in a list."""
        self.ended = _get_sequence_nr() > self.recorded_before

    def counts(self) -> bool:
        """Return whether its update was made, or left out by a scaler."""
        if self.taken < self.number:
            return False
        left_out = self.accelerator is not None and self.accelerator.optimizer_step_was_skipped
        return self.ended or left_out or _optimizer_steps > self.steps_before

    def reject_state(self) -> None:
        """Raise RuntimeError if a batch was taken, and the group does not count."""
        self.reject_inside("a state")
        if self.taken and not self.counts():
            self._raise(
                "a state",
                self.taken,
                "Save after optimizer.step(). If that may leave out its step, or batches are kept "
                "in a list, or no optimizer of torch steps: before the batches of the next group "
                "are used",
            )

    def reject_inside(self, event: str) -> None:
        """Raise RuntimeError if this group, or another of its accelerator, is not complete.

        Args:
            event: what happens now.
        """
        done = self.taken % self.number
        # Accelerate knows whether batches are trained that were handed out all at once.
        if self.accelerator and not self.accelerator.sync_gradients:
            done = done or self.accelerator.step
        if done:
            self._raise(
                event,
                done,
                "A group makes one update: use all its batches before that (with Accelerate, each "
                "inside accumulate), or keep them with batches = list(group). Gradients of a group "
                "that was left remain: make accelerator, model, optimizer and Loader again, and "
                "load a state",
            )

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
            self.reject_inside("a group")
            settings = accelerator.gradient_state.plugin_kwargs
            settings[_REQUESTED] = requested_steps(accelerator)
            settings["sync_with_dataloader"] = False
            settings["num_steps"] = self.number
            accelerator.step = 0
        self.reject_other_steps()

    def _raise(self, event: str, done: int, advice: str) -> NoReturn:
        number = self.accelerator.gradient_accumulation_steps if self.accelerator else self.number
        raise RuntimeError(
            f"{event} of {self.loader} comes inside a group, after batch {done} of its {number}. "
            f"{advice}"
        )


def requested_steps(accelerator: Accelerator) -> int:
    """Return the ``gradient_accumulation_steps`` that the user has set, not a Loader."""
    settings = accelerator.gradient_state.plugin_kwargs
    steps: int = settings.get(_REQUESTED, accelerator.gradient_accumulation_steps)
    return steps


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
