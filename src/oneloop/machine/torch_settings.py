"""Settings of torch and Python for a run: precision of matrix products, memory format, garbage
collection."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def channels_last(
    model: nn.Module, wanted: bool | Literal["auto"], *, device: str, sharded: bool = False
) -> bool:
    """Convert 2-d convolutions of a model that is not yet wrapped to the channels-last memory
    format, in place.

    ``wanted`` is the value of machine.channels_last (``auto``: on a CUDA ``device``, without FSDP2,
    which needs contiguous weights). Return whether the model was converted. Raise ValueError if
    ``wanted`` is True, and the model has no 2-d convolution or will be ``sharded``."""
    has = any(isinstance(module, _CONVOLUTIONS) for module in model.modules())
    if wanted is True and not has:
        raise ValueError(
            f"machine.channels_last requires a 2-d convolution, and {type(model).__name__} has none"
        )
    if wanted is True and sharded:
        raise ValueError(
            "machine.channels_last does not work with FSDP2, which needs contiguous weights; "
            "use ddp.yaml"
        )
    on = has and ((device == "cuda" and not sharded) if wanted == "auto" else wanted)
    if on:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return on


def float32_products(
    precision: Literal["highest", "high", "medium"], *, benchmark: bool = False
) -> None:
    """Set the precision of float32 products and convolutions: IEEE (``highest``) or TF32, which
    rounds to 1e-3.

    torch's own default for convolutions is TF32. ``benchmark``: cuDNN times its algorithms for
    every shape, and uses the fastest."""
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def release_cache() -> None:
    """Release the device's cached memory. Useful before work with other shapes (evaluation); too
    slow for the loop."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@contextmanager
def scheduled_garbage(on: bool = True) -> Iterator[Callable[[], object]]:
    """Disable automatic garbage collection in this context, and yield a function that collects.

    Objects that exist at the start (modules, the model) are frozen, so that no collection visits
    them."""
    before = gc.isenabled()
    if on:
        gc.freeze()
        gc.disable()
    try:
        yield gc.collect if on else (lambda: None)
    finally:
        if on:
            gc.unfreeze()
            if before:
                gc.enable()
