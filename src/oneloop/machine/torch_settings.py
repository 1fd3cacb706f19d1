"""Settings of torch and Python for a run.

They are the precision of matrix products, the memory format, and garbage collection.
"""

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
    # Check what was asked for.
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

    # Convert the weights.
    if wanted == "auto":
        wanted = device == "cuda" and not sharded
    on = has and wanted
    if on:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return on


def float32_products(
    precision: Literal["highest", "high", "medium"], *, benchmark: bool = False
) -> None:
    """Set the precision of float32 products and convolutions.

    Args:
        precision: ``highest``: IEEE. The others: TF32, which rounds to 1e-3. torch's own default
            for convolutions is TF32.
        benchmark: cuDNN times its algorithms for every shape, and uses the fastest.
    """
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cudnn.allow_tf32 = precision != "highest"


_NOT_DETERMINISTIC = (
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool3d,
    nn.MaxPool3d,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MaxUnpool1d,
    nn.MaxUnpool2d,
    nn.MaxUnpool3d,
    nn.ReflectionPad1d,
    nn.ReflectionPad2d,
    nn.ReflectionPad3d,
    nn.ReplicationPad1d,
    nn.ReplicationPad2d,
    nn.ReplicationPad3d,
    nn.NLLLoss2d,
    nn.CTCLoss,
)


def reject_not_deterministic(model: nn.Module, key: str) -> None:
    """Raise ValueError if the model has a layer whose gradient is not deterministic on a GPU.

    The layers are those for which torch itself raises an error
    (torch.use_deterministic_algorithms), known before the first step.

    Args:
        model: all its modules are searched.
        key: the setting that requires deterministic layers.
    """
    for name, module in model.named_modules():
        if not isinstance(module, _NOT_DETERMINISTIC):
            continue
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1)):
            continue  # torch computes a mean
        raise ValueError(
            f"{key} requires deterministic layers, but the gradient of {name or 'the model'} "
            f"({type(module).__name__}) is not deterministic on a GPU; replace this layer, or "
            f"remove {key}"
        )


def release_cache() -> None:
    """Release the device's cached memory.

    Useful before work with other shapes (evaluation); too slow for the loop.
    """
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@contextmanager
def scheduled_garbage(on: bool = True) -> Iterator[Callable[[], object]]:
    """Disable automatic garbage collection in this context, and yield a function that collects.

    Objects that exist at the start (modules, the model) are frozen, so that no collection visits
    them. With ``on`` False, nothing changes, and the function does nothing.
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
