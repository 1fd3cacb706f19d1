"""The ranks of a run, and values that they exchange while they save and load."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import Accelerator

from oneloop.basics.tensors import host_group

_Value = TypeVar("_Value")


class Ranks:
    """This process among all of a run.

    Args:
        accelerator: of the run.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank = accelerator.process_index
        self.count = accelerator.num_processes
        self.device = accelerator.device
        self.is_main = self.rank == 0
        # rank of the first process of this host
        self.leader = self.rank - accelerator.local_process_index
        self._gloo_group: Any = host_group() if self.count > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Return a value of all ranks. Collective."""
        values: list[Any] = [value]
        if self._gloo_group is not None:
            values = [None] * self.count
            dist.all_gather_object(values, value, group=self._gloo_group)
        return values

    def all_of(self, act: Callable[[], Any]) -> list[Any]:
        """Return the results of a function on all ranks. Collective.

        If it raises an OSError or a ValueError on some ranks, raise the first one on all ranks.
        """
        own: tuple[Any, OSError | ValueError | None]
        try:
            own = (act(), None)
        except (OSError, ValueError) as raised:
            own = (None, raised)
        results = []
        for result, error in self.gather(own):
            if error is not None:
                raise error
            results.append(result)
        return results

    def from_main(self, act: Callable[[], _Value]) -> _Value:
        """Return the result of a function that only rank 0 calls; see :meth:`all_of`."""
        value: _Value = self.all_of(lambda: act() if self.is_main else None)[0]
        return value
