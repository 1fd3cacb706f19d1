"""Muon: its Newton-Schulz iterations, and the ranks that share them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from oneloop.optim.muon import Muon, orthogonalized
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.loop.start_lines",
    "oneloop.optim.holders",
    "oneloop.optim.muon",
    "oneloop.optim.optimizers",
)

BAD = 2
"""number of the step whose gradients are NaN"""


def test_newton_schulz_makes_singular_values_about_one():
    torch.manual_seed(0)
    for shape in ((8, 20), (20, 8)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
        assert values.min() > 0.6 and values.max() < 1.3
    half = orthogonalized(torch.randn(6, 9, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6, 4), (3, 8), (5, 2, 2)])
def test_a_step_is_the_formula_in_the_dtype_of_the_weights(dtype, shape):
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(shape, dtype=dtype))
    expected = weights.detach().clone()
    momentum = torch.zeros_like(expected)
    optimizer = Muon([{"params": [weights]}], lr=0.1, weight_decay=0.2)
    size = 0.2 * max(shape[0], expected.numel() // shape[0]) ** 0.5
    for _ in range(3):
        gradient = torch.randn(shape, dtype=dtype)
        weights.grad = gradient.clone()
        optimizer.step()

        momentum = momentum.lerp(gradient, torch.tensor(1.0 - 0.95, dtype=dtype))
        update = gradient.lerp(momentum, 0.95).flatten(1)
        expected = expected * (1.0 - 0.1 * 0.2)
        expected -= orthogonalized(update).view(shape) * (0.1 * size)
        assert torch.equal(weights.detach(), expected)


class Net(nn.Module):
    """Matrices of several shapes: wide, tall, with fewer rows than ranks, a convolution, two of
    another dtype, one that is frozen, and one without a gradient."""

    def __init__(self, single: bool) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40, bias=False)
        if single:
            return
        self.second = nn.Linear(40, 23)
        self.third = nn.Linear(23, 23)
        self.few_rows = nn.Linear(23, 1)
        self.convolution = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.double = nn.Linear(9, 17, dtype=torch.float64)
        self.other_double = nn.Linear(17, 9, dtype=torch.float64)
        self.frozen = nn.Linear(5, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 5)


class Updated(NamedTuple):
    tensors: dict[str, torch.Tensor]  # weights and state
    operations: int  # of matrix products

    def is_matrix(self, name: str) -> bool:
        """Return whether Muon updates a parameter."""
        return f"{name.split()[0]} momentum" in self.tensors


def updated(
    strategy: str,
    *,
    single: bool = False,
    precision: str = "exact",
    elementwise: bool = False,
    scaled: bool = False,
) -> Updated:
    """Make four steps, with equal gradients on all ranks.

    Args:
        strategy: ddp, fsdp2 or hsdp; alone: each process has its own model.
        single: the model has one matrix.
        precision: of the iterations.
        elementwise: as with batch.grain.
        scaled: torch's GradScaler finds the bad step, as in fp16.
    """
    from oneloop.optim.optimizers import build, muon

    torch.manual_seed(0)
    model = Net(single)
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy != "alone":
        model = _sharded(model, hybrid=strategy == "hsdp")
    optimizer = build(
        muon,
        model,
        lr=0.1,
        weight_decay=0.1,
        options={"precision": precision, "adamw_for": ()},
        elementwise=elementwise,
    )

    scaler = None
    if scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.ones(()))
    with FlopCounterMode(display=False) as counter:
        for step in range(4):
            _set_gradients(model, step)
            if scaler is None:
                optimizer.found_inf = torch.tensor(float(step == BAD))
                optimizer.step()
            else:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in (("weights", parameter), *optimizer.state.get(parameter, {}).items()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            tensors[f"{name.removeprefix('module.')} {key}"] = whole.detach().contiguous()
    return Updated(tensors, counter.get_total_flops())


def _sharded(model: nn.Module, *, hybrid: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if hybrid else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for child in model.children():  # FSDP2 needs one dtype in each unit
        fully_shard(child.to(memory_format=torch.contiguous_format), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _set_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, dtype=parameter.dtype)
        if step == BAD:
            gradient.fill_(torch.nan)
        if parameter.ndim == 4 and not isinstance(parameter, DTensor):
            gradient = gradient.contiguous(memory_format=torch.channels_last)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        if parameter.requires_grad and "unused" not in name:
            parameter.grad = gradient


HOW = ({}, {"precision": "bf16"}, {"single": True}, {"elementwise": True}, {"scaled": True})


def compared(strategy: str) -> list[tuple[list[str], int, int]]:
    """Make the updates of all ranks, and on rank 0 those of one process.

    Return the names of different tensors; the operations of this rank and of one process."""
    dist.init_process_group("gloo")
    found = []
    for how in HOW:
        own = updated(strategy, **how)
        both = [updated("alone", **how) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(both)
        alone = both[0]
        different = []
        for name, tensor in alone.tensors.items():
            # AdamW's fused kernel rounds by its place in a vector, which sharding changes.
            exact = strategy == "ddp" or "elementwise" in how or alone.is_matrix(name)
            if exact and not torch.equal(tensor, own.tensors[name]):
                different.append(name)
        assert own.tensors.keys() == alone.tensors.keys()
        found.append((different, own.operations, alone.operations))
    return found


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "fsdp2"),
        *(
            pytest.param(*layout, marks=pytest.mark.slow)
            for layout in (
                (2, "ddp"),
                (3, "ddp"),
                (3, "fsdp2"),
                (9, "ddp"),  # more than matrices
                (9, "fsdp2"),
                (4, "hsdp"),
            )
        ),
    ],
)
def test_ranks_share_the_work_and_get_the_bits_of_one(ranks, strategy):
    by_how = zip(*run(compared, strategy, ranks=ranks, config="ddp").ok(), strict=True)
    for how, by_rank in zip(HOW, by_how, strict=True):
        alone = by_rank[0][2]
        work = [own for _, own, _ in by_rank]
        assert [different for different, *_ in by_rank] == [[]] * ranks
        replicas = 2 if strategy == "hsdp" else 1
        assert sum(work) == replicas * alone  # each replica orthogonalizes each matrix once
        if "single" in how:
            assert max(work) == alone
        else:
            assert max(work) <= max(1.3 * replicas / ranks, 0.4) * alone


@pytest.mark.slow
def test_the_start_says_what_muon_updates(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = ["r.yaml", "--optimizer", "muon", "--batch.size", "8", "--duration", "2"]
    words += ["--optimizer.adamw_for", "[]", "--run.dir", "a", "--track", "none"]
    line = "muon updates 2 matrices, adamw the rest"
    assert line in run(train, words, ranks=2, folder=tmp_path).output


def test_a_sharding_that_is_not_by_rows_is_rejected():
    (text,) = run(by_columns, config="ddp").ok()
    assert "is not supported by muon; expected dim 0" in text


def by_columns() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from oneloop.optim.muon import Muon

    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    mesh = init_device_mesh("cpu", (1,))
    matrix = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    matrix.grad = torch.ones_like(matrix)
    with pytest.raises(ValueError) as error:
        Muon([matrix], lr=0.1)
    return str(error.value)
