"""Count the updates of this process: optimizer steps, and those that were left out on purpose.

>>> UPDATES.watch()
>>> before = UPDATES.number
>>> optimizer.step()
>>> UPDATES.number - before
1
"""

from functools import wraps
from typing import Any

from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook


class UpdateCount:
    """The number of updates since the first call of :meth:`watch`.

    An update counts when an optimizer of torch has stepped. One that a ``GradScaler`` has left out,
    because gradients are not finite, counts as well: the samples of its step are done, and the
    scale has changed.
    """

    def __init__(self) -> None:
        self.number = 0
        self._watches = False

    def watch(self) -> None:
        """Count from now on, if it does not count already."""
        if self._watches:
            return
        self._watches = True
        register_optimizer_step_post_hook(self._stepped)

        # torch has no hook for a step that a scaler leaves out.
        step = GradScaler.step

        @wraps(step)
        def counted(scaler: GradScaler, *given: Any, **named: Any) -> Any:
            before = self.number
            result = step(scaler, *given, **named)
            if self.number == before:
                self.left_out()
            return result

        GradScaler.step = counted  # type: ignore[assignment,method-assign]

    def left_out(self) -> None:
        """Count an update that was left out on purpose."""
        self.number += 1

    def _stepped(self, *_: object) -> None:
        self.number += 1


UPDATES = UpdateCount()
