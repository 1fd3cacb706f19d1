"""What an Apple GPU (mps) does not support, found before anything is written."""

from itertools import chain

from torch import nn

from oneloop.basics.wide_sums import DOUBLE
from oneloop.launch.devices import not_on_mps
from oneloop.recipe.schema import Recipe

_LIBRARY = "bitsandbytes"


def reject_model(recipe: Recipe, model: nn.Module) -> None:
    """Raise BadInput if an Apple GPU cannot run the model.

    Args:
        recipe: its group machine applies.
        model: as the task returned it.
    """
    machine = recipe.machine
    if machine.compile != "none":
        raise not_on_mps(
            f"machine.compile {machine.compile}", "torch's compiler for it is a prototype"
        )
    if any(type(module).__module__.startswith(_LIBRARY) for module in model.modules()):
        raise not_on_mps("4-bit weights", f"the kernels of {_LIBRARY} are for CUDA and the CPU")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.dtype in DOUBLE:
            raise not_on_mps(f"{name} in {str(tensor.dtype)[6:]}", "it has no float64")


def reject_training(recipe: Recipe) -> None:
    """Raise BadInput if an Apple GPU cannot train the recipe.

    Args:
        recipe: its groups ema and optimizer apply.
    """
    if recipe.ema.device == "cpu":
        raise not_on_mps("ema.device cpu", "it shares its memory with the host")
    name = recipe.optimizer.name
    if name.startswith(_LIBRARY):
        raise not_on_mps(f"optimizer.name {name}", f"the kernels of {_LIBRARY} are for CUDA")
