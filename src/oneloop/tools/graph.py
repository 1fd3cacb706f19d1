"""A model's graph of operations for TensorBoard, as torch's ``SummaryWriter.add_graph`` draws it.

>>> graph, problem = draw(loss, model, batch)
>>> writer.file_writer.add_graph(graph)
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class _Loss(nn.Module):
    """The loss of a batch, as a module whose arguments are the batch's tensors."""

    def __init__(self, loss: Callable[..., Any], model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.loss = loss
        self.model = model
        self.names = names

    def forward(self, *tensors: Tensor) -> Any:
        return self.loss(self.model, dict(zip(self.names, tensors, strict=True)))[0]


def draw(
    loss: Callable[..., Any],
    model: nn.Module,
    batch: Mapping[str, Any],
) -> tuple[Any, str]:
    """Trace the loss of a batch.

    Args:
        loss: is called with the model and a batch, and returns the loss first.
        model: in eval mode, without gradients.
        batch: its tensors are the inputs of the graph.

    Returns:
        The graph for TensorBoard's file writer, or None; and the reason if there is none.
    """
    from torch.utils.tensorboard._pytorch_graph import graph

    if isinstance(
        model, FSDPModule
    ):  # its hooks are collective, and only this rank would call them
        return None, "torch.jit.trace cannot trace a model that FSDP2 shards"
    tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
    inputs = tuple(tensors.values())
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(_Loss(loss, model, [*tensors]), inputs, check_trace=False)
            return graph(traced, inputs), ""
    except Exception as error:  # a failure here must not stop the run
        return None, f"torch.jit.trace fails ({type(error).__name__}: {str(error).splitlines()[0]})"
