"""Copies of weights in host memory, made while the device works."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from torch.optim import Optimizer


class HostCopies:
    """Copies weights to pinned host memory on a separate stream, and passes them to a thread.

    The device continues during a copy; only the optimizer's next step waits for it. Raises ValueError without an
    optimizer.
    """

    def __init__(self, weights: list[Tensor], optimizer: Optimizer | None) -> None:
        if optimizer is None:
            raise ValueError("an EMA in host memory needs the optimizer, whose next step waits until the copy is made")
        self._weights = weights
        self._landing = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in weights]
        self._stream = torch.Stream(weights[0].device)
        self._copied: torch.Event | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ema")
        self._using: Future[None] | None = None
        self._stepped = torch.Event(weights[0].device)
        """the weights are those of the last step: the copy need not wait for what was given to the device since"""
        self._stepped.record()
        optimizer.register_step_post_hook(lambda *_: self._stepped.record())
        optimizer.register_step_pre_hook(lambda *_: self._hold())

    def then(self, use: Callable[[list[Tensor]], None]) -> None:
        """Start a copy; call ``use`` with the copies in a thread, once they are complete."""
        self.wait()  # the host memory is free again
        self._stream.wait_event(self._stepped)
        with self._stream:
            for there, here in zip(self._weights, self._landing, strict=True):
                here.copy_(there, non_blocking=True)
            self._copied = copied = self._stream.record_event()

        def used() -> None:
            copied.synchronize()
            use(self._landing)

        self._using = self._thread.submit(used)

    def _hold(self) -> None:
        if self._copied is not None:
            torch.accelerator.current_stream(self._weights[0].device).wait_event(self._copied)

    def wait(self) -> None:
        if self._using is not None:
            self._using.result()
            self._using = None
