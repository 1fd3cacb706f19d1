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
    """Return the hidden matrices of a model.

    Args:
        model: all its modules are searched.
        adamw_for: names of modules to leave out, besides embeddings and the output head.
    """
    # Embeddings and output heads are not hidden.
    outside = set[Tensor]()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outside.update(module.parameters())
        head = getattr(module, "get_output_embeddings", lambda: None)()  # of transformers
        if isinstance(head, nn.Module):
            outside.update(head.parameters())

    # Convolutions are matrices, too: (out channels, the rest).
    hidden = set[Tensor]()
    for name, parameter in model.named_parameters():
        left_out = parameter in outside or set(adamw_for) & set(name.split("."))
        if parameter.ndim >= 2 and not left_out:
            hidden.add(parameter)
    return hidden


def orthogonalized(
    matrix: Tensor, *, iterations: int = 5, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Approximate the nearest orthogonal matrix by Newton-Schulz iterations.

    Args:
        matrix: (rows, columns).
        iterations: number of iterations.
        dtype: of the iterations; float32 means float32 or better.

    Returns:
        the orthogonal matrix, (rows, columns), in the dtype of ``matrix``.
    """
    if dtype is torch.float32:
        dtype = torch.promote_types(dtype, matrix.dtype)
    x: Tensor = matrix.to(dtype)
    tall = x.shape[0] > x.shape[1]
    if tall:  # the smaller of both Gram matrices
        x = x.mT

    # The iterations need a spectral norm of at most 1, which the Frobenius norm bounds.
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    a, b, c = _QUINTIC
    # Each iteration applies the quintic a x + b x^3 + c x^5 to all singular values.
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if tall:
        x = x.mT
    return x.to(matrix.dtype)


class Muon(Optimizer):
    """Muon for parameter groups with ``muon=True`` (matrices), fused AdamW for the other groups.

    Under FSDP2 each matrix is gathered once per step, orthogonalized on every rank, and sharded
    again. If ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes
    nothing.

    Args:
        params: parameter groups; a group without ``muon`` is of matrices.
        lr: learning rate.
        momentum: momentum of Muon.
        nesterov: use Nesterov momentum in Muon.
        iterations: number of Newton-Schulz iterations.
        dtype: of these iterations.
        betas: decay rates of AdamW's moments.
        eps: added to the root of AdamW's second moment.
        weight_decay: factor of ``lr``.

    Raises:
        ValueError: a value is out of range.
    """

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
        in_range = all(0 <= value < 1 for value in (momentum, *betas))
        if not in_range or not eps >= 0 or iterations < 1:
            raise ValueError(
                "muon needs momentum and betas in [0, 1), eps >= 0 and iterations >= 1; got "
                f"momentum {momentum}, betas {betas}, eps {eps}, iterations {iterations}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "iterations": iterations,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "muon": True,
        }
        super().__init__(params, defaults)  # fills in missing settings of groups
        self.dtype = dtype
        self.found_inf: Tensor | None = None

        # Make the whole state now, so that a checkpoint can be loaded before the first step.
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["muon"]:
                    self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
                else:
                    self.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient once."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"]:
                for parameter in params:
                    self._update(parameter, group)
            elif params:
                self._update_by_adamw(params, group)

    def _update_by_adamw(self, params: list[Any], group: dict[str, Any]) -> None:
        # Collect this rank's shards.
        states = [self.state[parameter] for parameter in params]
        mine = [local(parameter) for parameter in params]
        gradients = [local(parameter.grad) for parameter in params]
        first = [local(state["exp_avg"]) for state in states]
        second = [local(state["exp_avg_sq"]) for state in states]
        steps = [state["step"] for state in states]

        # Update them, as oneloop.optim.adamw does.
        if self.elementwise:
            adamw_(
                mine,
                gradients,
                first,
                second,
                steps,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                found_inf=self.found_inf,
            )
            return
        adamw(
            mine,
            gradients,
            first,
            second,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            found_inf=self.found_inf,
            grad_scale=None,
            fused=True,
            amsgrad=False,
            maximize=False,
        )

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        weights = local(parameter)
        momentum = local(self.state[parameter]["momentum"])
        assert parameter.grad is not None
        gradient = local(parameter.grad)

        # After a bad step keep the weights and the momentum, without a host sync.
        keep: float | Tensor = 1.0
        if self.found_inf is not None:  # 0 or 1
            keep = (1.0 - self.found_inf).to(weights.dtype)
            gradient = torch.where(self.found_inf > 0, torch.zeros_like(gradient), gradient)

        # Update the momentum, and orthogonalize it.
        momentum.lerp_(
            gradient, (1.0 - group["momentum"]) * torch.as_tensor(keep, dtype=weights.dtype)
        )
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = self._orthogonalized(update, parameter, group["iterations"])

        # Update the weights, with updates of the size of AdamW's.
        rows = parameter.shape[0]
        columns = parameter.numel() // rows
        size = 0.2 * max(rows, columns) ** 0.5
        weights.mul_(1.0 - group["lr"] * group["weight_decay"] * keep)
        weights.sub_(update * (group["lr"] * size * keep))

    def _orthogonalized(self, update: Tensor, parameter: Tensor, iterations: int) -> Tensor:
        """Orthogonalize the whole matrix; return this rank's shard, in the shape of ``update``."""
        # Gather the rows of the other ranks.
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            cut = parameter.placements
            sharded = DTensor.from_local(
                update, mesh, cut, shape=parameter.shape, stride=parameter.stride()
            )
            update = sharded.full_tensor()  # one all-gather

        # Every rank does the same work: equal bits, and no second exchange.
        matrix = update.flatten(1)
        whole = orthogonalized(matrix, iterations=iterations, dtype=self.dtype).view_as(update)
        if isinstance(parameter, DTensor):
            replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            whole = replicated.redistribute(mesh, cut).to_local()
        return whole
