"""A model as a graph of its operations, for TensorBoard: drawn on the meta device, without memory or values.

>>> writer.file_writer.add_graph((model_graph(make_model, loss, batch), RunMetadata()))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker
from torch.utils.weak import WeakTensorKeyDictionary


def model_graph(make: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Any], batch: Mapping[str, Any]) -> Any:
    """One forward pass as a TensorBoard ``GraphDef``: a node for each operation, under the module that makes it.

    Args:
        make: builds the model; called under ``torch.device("meta")``.
        loss: of the model on a batch.
        batch: one batch, on any device.

    Raises:
        Exception: whatever a model raises that cannot be built or run without values.
    """
    with torch.device("meta"):
        model = make()
    model.to("meta").eval()
    there = {name: value.to("meta") if torch.is_tensor(value) else value for name, value in batch.items()}
    drawing = _Drawing(type(model).__name__)
    for name, value in there.items():
        if torch.is_tensor(value):
            drawing.given(value, f"batch/{name}", "Input")
    for name, parameter in model.named_parameters():
        drawing.given(parameter, f"{type(model).__name__}/{name.replace('.', '/')}", "Parameter")
    with torch.no_grad(), drawing.modules, drawing:
        loss(model, there)
    return drawing.graph


class _Drawing(TorchDispatchMode):
    """Writes down each operation, and which ones made what it works on."""

    def __init__(self, root: str) -> None:
        from tensorboard.compat.proto.graph_pb2 import GraphDef
        from tensorboard.compat.proto.versions_pb2 import VersionDef

        super().__init__()  # type: ignore[no-untyped-call]
        self.graph: Any = GraphDef(versions=VersionDef(producer=22))
        self.modules: Any = ModuleTracker()
        self._root = root
        self._names: Counter[str] = Counter()
        self._made: Any = WeakTensorKeyDictionary()

    def given(self, tensor: Tensor, name: str, kind: str) -> None:
        self._made[tensor] = self._node(name, kind, (), tensor)

    def _node(self, name: str, kind: str, inputs: Iterable[str], tensor: Tensor) -> str:
        self._names[name] += 1
        unique = name if self._names[name] == 1 else f"{name}_{self._names[name]}"
        node = self.graph.node.add(name=unique, op=kind, input=list(dict.fromkeys(inputs)))
        shape = node.attr["_output_shapes"].list.shape.add()
        for size in tensor.shape:
            shape.dim.add(size=size)
        return unique

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(result) if torch.is_tensor(value)]
        if made:
            inputs = [
                self._made[value]
                for value in tree_leaves((args, kwargs or {}))
                if torch.is_tensor(value) and value in self._made
            ]
            inside = max(self.modules.parents - {"Global"}, key=len, default=self._root)
            kind = operation.overloadpacket.__name__
            name = self._node(f"{inside.replace('.', '/')}/{kind}", kind, inputs, made[0])
            for value in made:
                self._made[value] = name
        return result
