"""torch.compile without changes to the model: each block, or the whole model.

State-dict names stay the same.

>>> compile_(model, "regional")         # before accelerator.prepare, after recompute

``forward`` is compiled, not the module: hooks of FSDP2 and DDP stay outside, and no ``_orig_mod.``
prefix appears. Each compiled module is one graph. A graph break is an error, so that no code
silently runs uncompiled. If inputs of a second shape arrive (samples of several lengths), the
module is compiled once more, for dynamic shapes.
"""

from collections.abc import Sequence

import torch
from torch import nn

from oneloop.machine.blocks import blocks

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes that record them
# Most compilations of one function; torch's limit of 8 is too low. All blocks of a model of
# transformers share one function, which is compiled for each kind of block (of an encoder and of a
# decoder, the first ones and the others), for training and evaluation, and for dynamic shapes.
_MOST = 32


def compile_(
    model: nn.Module,
    scope: str = "regional",
    *,
    mode: str = "default",
    names: Sequence[str] = (),
    sharded: bool = False,
    backend: str = "inductor",
) -> int:
    """Compile ``model`` in place; the compilation itself happens at the first call.

    Args:
        model: not yet wrapped or sharded; activation checkpointing (``recompute``) is already
            applied.
        scope: ``none``, ``regional`` (each block; blocks of one shape share one compilation) or
            ``whole``.
        mode: of torch.compile: default, reduce-overhead (CUDA graphs), max-autotune,
            max-autotune-no-cudagraphs.
        names: class names of the blocks; see :func:`oneloop.machine.blocks.blocks`.
        sharded: whether FSDP2 will shard the model.
        backend: of torch.compile.

    Returns:
        the number of compiled modules.

    Raises:
        ValueError: the model has no blocks, or ``whole`` is set and FSDP2 would shard the model
            block by block.
    """
    if scope == "none":
        return 0
    # Check what can be compiled.
    layers = blocks(model, names)
    if scope == "regional" and not layers:
        raise ValueError(
            f"compile regional: {type(model).__name__} has no repeated blocks; set machine.compile "
            "whole, or machine.blocks"
        )
    if scope == "whole" and sharded and layers:
        raise ValueError(
            "machine.compile whole does not work with FSDP2, which gathers block by block; set "
            "regional"
        )

    # Configure torch, then wrap the forwards.
    from torch._dynamo import config  # takes a second

    config.recompile_limit = max(_MOST, config.recompile_limit)
    # CUDA graphs reuse their memory from one forward to the next
    if mode in CUDA_GRAPHS:
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    compiled = layers if scope == "regional" else [model]
    for module in compiled:
        module.forward = torch.compile(
            module.forward,
            mode=mode,
            backend=backend,
            fullgraph=True,
        )  # type: ignore[method-assign]
    return len(compiled)
