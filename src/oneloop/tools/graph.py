"""A model's graph of operations for TensorBoard, recorded during the forward pass of a real batch.

>>> with torch.no_grad(), Drawing(model, batch) as drawing:
...     loss(model, batch)
>>> writer.file_writer.add_graph((drawing.graph, RunMetadata()))
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker
from torch.utils.weak import WeakTensorKeyDictionary


class Drawing(TorchDispatchMode):
    """A context that records each operation and the source of its inputs.

    Args:
        model: its parameters have their names in the graph.
        batch: its tensors have their names, too.
    """

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.graph_pb2 import GraphDef
        from tensorboard.compat.proto.versions_pb2 import VersionDef

        super().__init__()  # type: ignore[no-untyped-call]
        self.graph: Any = GraphDef(versions=VersionDef(producer=22))
        self.problem = ""  # why the graph is incomplete

        self._tracker: Any = ModuleTracker()
        self._root = type(model).__name__.removeprefix("FSDP")  # fully_shard adds this prefix
        self._model = model
        self._names: Counter[str] = Counter()  # how often each name is used
        self._producers: Any = WeakTensorKeyDictionary()  # name of the node of each tensor
        for name, value in batch.items():
            if torch.is_tensor(value):
                self._producers[value] = self._node(f"batch/{name}", "Input", (), value)

    def __enter__(self) -> "Drawing":
        self._tracker.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call,no-any-return]

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*of)

    def _running_module(self) -> str:
        """Return the dotted name of the innermost running module."""
        name = str(max(self._tracker.parents - {"Global"}, key=len, default=self._root))
        return ".".join([self._root, *name.split(".")[1:]])

    def _source(self, value: Tensor) -> str | None:
        """Return the node that produced a tensor; create a parameter's node at its first use."""
        if value not in self._producers:
            # Find the running module, whose parameter the tensor may be.
            inside = self._running_module()
            module = self._model
            for part in inside.split(".")[1:]:
                module = getattr(module, part, module)
            for name, parameter in module.named_parameters(recurse=False):
                if parameter is value:
                    path = f"{inside}.{name}".replace(".", "/")
                    self._producers[value] = self._node(path, "Parameter", (), value)
        return self._producers.get(value)  # type: ignore[no-any-return]

    def _node(self, name: str, kind: str, inputs: Iterable[str], tensor: Tensor) -> str:
        """Add a node with the tensor's shape; return its name, which is made unique."""
        self._names[name] += 1
        unique = name if self._names[name] == 1 else f"{name}_{self._names[name]}"
        node = self.graph.node.add(name=unique, op=kind, input=list(dict.fromkeys(inputs)))
        shape = node.attr["_output_shapes"].list.shape.add()
        for size in tensor.shape:
            shape.dim.add(size=size)
        return unique

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        try:
            self._draw(operation, tree_leaves((args, kwargs or {})), tree_leaves(result))
        except Exception as error:  # a failure here must not stop the run
            self.problem = f"{type(error).__name__}: {error}"
        return result

    def _draw(self, operation: Any, given: list[Any], result: list[Any]) -> None:
        """Add the node of an operation, given the values of its arguments and of its result."""
        made = [value for value in result if torch.is_tensor(value)]
        if not made:
            return
        sources = [self._source(value) for value in given if torch.is_tensor(value)]
        inputs = [source for source in sources if source]
        kind = operation.overloadpacket.__name__
        path = f"{self._running_module().replace('.', '/')}/{kind}"
        name = self._node(path, kind, inputs, made[0])
        for value in made:
            self._producers[value] = name
