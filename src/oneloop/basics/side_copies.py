"""Copies to pinned host memory on a separate stream, while the device continues.

Whatever changes weights, optimizer state or EMA weights calls :func:`before_change` first. The
device then finishes the copies before it continues, and the host does not wait.

>>> copy = SideCopy(device, weights, pinned)
>>> before_change()
>>> optimizer.step()                             # after the copy, on the device
>>> copy.copied.synchronize()                    # on the host
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from oneloop.basics.tensors import plain_optimizer


class SideCopy:
    """A copy on a separate stream.

    Args:
        device: of the stream.
        sources: on this device (or on the host: these are copied at once). They are kept until the
            copy is dropped, since their memory must not be used again.
        targets: in pinned host memory.
        after: what the copy waits for; None: all work of the current stream so far.
        watched: tensors that must not change before :func:`before_change` is called.
    """

    def __init__(
        self,
        device: torch.device,
        sources: list[Tensor],
        targets: list[Tensor],
        *,
        after: torch.Event | None = None,
        watched: Sequence[Tensor] = (),
    ) -> None:
        self._torn = False  # whether a watched tensor has changed without before_change()
        self._sources = sources
        self._watched = watched
        self._versions = [tensor._version for tensor in watched]
        stream = _stream(device)
        self._device = stream.device  # with its index
        stream.wait_event(after or torch.accelerator.current_stream(self._device).record_event())
        with stream:
            if sources:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            self.copied = stream.record_event()
        _UNGUARDED.add(self)

    def is_torn(self) -> bool:
        """Return whether a watched tensor has changed, and :func:`before_change` was not called."""
        if self in _UNGUARDED:
            self._torn = self._versions != [tensor._version for tensor in self._watched]
        return self._torn

    def hold(self) -> None:
        """Let the device finish the copy before all work that it gets from now on."""
        self.is_torn()
        _UNGUARDED.discard(self)
        torch.accelerator.current_stream(self._device).wait_event(self.copied)


_UNGUARDED: WeakSet[SideCopy] = WeakSet()
"""copies that the current stream does not wait for yet"""


def before_change() -> None:
    """Let the device finish all copies before all work that it gets from now on."""
    if len(_UNGUARDED) == 0:  # fast, in every step
        return
    for copy in [*_UNGUARDED]:
        copy.hold()


@cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


class HostCopies:
    """Copies weights to pinned host memory on a separate stream, and passes them to a thread.

    The device continues during a copy; only the optimizer's next step waits for it.

    Args:
        weights: On the device.
        optimizer: Its step changes the weights.

    Raises:
        ValueError: the optimizer is missing.
    """

    def __init__(self, weights: list[Tensor], optimizer: Optimizer | None) -> None:
        if optimizer is None:
            raise ValueError(
                "an EMA in host memory needs the optimizer, whose next step waits for the copy"
            )
        self._weights = weights
        self._landing = []
        for tensor in weights:
            self._landing.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
        self._copy: SideCopy | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ema")
        self._using: Future[None] | None = None

        # The end of the last step: the copy waits for it only, not for work queued since.
        self._stepped = torch.Event(weights[0].device)
        self._stepped.record()
        optimizer = plain_optimizer(optimizer)
        optimizer.register_step_post_hook(lambda *_: self._stepped.record())
        # No copy may read weights while a step writes them.
        optimizer.register_step_pre_hook(lambda *_: before_change())

    def then(self, use: Callable[[list[Tensor]], None]) -> None:
        """Start a copy; call ``use`` with the copies in a thread, once they are complete."""
        self.wait()  # until the host memory is free again
        self._copy = SideCopy(
            self._weights[0].device, self._weights, self._landing, after=self._stepped
        )
        copied = self._copy.copied

        def used() -> None:
            copied.synchronize()
            use(self._landing)

        self._using = self._thread.submit(used)

    def wait(self) -> None:
        """Wait until the last copy was used."""
        if self._using is not None:
            self._using.result()
            self._using = None
