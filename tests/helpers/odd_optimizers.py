"""Optimizers that keep their state in unusual places, and a model that they train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer


class Simple(Optimizer):
    """Updates one parameter after another by :meth:`update`."""

    def __init__(self, params: Any, lr: float = 0.05, **more: Any) -> None:
        super().__init__(params, dict(lr=lr, **more))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group)

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor(group))

    def factor(self, group: dict[str, Any]) -> float:
        return 1.0


class GrowingDefault(Simple):
    """State in the parameter group, under the name of a default."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, d=0.1, weight_decay=weight_decay)

    def factor(self, group: dict[str, Any]) -> float:
        group["d"] *= 1.1
        return group["d"] + group["weight_decay"]


class TensorInGroup(Simple):
    """A tensor in the parameter group."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["t"] = torch.zeros(2, dtype=torch.float64)

    def factor(self, group: dict[str, Any]) -> float:
        group["t"] += 0.1
        return float(group["t"][1])


class CountingAdamW(AdamW):
    """A counter that no ``state_dict()`` contains."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.k = 0

    def step(self, closure: Any = None) -> None:
        self.k += 1
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] /= 1 + self.k
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class HonestAdamW(CountingAdamW):
    """A counter and more, which its ``state_dict()`` contains, as torch asks for."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.seen = {1: torch.zeros(3, dtype=torch.bfloat16), 2: [0, ("text", None)]}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.k = state.pop("k")
        self.seen = state.pop("seen")
        assert self.seen[1].dtype is torch.bfloat16
        super().load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.seen[1] += 1
        self.seen[2][0] += 1
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(float(self.seen[1][2]) * 1e-3 * self.seen[2][0])


class LateCounter(Simple):
    """A counter that has no effect before step 8."""

    k = 0

    def factor(self, group: dict[str, Any]) -> float:
        self.k += 1
        return 1.0 if self.k < 8 * 4 else 0.1


class SavedLateCounter(LateCounter):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "k": self.k}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.k = state.pop("k")
        super().load_state_dict(state)


class Lookahead(Simple):
    """An optimizer inside of another one (Zhang et al. 2019)."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]
        self.k = 0

    def state_dict(self) -> dict[str, Any]:
        more = {"inner": self.inner.state_dict(), "slow": self.slow, "k": self.k}
        return {**super().state_dict(), **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.inner.load_state_dict(state.pop("inner"))
        self.k = state.pop("k")
        for mine, saved in zip(self.slow, state.pop("slow"), strict=True):
            mine.copy_(saved)
        super().load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.k += 1
        fast = [one for group in self.param_groups for one in group["params"]]
        if self.k % 3 == 0:
            for one, slow in zip(fast, self.slow, strict=True):
                one.copy_(slow.lerp_(one, 0.5))


class Around(Simple):
    """An optimizer around another one, whose state_dict it passes on, as timm's Lookahead."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.inner = SGD(self.param_groups, lr=lr, momentum=0.9)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


_calls = [0]


class Hidden(Simple):
    """A counter of the module, which nobody can see."""

    def factor(self, group: dict[str, Any]) -> float:
        _calls[0] += 1
        return 1 / _calls[0]


class Global(Simple):
    """State that belongs to no parameter."""

    def factor(self, group: dict[str, Any]) -> float:
        self.state["all"]["k"] = self.state["all"].get("k", 0) + 1
        return 1 / self.state["all"]["k"]


class History(SGD):
    """A list of tensors for each parameter, as LBFGS keeps."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("old", []).append(parameter.grad.clone())


class LARS(Simple):
    """Layer-wise rates by the norms of whole tensors (You et al. 2017)."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        rate = parameter.norm() / (parameter.grad.norm() + 1e-9)
        parameter.add_(parameter.grad * (rate * -group["lr"]))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class WithSetting(LARS):
    """A setting that no file can hold."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, kind=torch.float32)


class LocalLARS(Simple):
    """The same by the norms of shards."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        mine, gradient = local(parameter), local(parameter.grad)
        mine.add_(gradient, alpha=-group["lr"] * float(mine.norm() / (gradient.norm() + 1e-9)))


class LocalMomentum(Simple):
    """Its state has the shape of a shard."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        mine, gradient = local(parameter), local(parameter.grad)
        momentum = self.state[parameter].setdefault("m", torch.zeros_like(mine))
        mine.sub_(momentum.mul_(0.9).add_(gradient), alpha=group["lr"])


class LocalCounter(Simple):
    """A counter in the parameter group that differs between ranks."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0) + local(parameter).numel()
        super().update(parameter, group)


class SGLD(Simple):
    """Stochastic gradient Langevin dynamics (Welling et al. 2011): noise in each update."""

    def update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, group)
        parameter.add_(torch.randn_like(parameter), alpha=0.01)


def model() -> nn.Module:
    """Return the same model each time, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def train(net: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
    """Make these steps, each with other samples."""
    for step in range(first, last + 1):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        (net(inputs) - 1).square().mean().backward()
        optimizer.step()
