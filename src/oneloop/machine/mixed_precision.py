"""Prepare the model as accelerate is configured: on one device, under DDP, or sharded by FSDP2."""

import inspect
import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.other import get_module_children_bottom_up
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.tensors import share_buffers
from oneloop.machine.blocks import statistics_of

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # accelerate's names of half precision


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
    if accelerator.is_fsdp2:
        _shard(model, accelerator, blocks)
        return model
    if accelerator.mixed_precision == "fp8":
        _convert_to_fp8(model, accelerator)

    # The ranks share buffers here. DDP does so in every forward, and not for all dtypes: only the
    # statistics of BatchNorm need that.
    statistics = statistics_of(model)
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    ignored = [name for name in buffers if f"buffer {name}" not in statistics]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)

    # One process with a process group: accelerate would wrap it in DDP, and synchronise in
    # every micro-batch.
    prepared = accelerator.prepare_model(model, evaluation_mode=accelerator.num_processes == 1)
    share_buffers(prepared)
    return prepared  # type: ignore[no-any-return]


def _shard(model: nn.Module, accelerator: Accelerator, blocks: Sequence[str]) -> None:
    """Shard the model by FSDP2, in place: blocks and the input embedding are units."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # accelerate's config may choose the mesh (HSDP), the units and when to free them.
    plugin = copy(accelerator.state.fsdp_plugin)  # another model has other blocks
    if plugin.activation_checkpointing or plugin.ignored_modules:
        raise BadInput(
            "fsdp_activation_checkpointing true and fsdp_ignored_modules are not supported: the "
            "first computes wrong gradients with dropout, and no process sums the gradients of the "
            "second; set them to false and null, and use machine.recompute full"
        )
    if accelerator.torch_device_mesh is None:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    else:
        mesh = accelerator.torch_device_mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    precision = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision)

    # In mixed precision, trained parameters are float32, as accelerate makes them.
    for parameter in model.parameters():
        if parameter.requires_grad and accelerator.mixed_precision != "no":
            parameter.data = parameter.data.float()

    # Choose the units, and shard them.
    names = plugin.transformer_cls_names_to_wrap or list(blocks)
    plugin.transformer_cls_names_to_wrap = names or None
    embedding, shared = _input_embedding(model)
    units = {}
    try:
        plugin.set_auto_wrap_policy(model)
        is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model) or (lambda _: False)
        for name, module in get_module_children_bottom_up(model, return_fqns=True)[:-1]:
            # The input embedding is often the largest layer: it is a unit, and in no other one.
            holds_embedding = any(inner is embedding for inner in module.modules())
            if (module is embedding and not shared) or (is_unit(module) and not holds_embedding):
                units[name] = module
        _reject_separated(model, units)
        for module in dict.fromkeys(units.values()):
            shard(module, reshard_after_forward=plugin.reshard_after_forward)
        shard(model)
    except BadInput:
        raise
    # an unknown layer class, a container, a parameter with gaps
    except (ValueError, NotImplementedError, RuntimeError, TypeError) as error:
        policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
        raise BadInput(
            f"FSDP2 cannot shard the model with fsdp_auto_wrap_policy {policy}, layers "
            f"{', '.join(names) or 'none'}: {error}; use TRANSFORMER_BASED_WRAP, with "
            "machine.blocks for your own layers"
        ) from error
    _train_as_unsharded(model)

    # With batch.grain, run under autocast as without FSDP2: FSDP2's own policy would cast at other
    # places, so that results would not be bit-identical.
    if precision == MixedPrecisionPolicy():
        accelerator.prepare_model(model, evaluation_mode=True)


def _input_embedding(model: nn.Module) -> tuple[nn.Module | None, bool]:
    """Return the input embedding, if there is one, and whether another module shares its weight."""
    try:
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # some models of transformers have none, or several
        return None, False
    weight = getattr(embedding, "weight", None)
    everywhere = model.named_parameters(remove_duplicate=False)
    return embedding, sum(parameter is weight for _, parameter in everywhere) > 1


def _reject_separated(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raise BadInput if two of FSDP2's units need one parameter.

    Args:
        model: not yet sharded.
        units: the modules that will be gathered alone, by name.
    """
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = name
        while place and place not in units:
            place = place.rpartition(".")[0]
        unit = units.get(place, model)
        other, owner = owners.setdefault(parameter, (name, unit))
        if owner is not unit:
            raise BadInput(
                f"FSDP2 cannot shard the model: {other} and {name} are one parameter, in "
                "modules that it gathers separately; untie them in model(), or use DDP "
                "(--config_file ddp)"
            )


def _train_as_unsharded(model: nn.Module) -> None:
    """Make encoders of transformers skip layers in training as they do on one process.

    Their forward asks whether FSDP2 has sharded them, and would then run the layers that LayerDrop
    skips, so that it trains another model.
    """
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "is_fsdp_managed_module" in code.co_names:
            vars(module)["_is_fsdp_managed_module"] = False


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
        if parameter.requires_grad and parameter.element_size() < 4:
            raise BadInput(
                f"mixed_precision fp16 requires float32 parameters, but {name} is "
                f"{parameter.dtype}; return a float32 model from model(), or use mixed_precision no"
            )
