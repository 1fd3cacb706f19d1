"""Muon for matrices and AdamW for the rest, equal under every parallel layout, without host syncs.

Jordan 2024 (kellerjordan.github.io/posts/muon); the update's size follows Liu et al. 2025 (Muon is
Scalable for LLM Training): 0.2 sqrt(max(rows, columns)), so that one learning rate fits both.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from oneloop.basics.tensors import local
from oneloop.optim.elementwise import adamw_

_QUINTIC = (3.4445, -4.7750, 2.0315)


def hidden_matrices(model: nn.Module, adamw_for: tuple[str, ...] = ()) -> set[Tensor]:
    """Return the hidden matrices: no embeddings, no output head, no modules named in
    ``adamw_for``."""
    heads = [getattr(module, "get_output_embeddings", lambda: None)() for module in model.modules()]
    outside = {
        p
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    outside |= {p for head in heads if isinstance(head, nn.Module) for p in head.parameters()}
    return {
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2
        and parameter not in outside
        and not set(adamw_for) & set(name.split("."))
    }


def orthogonalized(
    matrix: Tensor, *, iterations: int = 5, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Approximate the nearest orthogonal matrix by Newton-Schulz iterations in ``dtype`` or better;
    (rows, columns)."""
    x: Tensor = matrix.to(
        torch.promote_types(dtype, matrix.dtype) if dtype is torch.float32 else dtype
    )
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """Muon for parameter groups with ``muon=True`` (matrices), fused AdamW for the other groups.

    Under FSDP2 each matrix is gathered once per step, orthogonalized on every rank, and sharded
    again. If ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes
    nothing."""

    _step_supports_amp_scaling = True
    elementwise = False
    """as :attr:`oneloop.optim.adamw.AdamW.elementwise`, for AdamW's groups; a matrix is always
    updated as a whole"""

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        dtype: torch.dtype = torch.float32,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if (
            not all(0 <= value < 1 for value in (momentum, *betas))
            or not eps >= 0
            or iterations < 1
        ):
            got = f"momentum {momentum}, betas {betas}, eps {eps}, iterations {iterations}"
            raise ValueError(
                f"muon needs momentum and betas in [0, 1), eps >= 0 and iterations >= 1; got {got}"
            )
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "iterations": iterations,
        }
        defaults |= {"betas": betas, "eps": eps, "weight_decay": weight_decay, "muon": True}
        super().__init__(params, defaults)
        self.dtype = dtype
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["muon"]:
                    self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
                else:
                    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    moments = {
                        name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")
                    }
                    self.state[parameter] = {"step": step, **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient once."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"]:
                for parameter in params:
                    self._update(parameter, group)
            elif params:
                states = [self.state[parameter] for parameter in params]
                mine, gradients = [local(p) for p in params], [local(p.grad) for p in params]
                first, second = (
                    [local(s[name]) for s in states] for name in ("exp_avg", "exp_avg_sq")
                )
                steps = [s["step"] for s in states]
                how: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps")}
                how |= {"found_inf": self.found_inf}
                if self.elementwise:
                    adamw_(mine, gradients, first, second, steps, betas=group["betas"], **how)
                    continue
                how |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
                how |= {"fused": True, "grad_scale": None, "amsgrad": False, "maximize": False}
                adamw(mine, gradients, first, second, [], steps, **how)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        weights, momentum = local(parameter), local(self.state[parameter]["momentum"])
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        keep: float | Tensor = 1.0
        if self.found_inf is not None:  # 0 or 1; no host sync
            keep = (1.0 - self.found_inf).to(weights.dtype)
            gradient = torch.where(self.found_inf > 0, torch.zeros_like(gradient), gradient)
        momentum.lerp_(
            gradient, (1.0 - group["momentum"]) * torch.as_tensor(keep, dtype=weights.dtype)
        )
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = self._orthogonalized(update, parameter, group["iterations"])
        rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
        size = 0.2 * max(rows, columns) ** 0.5
        weights.mul_(1.0 - group["lr"] * group["weight_decay"] * keep)
        weights.sub_(update * (group["lr"] * size * keep))

    def _orthogonalized(self, update: Tensor, parameter: Tensor, iterations: int) -> Tensor:
        """Orthogonalize the whole matrix; return this rank's shard, in the shape of ``update``."""
        if isinstance(parameter, DTensor):
            mesh, cut = parameter.device_mesh, parameter.placements
            sharded = DTensor.from_local(
                update, mesh, cut, shape=parameter.shape, stride=parameter.stride()
            )
            update = sharded.full_tensor()  # one all-gather
        whole = orthogonalized(update.flatten(1), iterations=iterations, dtype=self.dtype).view_as(
            update
        )
        if isinstance(parameter, DTensor):
            replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            whole = replicated.redistribute(mesh, cut).to_local()
        return whole
