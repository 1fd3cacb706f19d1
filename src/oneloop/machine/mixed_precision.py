"""The model under its strategy, as accelerate was set up: whole on one device, DDP, or sharded by FSDP2."""

import os
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.machine.blocks import has_batch_statistics

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # accelerate's names of half precision


def prepare(model: nn.Module, accelerator: Accelerator, *, blocks: Sequence[str] = ()) -> nn.Module:
    """Move the model to its device, and wrap it for DDP or shard it for FSDP2; build the optimizer afterwards. FSDP2
    gathers the classes ``blocks`` at once if accelerate's config names none."""
    if not accelerator.is_fsdp2:
        # One process with a process group: accelerate would add DDP, and never skip its synchronisation.
        prepared = accelerator.prepare_model(model, evaluation_mode=accelerator.num_processes == 1)
        if isinstance(prepared, nn.parallel.DistributedDataParallel):
            prepared.broadcast_buffers = has_batch_statistics(model)  # else a broadcast per forward for nothing
        return prepared  # type: ignore[no-any-return]
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # accelerate wants an optimizer beside the model, and would rebind its parameters by address; the real one is
    # built on the sharded parameters instead.
    plugin = accelerator.state.fsdp_plugin
    asked = plugin.transformer_cls_names_to_wrap or list(blocks)
    plugin.transformer_cls_names_to_wrap = _around_no_embedding(model, asked) or None
    try:
        prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    except (ValueError, NotImplementedError, RuntimeError) as error:  # an unknown layer class, a container
        policy = os.environ.get("FSDP_AUTO_WRAP_POLICY")
        asked_ = f"fsdp_auto_wrap_policy {policy}, layers {', '.join(asked) or 'none'}"
        advice = "use TRANSFORMER_BASED_WRAP, with machine.blocks for your own layers"
        raise BadInput(f"FSDP2 cannot shard the model with {asked_}: {error}; {advice}") from error
    accelerator._optimizers.clear()
    if accelerator.native_amp and plugin.mixed_precision_policy == MixedPrecisionPolicy():
        _autocast(prepared, accelerator)
    return prepared  # type: ignore[no-any-return]


def _autocast(model: nn.Module, accelerator: Accelerator) -> None:
    """Has the model's forward run under autocast, and return float32: what accelerate does without FSDP2, which else
    casts by a policy of its own, and so gives other bits."""
    context = get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)
    own: Any = getattr(model.forward, "__func__", None)
    if own is None:  # somebody has put another one there
        model.forward = convert_outputs_to_fp32(context(model.forward))
    else:
        model.forward = MethodType(convert_outputs_to_fp32(context(own)), model)


def _around_no_embedding(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Those that do not hold the input embedding, which accelerate shards by itself, and could not a second time."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    around = {
        type(module).__name__
        for module in model.modules()
        if module is not embedding and any(inner is embedding for inner in module.modules())
    }
    return [name for name in blocks if name not in around]


def sharded_precision(precision: str) -> Any:
    """FSDP2's policy: compute in half precision; reduce, and so accumulate, gradients in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision not in HALF:
        return None
    return MixedPrecisionPolicy(param_dtype=HALF[precision], reduce_dtype=torch.float32)
