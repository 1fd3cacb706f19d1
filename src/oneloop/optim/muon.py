"""Muon for matrices and AdamW for the rest, equal under every parallel layout, without host syncs.

Jordan 2024 (kellerjordan.github.io/posts/muon); the update's size follows Liu et al. 2025 (Muon is
Scalable for LLM Training): 0.2 sqrt(max(rows, columns)), so that one learning rate fits both.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from oneloop.basics.tensors import local
from oneloop.optim.elementwise import adamw_, ignores_flag
from oneloop.optim.matrix_rounds import Holders, rounds

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
    x: Tensor = matrix.to(_iterated(dtype, matrix.dtype))
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


def _iterated(asked: torch.dtype, own: torch.dtype) -> torch.dtype:
    """Return the dtype of the iterations: ``asked``, where float32 means float32 or better."""
    return torch.promote_types(asked, own) if asked is torch.float32 else asked


class Muon(Optimizer):
    """Muon for parameter groups with ``muon=True`` (matrices), fused AdamW for the other groups.

    Each matrix is orthogonalized by one of the ranks that hold it, which sends the result to the
    others. Under FSDP2 these are the ranks of the parameter's mesh, else those of ``replicas``. If
    ``found_inf``, a 0-dim tensor set before :meth:`step`, is 1, the step changes nothing.

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
        replicas: process group whose ranks hold the same parameters and gradients (DDP's); None:
            this rank orthogonalizes all matrices that are no DTensor.

    Raises:
        ValueError: a value is out of range, or a matrix is sharded, but not by rows.
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
        replicas: dist.ProcessGroup | None = None,
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
        self.elementwise = ignores_flag(self.param_groups)
        self._replicas = replicas

        # Make the whole state now, so that a checkpoint can be loaded before the first step.
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["muon"]:
                    Holders(parameter)  # raises if it cannot be exchanged
                    self.state[parameter] = {"momentum": torch.zeros_like(parameter)}
                else:
                    self.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient once. Collective among their ranks."""
        matrices = []
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["muon"]:
                matrices += [_Matrix(parameter, group) for parameter in params]
            elif params:
                self._update_by_adamw(params, group)
        for holders, blocks in self._rounds(matrices):
            self._update_by_muon(holders, blocks)

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
            adamw_(mine, gradients, first, second, steps, group, self.found_inf)
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

    def largest_share(self) -> int:
        """Return how many matrices one rank orthogonalizes in a step, at most."""
        matrices = []
        for group in self.param_groups:
            if group["muon"]:
                matrices += [_Matrix(parameter, group) for parameter in group["params"]]
        return len(list(self._rounds(matrices)))

    def _rounds(self, matrices: list["_Matrix"]) -> Iterator[tuple[Holders, "_Blocks"]]:
        """Yield the rounds of a step: the holders of the matrices, and their blocks."""
        # Only matrices of one dtype that the same ranks hold can share an exchange.
        alike: dict[Any, list[_Matrix]] = {}
        for matrix in matrices:
            parameter: Any = matrix.parameter
            key = [parameter.dtype]
            if isinstance(parameter, DTensor):
                key += [parameter.device_mesh, parameter.placements]
            alike.setdefault(tuple(key), []).append(matrix)
        for several in alike.values():
            holders = Holders(several[0].parameter, self._replicas)
            costs = tuple(matrix.cost for matrix in several)
            for indices in rounds(costs, holders.replicas * holders.shards):
                blocks: _Blocks = {}
                for rank, index in enumerate(indices):
                    if index is not None:
                        replica, shard = divmod(rank, holders.shards)
                        blocks.setdefault(replica, {})[shard] = several[index]
                yield holders, blocks

    def _update_by_muon(self, holders: Holders, blocks: "_Blocks") -> None:
        """Update the matrices of one round. Collective among their holders."""
        # Every replica keeps the momentum of all matrices, and orthogonalizes its own block.
        for replica, block in blocks.items():
            updates = [self._moved(matrix) for matrix in block.values()]
            if replica == holders.replica:
                mine = self._orthogonalized(holders, block, updates)

        # Share the results, and update the weights.
        for replica, block in blocks.items():
            weights = [local(matrix.parameter) for matrix in block.values()]
            lengths = [one.numel() for one in weights]
            if replica == holders.replica:
                results = mine
            else:
                kind = self._sent_dtype(weights[0])
                results = torch.empty(sum(lengths), dtype=kind, device=weights[0].device)
            holders.share(results, replica)
            for matrix, result in zip(block.values(), results.split(lengths), strict=True):
                self._apply(matrix, result)

    def _moved(self, matrix: "_Matrix") -> Tensor:
        """Update the momentum; return this rank's shard of what is to be orthogonalized."""
        momentum = local(self.state[matrix.parameter]["momentum"])
        assert matrix.parameter.grad is not None
        gradient = local(matrix.parameter.grad)
        if self.found_inf is not None:
            gradient = torch.where(self.found_inf > 0, torch.zeros_like(gradient), gradient)
        keep = torch.as_tensor(self._kept(momentum), dtype=momentum.dtype)
        share = matrix.group["momentum"]
        momentum.lerp_(gradient, (1.0 - share) * keep)
        return gradient.lerp(momentum, share) if matrix.group["nesterov"] else momentum

    def _kept(self, weights: Tensor) -> float | Tensor:
        """Return 0 after a bad step, which keeps weights and momentum; else 1. No host sync."""
        if self.found_inf is None:
            return 1.0
        return (1.0 - self.found_inf).to(weights.dtype)

    def _sent_dtype(self, weights: Tensor) -> torch.dtype:
        """Return the smaller dtype of weights and iterations: it holds every bit of a result."""
        iterations = _iterated(self.dtype, weights.dtype)
        return min(iterations, weights.dtype, key=lambda dtype: dtype.itemsize)

    def _orthogonalized(
        self, holders: Holders, block: dict[int, "_Matrix"], updates: list[Tensor]
    ) -> Tensor:
        """Return this rank's shards of the orthogonal matrices of its block, flat.

        Each rank orthogonalizes one of them as a whole.
        """
        # Gather the rows of this rank's matrix.
        own = block.get(holders.shard)
        sent = [0] * holders.shards
        for shard, update in zip(block, updates, strict=True):
            sent[shard] = update.numel()
        received = [0] * holders.shards
        if own is not None:
            received = holders.shard_lengths(own.parameter.shape)
        whole = updates[0]
        if holders.shards > 1:
            flat = torch.cat([update.flatten() for update in updates])
            whole = holders.exchanged(flat, sent, received)

        # Orthogonalize it, and send each rank its rows.
        if own is not None:
            matrix = whole.view(own.parameter.shape).flatten(1)
            whole = orthogonalized(matrix, iterations=own.group["iterations"], dtype=self.dtype)
        result = whole.flatten().to(self._sent_dtype(whole))
        if holders.shards > 1:
            result = holders.exchanged(result, received, sent)
        return result

    def _apply(self, matrix: "_Matrix", orthogonal: Tensor) -> None:
        # Updates have the size of AdamW's.
        weights = local(matrix.parameter)
        keep = self._kept(weights)
        lr = matrix.group["lr"]
        size = 0.2 * max(matrix.rows, matrix.columns) ** 0.5
        update = orthogonal.to(weights.dtype).view_as(weights)
        weights.mul_(1.0 - lr * matrix.group["weight_decay"] * keep)
        weights.sub_(update * (lr * size * keep))


class _Matrix(NamedTuple):
    """A matrix and its parameter group."""

    parameter: Tensor
    group: dict[str, Any]

    @property
    def rows(self) -> int:
        return self.parameter.shape[0]

    @property
    def columns(self) -> int:
        return self.parameter.numel() // self.rows

    @property
    def cost(self) -> int:
        """Number of multiplications of Newton-Schulz iterations."""
        least = min(self.rows, self.columns)
        most = max(self.rows, self.columns)
        products = least * least * (2 * most + least)
        return int(self.group["iterations"]) * products


_Blocks = dict[int, dict[int, _Matrix]]  # matrices of a round by replica and shard
