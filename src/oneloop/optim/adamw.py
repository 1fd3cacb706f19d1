"""Fused AdamW that keeps its tensor lists between steps: bit-identical to torch's, with the same
kernel and state."""

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
from oneloop.optim.elementwise import adamw_

_KEPT = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class _Lists:
    """Arguments of the fused kernel for one parameter group: this rank's shards of parameters and
    state."""

    parameters: list[Tensor]  # the group's parameters, unsharded or DTensors
    mine: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    state: list[tuple[Tensor, ...]]
    """the state tensors of each parameter; if a parameter's state holds other tensors, the lists
    are stale"""


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019), fused.

    In every step, torch gathers the state, sorts it by device and dtype and adds a profiler record.
    For a small model this takes longer than the update, so this class does it once. It calls
    torch's own step in unusual cases: a parameter without a gradient, hooks, a closure, mixed
    dtypes. If ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes
    nothing."""

    # whether to update element by element, not fused: bit-identical for every sharding
    elementwise = False

    def __init__(self, params: Any, **options: Any) -> None:
        self._lists: list[_Lists] | None = None
        super().__init__(params, fused=True, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._lists = None
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._lists = None
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Update all parameters once."""
        if self.elementwise:
            return self._step_elementwise()
        if closure is not None or self._hooks() or getattr(self, "grad_scale", None) is not None:
            return self._torch_step(closure)
        if self._lists is None or not self._current(self._lists):
            self._lists = self._gathered()
        gradients = [
            [parameter.grad for parameter in lists.parameters] for lists in self._lists or ()
        ]
        if self._lists is None or any(
            gradient is None for several in gradients for gradient in several
        ):
            return self._torch_step(None)
        found_inf = getattr(self, "found_inf", None)
        one = 1 if found_inf is None else 1 - found_inf
        for lists, several, group in zip(self._lists, gradients, self.param_groups, strict=True):
            torch._foreach_add_(lists.steps, one if found_inf is None else [one] * len(lists.steps))
            torch._fused_adamw_(
                lists.mine,
                [local(gradient) for gradient in several if gradient is not None],
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

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it for hooks and a profiler record

    def _step_elementwise(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:  # the same initial state as torch's
                    self.state[parameter] = {
                        name: torch.zeros_like(parameter) for name in _KEPT[:2]
                    }
                    self.state[parameter]["step"] = torch.zeros((), device=local(parameter).device)
            weights = [local(parameter.detach()) for parameter in parameters]
            state = [
                [local(self.state[parameter][name]) for parameter in parameters] for name in _KEPT
            ]
            how = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            how["found_inf"] = getattr(self, "found_inf", None)
            adamw_(weights, [local(parameter.grad) for parameter in parameters], *state, **how)

    def _torch_step(self, closure: Any) -> Any:
        step = torch.optim.AdamW.step
        if not getattr(step, "hooked", False):
            step = Optimizer.profile_hook_step(step)
        return step(self, closure)

    def _hooks(self) -> bool:
        mine = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return bool(mine or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _current(self, kept: list[_Lists]) -> bool:
        """Return whether the lists match the current parameters and state; loading a checkpoint
        replaces tensors."""
        for lists in kept:
            for parameter, mine, held in zip(
                lists.parameters, lists.mine, lists.state, strict=True
            ):
                state = self.state[parameter]
                if local(parameter).data_ptr() != mine.data_ptr():
                    return False
                if any(
                    state.get(name) is not tensor for name, tensor in zip(_KEPT, held, strict=True)
                ):
                    return False
        return True

    def _gathered(self) -> list[_Lists] | None:
        """Build the lists; None if there is no state yet, or if one kernel call cannot update a
        whole group."""
        made = []
        for group in self.param_groups:
            states = [self.state.get(parameter, {}) for parameter in group["params"]]
            if (
                not states
                or not all(name in state for state in states for name in _KEPT)
                or group["amsgrad"]
            ):
                return None
            mine, first, second, steps = (
                [local(tensor).detach() for tensor in tensors]
                for tensors in (
                    group["params"],
                    *([state[name] for state in states] for name in _KEPT),
                )
            )
            if (
                len({(t.device, t.dtype) for t in (*mine, *first, *second)}) > 1
                or group["maximize"]
            ):
                return None
            held = [tuple(state[name] for name in _KEPT) for state in states]
            made.append(_Lists(list(group["params"]), mine, first, second, steps, held))
        return made
