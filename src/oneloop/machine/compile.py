"""torch.compile from outside: block by block, or the whole model; names in the state dict stay as they are.

>>> compile_(model, "regional")         # before accelerator.prepare, after recompute

``forward`` itself is compiled, not the module: hooks of FSDP2 and DDP stay outside, and no ``_orig_mod.`` appears. Each
part is one graph; what breaks a graph is an error, so that nothing falls back to slow code in silence. A part that
meets a second shape (samples of several lengths) is compiled once more, for any shape.
"""

from collections.abc import Sequence

import torch
import torch._functorch.config
from torch import nn

from oneloop.machine.blocks import blocks


def compile_(
    model: nn.Module,
    scope: str = "regional",
    *,
    mode: str = "default",
    names: Sequence[str] = (),
    sharded: bool = False,
    budget: float | None = None,
    backend: str = "inductor",
) -> int:
    """Compiles ``model`` in place; it happens at the first call.

    Args:
        model: not yet wrapped or sharded; recompute was applied.
        scope: ``none``, ``regional`` (each block: all have one shape, so one compilation serves all) or ``whole``.
        mode: torch.compile's: default, reduce-overhead (CUDA graphs), max-autotune, max-autotune-no-cudagraphs.
        names: class names of the blocks; see :func:`oneloop.machine.blocks.blocks`.
        sharded: FSDP2 will shard the model.
        budget: share of the activations to keep, chosen by the compiler (``recompute budget:SHARE``).
        backend: torch.compile's.

    Returns:
        How many parts were compiled.

    Raises:
        ValueError: no blocks, or a whole model that FSDP2 cuts into blocks.
    """
    if scope == "none":
        if budget is not None:
            raise ValueError("recompute budget requires machine.compile regional or whole; or set recompute selective")
        return 0
    layers = blocks(model, names)
    if scope == "regional" and not layers:
        none = f"{type(model).__name__} has no repeated blocks"
        raise ValueError(f"compile regional: {none}; set machine.compile whole, or machine.blocks")
    if scope == "whole" and sharded and layers:
        raise ValueError("machine.compile whole does not work with FSDP2, which gathers block by block; set regional")
    if budget is not None:
        torch._functorch.config.activation_memory_budget = budget
    if mode in ("reduce-overhead", "max-autotune"):  # CUDA graphs reuse their memory from one forward to the next
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    parts = layers if scope == "regional" else [model]
    for part in parts:
        part.forward = torch.compile(
            part.forward, mode=mode if backend == "inductor" else None, backend=backend, fullgraph=True
        )  # type: ignore[method-assign]
    return len(parts)
