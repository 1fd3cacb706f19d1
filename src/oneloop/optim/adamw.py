"""Fused AdamW that keeps the lists of its tensors from step to step: the same kernel, state and bits as torch's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from oneloop.basics.tensors import local
from oneloop.optim.elementwise import adamw_

_KEPT = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class _Lists:
    """What one group's kernel works on: each rank's own part of the parameters and of their state."""

    parameters: list[Tensor]  # of the group, as they were given
    mine: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    state: list[tuple[Tensor, ...]]
    """of each parameter what its state held: where others stand there, the lists are old"""


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov & Hutter 2019), fused.

    torch gathers its state, sorts it by device and type and keeps a profiler's record at every step, which for a
    small model takes longer than the update. Here that is done once. What is unusual (a parameter without a gradient,
    hooks, a closure, tensors of several types) goes torch's own way. ``found_inf``, a 0-dim tensor set before
    :meth:`step`, makes the step change nothing where it is 1.
    """

    elementwise = False
    """whether each element's update is to depend on nothing else: not fused, the same bits for all shardings"""

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
        """One update of all parameters."""
        if self.elementwise:
            return self._each_by_itself()
        if closure is not None or self._hooks() or getattr(self, "grad_scale", None) is not None:
            return self._torchs_way(closure)
        if self._lists is None or not self._current(self._lists):
            self._lists = self._gathered()
        gradients = [[parameter.grad for parameter in lists.parameters] for lists in self._lists or ()]
        if self._lists is None or any(gradient is None for several in gradients for gradient in several):
            return self._torchs_way(None)
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

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it, for hooks and a profiler's record

    def _each_by_itself(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:  # as torch begins it
                    self.state[parameter] = {name: torch.zeros_like(parameter) for name in _KEPT[:2]}
                    self.state[parameter]["step"] = torch.zeros((), device=local(parameter).device)
            weights = [local(parameter.detach()) for parameter in parameters]
            state = [[local(self.state[parameter][name]) for parameter in parameters] for name in _KEPT]
            how = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            how["found_inf"] = getattr(self, "found_inf", None)
            adamw_(weights, [local(parameter.grad) for parameter in parameters], *state, **how)

    def _torchs_way(self, closure: Any) -> Any:
        step = torch.optim.AdamW.step
        if not getattr(step, "hooked", False):
            step = Optimizer.profile_hook_step(step)
        return step(self, closure)

    def _hooks(self) -> bool:
        mine = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return bool(mine or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _current(self, kept: list[_Lists]) -> bool:
        """Whether parameters and state still hold the tensors of the lists: a checkpoint may have put others there."""
        for lists in kept:
            for parameter, mine, held in zip(lists.parameters, lists.mine, lists.state, strict=True):
                state = self.state[parameter]
                if local(parameter).data_ptr() != mine.data_ptr():
                    return False
                if any(state.get(name) is not tensor for name, tensor in zip(_KEPT, held, strict=True)):
                    return False
        return True

    def _gathered(self) -> list[_Lists] | None:
        """The lists; None before there is a state, and where one kernel cannot take a group as a whole."""
        made = []
        for group in self.param_groups:
            states = [self.state.get(parameter, {}) for parameter in group["params"]]
            if not states or not all(name in state for state in states for name in _KEPT) or group["amsgrad"]:
                return None
            mine, first, second, steps = (
                [local(tensor).detach() for tensor in tensors]
                for tensors in (group["params"], *([state[name] for state in states] for name in _KEPT))
            )
            if len({(t.device, t.dtype) for t in (*mine, *first, *second)}) > 1 or group["maximize"]:
                return None
            held = [tuple(state[name] for name in _KEPT) for state in states]
            made.append(_Lists(list(group["params"]), mine, first, second, steps, held))
        return made
