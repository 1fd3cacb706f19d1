"""Settings of torch and Python for a run.

They are the precision of matrix products, the memory format, and garbage collection.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def channels_last(
    model: nn.Module, wanted: bool | Literal["auto"], *, device: str, sharded: bool = False
) -> bool:
    """Convert 2-d convolutions to the channels-last memory format, in place.

    Args:
        model: not yet wrapped.
        wanted: value of machine.channels_last; ``auto``: on a CUDA device, without FSDP2, which
            needs contiguous weights.
        device: type of the device.
        sharded: whether FSDP2 will shard the model.

    Returns:
        whether the model was converted.

    Raises:
        ValueError: ``wanted`` is True, and the model has no 2-d convolution or will be sharded.
    """
    has = any(isinstance(module, _CONVOLUTIONS) for module in model.modules())
    if wanted == "auto":
        wanted = has and device == "cuda" and not sharded
    elif wanted and (sharded or not has):
        raise ValueError(
            "machine.channels_last requires a 2-d convolution, and no FSDP2, which needs "
            f"contiguous weights; {type(model).__name__} has "
            f"{'one: use ddp.yaml' if has else 'none: remove the key'}"
        )
    if wanted:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return wanted


_BACKENDS: Any = torch.backends  # torch declares no types for some of the switches
_SWITCHES: dict[str, Any] = {
    "torch.backends": _BACKENDS,
    "cudnn": _BACKENDS.cudnn,
    "cudnn.conv": _BACKENDS.cudnn.conv,
    "cudnn.rnn": _BACKENDS.cudnn.rnn,
    "cuda.matmul": _BACKENDS.cuda.matmul,
    "mkldnn.matmul": _BACKENDS.mkldnn.matmul,
    "mkldnn.conv": _BACKENDS.mkldnn.conv,
    "mkldnn.rnn": _BACKENDS.mkldnn.rnn,
}
"""torch's switches of float32 precision; the first two decide for others that are "none" """


def float32_products(
    precision: Literal["highest", "high", "medium"], *, benchmark: bool = False
) -> None:
    """Set the precision of float32 products and convolutions, whatever was set before.

    Args:
        precision: ``highest``: IEEE. The others: TF32, which rounds to 1e-3. torch's own default
            for convolutions is TF32.
        benchmark: cuDNN times its algorithms for every shape, and uses the fastest.
    """
    for switch in _SWITCHES.values():
        switch.fp32_precision = "none"
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = precision != "highest"


@contextmanager
def float32_restored() -> Iterator[None]:
    """Restore torch's precision of float32 products at the end of this context."""
    # torch cannot read an older setting, if a switch contradicts it.
    held = {name: switch.fp32_precision for name, switch in _SWITCHES.items()}
    products = "highest"
    tf32 = True
    with suppress(RuntimeError):
        products = torch.get_float32_matmul_precision()
    with suppress(RuntimeError):
        tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        # The older settings come first, because they change the switches.
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = tf32
        for name, value in held.items():
            _SWITCHES[name].fp32_precision = value


def release_cache() -> None:
    """Release the device's cached memory.

    Useful before work with other shapes (evaluation); too slow for the loop.
    """
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


@contextmanager
def scheduled_garbage() -> Iterator[None]:
    """Disable automatic garbage collection in this context: call ``gc.collect()`` in it.

    Objects that exist at the start (modules, the model) are frozen, so that no collection visits
    them.
    """
    before = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.enable()
