"""Tensors of any dtype are sent between ranks without a changed bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worlds import run

pytestmark = pytest.mark.covers("oneloop.basics.tensors")

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
    "complex128",
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
]


def bits(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of random bits, among them NaN with payloads."""
    generator = torch.Generator().manual_seed(rank)
    most = 2 if dtype is torch.bool else 256
    size = torch.empty(0, dtype=dtype).element_size()
    flat = torch.randint(0, most, (3 * 2 * size,), generator=generator, dtype=torch.uint8)
    return flat.view(dtype).view(3, 2)


def sent() -> None:
    from oneloop.basics.tensors import as_bytes, gathered
    from oneloop.launch.processes import start

    rank = start().accelerator.process_index
    for name in DTYPES:
        dtype = getattr(torch, name)
        found = gathered(bits(rank, dtype))
        expected = torch.cat([bits(one, dtype) for one in range(2)])
        assert found.dtype == dtype and found.shape == (6, 2)
        assert torch.equal(as_bytes(found), as_bytes(expected)), name
        assert gathered(bits(rank, dtype)[:, :0]).shape == (6, 0)
        assert torch.equal(as_bytes(gathered(bits(rank, dtype).T)[:2]), as_bytes(bits(0, dtype).T))
    turned = torch.tensor([1 + 2j]).conj()
    assert gathered(turned).tolist() == [1 - 2j, 1 - 2j]


def test_any_dtype_is_gathered():
    run(sent, ranks=2).ok()


class Buffers(nn.Module):
    """Buffers of dtypes that gloo and NCCL cannot broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("short", torch.randint(0, 99, (5,), dtype=torch.int16))
        self.register_buffer("eighth", torch.rand(3).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("unsigned", torch.ones(3, dtype=torch.uint16))

    def forward(self, x):
        return self.norm(x) * self.short.float().mean() * self.eighth.float().mean()


def wrapped() -> list[float]:
    from oneloop.launch.processes import start

    world = start()
    torch.manual_seed(world.accelerator.process_index)
    model = world.prepare(Buffers())
    for _ in range(2):
        model(torch.ones(4, 2)).sum().backward()
    return [float(buffer.double().sum()) for buffer in model.buffers()]


@pytest.mark.parametrize("config", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_model_with_buffers_of_any_dtype_is_prepared(config):
    one, two = run(wrapped, ranks=2, config=config).ok()
    assert one == two or config == "fsdp2"
