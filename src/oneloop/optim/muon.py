"""Muon for matrices and AdamW for the rest, equal under every parallel layout, without host syncs.

Jordan 2024 (kellerjordan.github.io/posts/muon); the update's size follows Liu et al. 2025 (Muon is
Scalable for LLM Training): 0.2 sqrt(max(rows, columns)), so that one learning rate fits both.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oneloop.basics.tensors import local
from oneloop.optim.adamw import AdamWStep
from oneloop.optim.holders import Holders

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


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


def orthogonalized(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix by five Newton-Schulz iterations, in its dtype."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mT if tall else matrix  # the smaller of both Gram matrices

    # The iterations need a spectral norm of at most 1, which the Frobenius norm bounds.
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    a, b, c = _QUINTIC
    # Each iteration applies the quintic a x + b x^3 + c x^5 to all singular values.
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(AdamWStep):
    """Muon for parameter groups with ``muon=True`` (matrices), fused AdamW for the other groups.

    Each matrix is orthogonalized by one of the ranks that hold it, which sends the result to the
    others. Under FSDP2 these are the ranks of the parameter's mesh. If ``found_inf``, a 0-dim
    tensor set before :meth:`step`, is 1, the step changes nothing.

    Args:
        params: parameter groups; a group without ``muon`` is of matrices.
        model: as prepared, to find embeddings, output heads, and DDP's ranks, which share the work;
            None: all parameters are matrices.
        lr: learning rate.
        momentum: momentum of Muon.
        nesterov: use Nesterov momentum in Muon.
        precision: exact iterates in float32 or better; bf16 is faster on GPUs, but then another
            parallel layout differs by about 5e-3 after 20 steps.
        betas: decay rates of AdamW's moments.
        eps: added to the root of AdamW's second moment.
        adamw_for: names of modules whose matrices also get AdamW (a component of the dotted name).
        weight_decay: factor of ``lr``.

    Raises:
        ValueError: momentum or betas are out of range, or a matrix is sharded, but not by rows.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        model: nn.Module | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        precision: Literal["exact", "bf16"] = "exact",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw_for: tuple[str, ...] = ("lm_head", "head", "classifier", "score", "fc"),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= decay < 1.0 for decay in (momentum, *betas)):
            raise ValueError(
                f"momentum and betas of Muon must be from 0 to below 1, got {momentum} and {betas}"
            )
        self.precision = precision
        self._replicas: dist.ProcessGroup | None = None
        if isinstance(model, DistributedDataParallel):
            self._replicas = model.process_group
        if model is not None:
            # Divide each group into matrices, and the rest for AdamW.
            matrices = hidden_matrices(model, adamw_for)
            divided = []
            for group in params:
                for muon in (True, False):
                    members = [one for one in group["params"] if (one in matrices) is muon]
                    divided.append({**group, "params": members, "muon": muon})
            params = [group for group in divided if group["params"]]
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "muon": True,
        }
        super().__init__(params, defaults)  # fills in missing settings of groups

    def initial_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zeros: the momentum, or AdamW's state."""
        if not group["muon"]:
            return super().initial_state(parameter, group)
        Holders(parameter)  # raises if it cannot be exchanged
        return {"momentum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def update(self) -> None:
        """Update all parameters that have a gradient once. Collective among their ranks."""
        matrices = {}
        for group in self.param_groups:
            if group["muon"]:
                trained = [matrix for matrix in group["params"] if matrix.grad is not None]
                matrices.update(dict.fromkeys(trained, group))
            else:
                self.step_group(group)

        # Only matrices of one dtype that the same ranks hold can share an exchange.
        alike: dict[Any, list[Tensor]] = {}
        for matrix in matrices:
            mesh = getattr(matrix, "device_mesh", None)
            placements = getattr(matrix, "placements", None)
            alike.setdefault((matrix.dtype, mesh, placements), []).append(matrix)

        # In each round, every rank works on at most one whole matrix. Those of a round have similar
        # sizes, because each round lasts as long as its largest matrix.
        for several in alike.values():
            holders = Holders(several[0], self._replicas)
            several.sort(key=Tensor.numel, reverse=True)
            for start in range(0, len(several), holders.ranks):
                self._update(holders, several[start : start + holders.ranks], matrices)

    def _update(
        self, holders: Holders, by_rank: list[Tensor], groups: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Update the matrices of one round, one of each rank. Collective among their holders.

        ``groups``: the parameter group of each matrix."""
        # Every rank keeps the momentum of its shards of all matrices.
        updates = [self._moved(matrix, groups[matrix]) for matrix in by_rank]

        # Orthogonalize this rank's matrix, and share the result.
        whole = holders.gathered(by_rank, updates)
        exact = torch.promote_types(whole.dtype, torch.float32)
        whole = whole.to(torch.bfloat16 if self.precision == "bf16" else exact)
        if holders.rank < len(by_rank):
            rows = by_rank[holders.rank].shape[0]
            whole = orthogonalized(whole.view(rows, -1)).flatten()
        results = holders.scattered(by_rank, whole)

        # Update the weights. Updates have the size of AdamW's.
        for matrix, result in zip(by_rank, results, strict=True):
            shard = local(matrix)
            keep = self._kept(shard)
            lr = groups[matrix]["lr"]
            size = 0.2 * max(matrix.shape[0], matrix.numel() // matrix.shape[0]) ** 0.5
            update = result.to(shard.dtype).view_as(shard)
            shard.mul_(1.0 - lr * groups[matrix]["weight_decay"] * keep)
            shard.sub_(update * (lr * size * keep))

    def _moved(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum; return this rank's shard of what is to be orthogonalized."""
        momentum = local(self.state_of(matrix, group)["momentum"])
        gradient = local(matrix.grad)  # type: ignore[arg-type]
        if self.found_inf is not None:
            gradient = torch.where(self.found_inf > 0, torch.zeros_like(gradient), gradient)
        keep = torch.as_tensor(self._kept(momentum), dtype=momentum.dtype)
        share = group["momentum"]
        momentum.lerp_(gradient, (1.0 - share) * keep)
        return gradient.lerp(momentum, share) if group["nesterov"] else momentum

    def _kept(self, weights: Tensor) -> float | Tensor:
        """Return 0 after a bad step, which keeps weights and momentum; else 1. No host sync."""
        if self.found_inf is None:
            return 1.0
        return (1.0 - self.found_inf).to(weights.dtype)
