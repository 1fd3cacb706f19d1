"""Settings of torch and Python for a run: precision of matrix products, memory format, garbage collection."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def channels_last(model: nn.Module, wanted: bool | Literal["auto"], *, device: str, sharded: bool = False) -> bool:
    """Stores the weights of 2-d convolutions channels last, in place; activations follow. ``auto``: on CUDA.

    Args:
        model: not yet wrapped.
        wanted: as above.
        device: type of the device it will run on.
        sharded: FSDP2 will shard it, which it does for contiguous weights only: ``auto`` then leaves them alone.

    Returns:
        Whether it was done.

    Raises:
        ValueError: wanted for a model without such a convolution, or under FSDP2.
    """
    has = any(isinstance(module, _CONVOLUTIONS) for module in model.modules())
    if wanted is True and not has:
        raise ValueError(f"machine.channels_last requires a 2-d convolution, and {type(model).__name__} has none")
    if wanted is True and sharded:
        raise ValueError("machine.channels_last does not work with FSDP2, which needs contiguous weights; use ddp.yaml")
    on = has and ((device == "cuda" and not sharded) if wanted == "auto" else wanted)
    if on:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return on


def float32_products(precision: Literal["highest", "high", "medium"], *, benchmark: bool = False) -> None:
    """How float32 products and convolutions are computed: IEEE (``highest``) or TF32. torch's default for convolutions
    is TF32, which rounds to 1e-3.

    Args:
        precision: as above.
        benchmark: cuDNN tries its algorithms for every shape, and takes the quickest.
    """
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = precision != "highest"


def release_cache() -> None:
    """Gives the device's cached memory back; pays before work of other shapes (evaluation), never in the loop."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@contextmanager
def scheduled_garbage(on: bool = True) -> Iterator[Callable[[], object]]:
    """In here nothing is collected but by calling what is yielded; afterwards all is as before.

    What exists at the start (modules, the model) is set aside for good: it is never looked through again.
    """
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
