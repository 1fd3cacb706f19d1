"""Micro-batches of a step: loaded ahead, keyed in their randomness, alone in anyone's script."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from oneloop.data.groups import Split, Weighed, groups, workers_here
from oneloop.data.order import Order

CPU = torch.device("cpu")


class Noisy(Dataset):
    """Augments with all three generators."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()])


def collate(samples):
    return {"x": torch.stack(samples)}


def weight(batch):
    return batch["x"][:, 0].sum()


def taken(count: int, *, workers: int = 0, rank: int = 0, ranks: int = 1, micro: int | None = None, start: int = 0):
    stream = groups(
        Noisy(),
        Weighed(collate, weight),
        Order(23, seed=5),
        Split(8, ranks, micro),
        rank=rank,
        seed=5,
        start=start,
        device=CPU,
        workers=workers,
    )
    return [
        (group.weight, torch.cat([batch["x"] for batch in group.batches])) for group, _ in zip(stream, range(count))
    ]


def test_a_split_says_its_arithmetic():
    assert str(Split(256, 2, 32)) == "batch 256 = 2 ranks x 4 micro-batches x 32"
    with pytest.raises(ValueError, match="batch.size 100 cannot be split over 8 ranks x micro 16; nearest size: 128"):
        Split(100, 8, 16)


def test_augmentation_depends_on_the_sample_and_epoch_alone():
    alone = torch.cat([x for _, x in taken(7)])
    with_workers = torch.cat([x for _, x in taken(7, workers=2)])
    in_micro = torch.cat([x for _, x in taken(7, micro=2)])
    split = [torch.stack([x for _, x in taken(7, rank=rank, ranks=2)]) for rank in range(2)]
    assert torch.equal(alone, with_workers)
    assert torch.equal(alone, in_micro)
    assert torch.equal(alone, torch.cat(split, dim=1).flatten(0, 1))
    again = torch.cat([x for _, x in taken(4, start=3 * 8)])  # from the middle
    assert torch.equal(alone[24:], again)
    assert not torch.equal(alone[:23].sort(0).values, alone[23:46].sort(0).values)  # another epoch, other noise


def test_the_weight_is_known_before_the_first_micro_batch():
    for known, x in taken(5, micro=2):
        assert known == pytest.approx(float(x[:, 0].sum()))


def test_what_loading_leaves_in_the_generators_is_a_function_of_the_samples():
    class Still(Noisy):
        def __getitem__(self, index):
            return torch.tensor([float(index)])

    left = []
    for before in (1, 2):
        torch.manual_seed(before), random.seed(before), np.random.seed(before)
        stream = groups(
            Still(),
            Weighed(collate, weight, sample_weight=1.0),
            Order(23, seed=5),
            Split(8, 1),
            rank=0,
            seed=5,
            start=0,
            device=CPU,
        )
        group = next(stream)
        assert [batch["index"].shape for batch in group.batches] == [(8,)]
        left.append((torch.rand(3).tolist(), random.random(), np.random.rand()))
    assert left[0] == left[1]


def test_workers_by_machine():
    assert workers_here("auto", device=CPU, local_ranks=1) == 0
    assert workers_here(3, device=CPU, local_ranks=1) == 3
    assert workers_here("auto", device=torch.device("cuda"), local_ranks=1) >= 1
