"""Prepare the model as accelerate is configured: on one device, under DDP, or sharded by FSDP2."""

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.tensors import share_buffers
from oneloop.machine.blocks import has_batch_statistics

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # accelerate's names of half precision

_BROADCAST = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}
"""dtypes that gloo and NCCL broadcast"""


def _convert_to_fp8(model: nn.Module, accelerator: Accelerator) -> None:
    """Replace linear layers by torchao's, which multiply in fp8, as ``Accelerator.prepare`` does.

    ``Accelerator.prepare_model`` alone leaves them as they are: the run would train in bf16.
    """
    from accelerate.utils import convert_model_to_fp8_ao, has_ao_layers

    # A gather of FSDP2 in fp8 would need weights of another class, whose bytes cannot be read.
    recipe = accelerator.ao_recipe_handler
    convert_model_to_fp8_ao(
        model,
        config=replace(recipe.config, enable_fsdp_float8_all_gather=False),
        module_filter_func=recipe.module_filter_func,
    )
    if not has_ao_layers(model):
        raise BadInput(
            "mixed_precision fp8 converts linear layers whose sizes are multiples of 16, but not "
            "the first and the last one, and this model has no others; use bf16"
        )


def prepare(model: nn.Module, accelerator: Accelerator, *, blocks: Sequence[str] = ()) -> nn.Module:
    """Move the model to its device, and wrap it in DDP or shard it by FSDP2.

    Build the optimizer afterwards.

    Args:
        model: not yet wrapped.
        accelerator: as the launcher configures it.
        blocks: classes that are FSDP2 units if accelerate's config names none.

    Raises:
        BadInput: sharding fails, or no layer can be converted to fp8.
    """
    if not accelerator.is_fsdp2:
        if accelerator.mixed_precision == "fp8":
            _convert_to_fp8(model, accelerator)

        # DDP cannot broadcast buffers of all dtypes.
        odd = set()
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if buffer.dtype not in _BROADCAST:
                odd.add(name)
        if odd:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, odd)

        # One process with a process group: accelerate would wrap it in DDP, and synchronise in
        # every micro-batch.
        prepared = accelerator.prepare_model(model, evaluation_mode=accelerator.num_processes == 1)
        if odd:
            share_buffers(prepared)
        if isinstance(prepared, DistributedDataParallel):
            # else every forward broadcasts needlessly
            prepared.broadcast_buffers = has_batch_statistics(model)
        return prepared  # type: ignore[no-any-return]
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # accelerate requires an optimizer here, and would replace its parameters by address. So it gets
    # a dummy; the real optimizer is built on the sharded parameters.
    plugin = accelerator.state.fsdp_plugin
    configured = plugin.transformer_cls_names_to_wrap
    asked = configured or list(blocks)
    tied = _tied(model)
    try:
        on_device = _mesh_on(accelerator.device)
        with on_device, _own_units(model, tied) as embedding:
            classes = _without_embedding(model, embedding, asked)
            plugin.transformer_cls_names_to_wrap = classes or None
            prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    # an unknown layer class, a container, a module in two units
    except (ValueError, NotImplementedError, RuntimeError, TypeError) as error:
        _reject_separated(model, tied, failed=True)
        policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
        raise BadInput(
            f"FSDP2 cannot shard the model with fsdp_auto_wrap_policy {policy}, layers "
            f"{', '.join(asked) or 'none'}: {error}; use TRANSFORMER_BASED_WRAP, with "
            "machine.blocks for your own layers"
        ) from error
    finally:
        plugin.transformer_cls_names_to_wrap = configured  # another model has other blocks
    _reject_separated(prepared, tied)
    accelerator._optimizers.clear()
    _train_as_unsharded(prepared)
    if accelerator.native_amp and plugin.mixed_precision_policy == MixedPrecisionPolicy():
        _autocast(prepared, accelerator)
    return prepared  # type: ignore[no-any-return]


@contextmanager
def _mesh_on(device: torch.device) -> Iterator[None]:
    """Let FSDP2 build its mesh on the CPU if that trains, although the host has a GPU.

    accelerate gives it no mesh, and torch's default is on the GPU.
    """
    if device.type != "cpu":
        yield
        return
    found = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_: device
    try:
        yield
    finally:
        torch._C._get_accelerator = found


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _reject_separated(
    model: nn.Module, tied: Sequence[Sequence[str]], *, failed: bool = False
) -> None:
    """Raise BadInput if two of FSDP2's units need one parameter.

    ``failed``: FSDP2 stopped at a parameter that another unit had sharded.
    """
    for names in tied:
        parameters = [model.get_parameter(name) for name in names]
        separated = len(set(map(id, parameters))) > 1
        if separated or (failed and isinstance(parameters[0], DTensor)):
            raise BadInput(
                f"FSDP2 cannot shard the model: {' and '.join(names)} are one parameter, in "
                "modules that it gathers separately; untie them in model(), or use DDP "
                "(--config_file ddp)"
            )


def _autocast(model: nn.Module, accelerator: Accelerator) -> None:
    """Run the model's forward under autocast with float32 outputs, as without FSDP2.

    FSDP2's own policy would cast at other places, so that results would not be bit-identical.
    """
    context = get_mixed_precision_context_manager(
        accelerator.native_amp, accelerator.autocast_handler
    )
    own: Any = getattr(model.forward, "__func__", None)
    if own is None:  # a plain function replaced the method
        model.forward = convert_outputs_to_fp32(context(model.forward))
    else:
        model.forward = MethodType(convert_outputs_to_fp32(context(own)), model)


def _train_as_unsharded(model: nn.Module) -> None:
    """Make encoders of transformers skip layers in training as they do on one process.

    Their forward asks whether FSDP2 has sharded them, and would then run the layers that LayerDrop
    skips, so that it trains another model. (In an evaluation, generation must know it.)
    """

    def mark(sharded: bool, module: nn.Module, *_: object) -> None:
        if module.training:
            vars(module)["_is_fsdp_managed_module"] = sharded

    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if code is not None and "is_fsdp_managed_module" in code.co_names:
            module.register_forward_pre_hook(partial(mark, False))
            module.register_forward_hook(partial(mark, True), always_call=True)


@contextmanager
def _own_units(model: nn.Module, tied: Sequence[Sequence[str]]) -> Iterator[nn.Module | None]:
    """Hide embeddings, for a while, that accelerate cannot shard as separate units.

    Yield the input embedding, if the model has one.

    Models of transformers without an input embedding, or with several, raise NotImplementedError,
    which accelerate does not catch. And if more modules than the input embedding and the output
    layer share a weight (T5, BART), it must stay in the root's unit.

    Args:
        model: not yet sharded.
        tied: names of each parameter that has several.
    """
    embeddings: dict[str, Any] = {}
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            embeddings[name] = getattr(model, name, lambda: None)()
        except NotImplementedError:
            embeddings[name] = None

    # Find weights that other modules use, too.
    own = list(embeddings.values())
    shared = False
    for names in tied:
        modules = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        of_embedding = any(module is one for module in modules for one in own)
        only = all(any(module is one for one in own) for module in modules)
        shared = shared or (of_embedding and not only)

    hidden = []
    for name, embedding in embeddings.items():
        if hasattr(model, name) and (shared or embedding is None):
            setattr(model, name, lambda: None)
            hidden.append(name)
    try:
        yield own[0]
    finally:
        for name in hidden:
            delattr(model, name)


def _without_embedding(
    model: nn.Module, embedding: nn.Module | None, blocks: Sequence[str]
) -> list[str]:
    """Return the classes that do not contain the input embedding.

    accelerate shards it separately, and only once.
    """
    outer = set()
    for module in model.modules():
        if module is not embedding and any(inner is embedding for inner in module.modules()):
            outer.add(type(module).__name__)
    return [name for name in blocks if name not in outer]


def sharded_precision(precision: str) -> Any:
    """Return FSDP2's policy for one of accelerate's precisions.

    Compute in half precision, reduce and accumulate gradients in float32. None: no policy.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if precision not in HALF:
        return None
    return MixedPrecisionPolicy(param_dtype=HALF[precision], reduce_dtype=torch.float32)


def reject_half_parameters(model: nn.Module) -> None:
    """Raise BadInput if a trained parameter has a 16-bit dtype.

    fp16 loss scaling needs float32 gradients.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise BadInput(
                f"mixed_precision fp16 requires float32 parameters, but {name} is {kind}; return "
                "a float32 model from model(), or use mixed_precision no"
            )
