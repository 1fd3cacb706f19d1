"""Fused AdamW that keeps its tensor lists between steps.

It is bit-identical to torch's, with the same kernel and state.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from oneloop.basics.tensors import local
from oneloop.optim.elementwise import adamw_, ignores_flag

_KEPT = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class _Lists:
    """Arguments of the fused kernel for one parameter group."""

    parameters: list[Tensor]  # the group's parameters, unsharded or DTensors

    # this rank's shards
    mine: list[Tensor]  # of the parameters
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]

    # the state of each parameter, as _KEPT; the lists are stale if it holds other tensors now
    state: list[tuple[Tensor, ...]]

    def gradients(self) -> list[Tensor] | None:
        """Return this rank's shards of the gradients; None if a parameter has no gradient."""
        found = []
        for parameter in self.parameters:
            if parameter.grad is None:
                return None
            found.append(local(parameter.grad))
        return found


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019), fused.

    In every step, torch gathers the state, sorts it by device and dtype and adds a profiler record.
    For a small model this takes longer than the update, so this class does it once. It calls
    torch's own step in unusual cases: a parameter without a gradient, hooks, a closure, mixed
    dtypes. If ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes
    nothing.

    Args:
        params: parameters, or parameter groups.
        options: those of torch's AdamW, but ``fused``.
    """

    elementwise = False
    """whether to update element by element, not fused: bit-identical for every sharding, and always
    on an Apple GPU"""

    def __init__(self, params: Any, **options: Any) -> None:
        self._lists: list[_Lists] | None = None
        super().__init__(params, fused=True, **options)
        self.elementwise = ignores_flag(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._lists = None
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._lists = None
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update all parameters once."""
        # Let torch handle the unusual cases.
        if self.elementwise:
            return self._step_elementwise()
        if closure is not None or self._hooks() or getattr(self, "grad_scale", None) is not None:
            return self._torch_step(closure)

        # Gather the lists if there are none, or if somebody replaced tensors.
        if self._lists is None or not self._current(self._lists):
            self._lists = self._gathered()
        if self._lists is None:
            return self._torch_step(None)
        gradients = []
        for lists in self._lists:
            several = lists.gradients()
            if several is None:  # torch's step leaves out a parameter without a gradient
                return self._torch_step(None)
            gradients.append(several)

        # Update. A bad step is not counted; the kernel reads the flag itself, without a host sync.
        found_inf = getattr(self, "found_inf", None)
        one = None if found_inf is None else 1 - found_inf
        for lists, several, group in zip(self._lists, gradients, self.param_groups, strict=True):
            if one is None:
                torch._foreach_add_(lists.steps, 1)
            else:
                torch._foreach_add_(lists.steps, [one] * len(lists.steps))
            torch._fused_adamw_(
                lists.mine,
                several,
                lists.exp_avgs,
                lists.exp_avg_sqs,
                [],
                lists.steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=None,
                found_inf=found_inf,
            )
        return None

    # else torch wraps it for hooks and a profiler record
    step.hooked = True  # type: ignore[attr-defined]

    @Optimizer.profile_hook_step  # runs hooks around it
    def _step_elementwise(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]

            # Make missing state.
            for parameter in parameters:
                if not self.state[parameter]:  # the same initial state as torch's
                    self.state[parameter] = {
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                        "step": torch.zeros((), device=local(parameter).device),
                    }

            # Update this rank's shards.
            states = [self.state[parameter] for parameter in parameters]
            adamw_(
                [local(parameter.detach()) for parameter in parameters],
                [local(parameter.grad) for parameter in parameters],
                [local(state["exp_avg"]) for state in states],
                [local(state["exp_avg_sq"]) for state in states],
                [local(state["step"]) for state in states],
                group,
                getattr(self, "found_inf", None),
            )

    def _torch_step(self, closure: Any) -> Any:
        step = torch.optim.AdamW.step
        if not getattr(step, "hooked", False):
            step = Optimizer.profile_hook_step(step)
        return step(self, closure)

    def _hooks(self) -> bool:
        mine = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return bool(mine or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _current(self, kept: list[_Lists]) -> bool:
        """Return whether the lists match the current parameters and state.

        Loading a checkpoint replaces tensors.
        """
        for lists in kept:
            for parameter, mine, held in zip(
                lists.parameters, lists.mine, lists.state, strict=True
            ):
                if local(parameter).data_ptr() != mine.data_ptr():
                    return False
                state = self.state[parameter]
                for name, tensor in zip(_KEPT, held, strict=True):
                    if state.get(name) is not tensor:
                        return False
        return True

    def _gathered(self) -> list[_Lists] | None:
        """Build the lists.

        Return None if there is no state yet, or if one kernel call cannot update a whole group.
        """
        made = []
        for group in self.param_groups:
            # Read the state of each parameter.
            parameters = list(group["params"])
            if not parameters or group["amsgrad"] or group["maximize"]:
                return None
            held = []
            for parameter in parameters:
                state = self.state.get(parameter, {})
                if not state.keys() >= set(_KEPT):
                    return None
                held.append(tuple(state[name] for name in _KEPT))
            first, second, steps = zip(*held, strict=True)

            # The kernel takes tensors of one device and dtype.
            lists = _Lists(
                parameters=parameters,
                mine=_shards(parameters),
                exp_avgs=_shards(first),
                exp_avg_sqs=_shards(second),
                steps=_shards(steps),
                state=held,
            )
            tensors = (*lists.mine, *lists.exp_avgs, *lists.exp_avg_sqs)
            if len({(tensor.device, tensor.dtype) for tensor in tensors}) > 1:
                return None
            made.append(lists)
        return made


def _shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor).detach() for tensor in tensors]
