"""What a GPU would run, on fake CUDA tensors: nothing waits, and attention is the expected one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from fake_cuda import CUDA, fake_cuda, fake_run, on_cuda


def test_the_recorder_sees_reads_copies_float64_and_attention():
    with fake_cuda() as seen:
        values = torch.ones(1, 2, 8, 16, device=CUDA)
        cuts = torch.zeros(3, dtype=torch.int32, device=CUDA)
        assert not seen.copies

        assert float(values.sum()) == 0.0
        assert not bool((values > 0).any())
        assert [text.split(":")[0] for text in seen.reads] == [
            "aten._local_scalar_dense.default"
        ] * 2
        with pytest.raises(Exception, match="nonzero"):
            values[values > 0]
        assert len(seen.reads) == 3

        values.cpu()
        torch.tensor(1.0, device=CUDA)
        values[torch.tensor([0])]
        assert len(seen.copies) == 3
        values * 2.0 + torch.tensor(1.0)
        assert len(seen.copies) == 3

        assert not seen.doubles
        values.double().view(-1)
        assert len(seen.doubles) == 1

        F.scaled_dot_product_attention(values, values, values, is_causal=True)
        F.scaled_dot_product_attention(values, values, values, values.new_ones(8, 8))
        rows = values[0].transpose(0, 1).bfloat16()
        varlen_attn(rows, rows, rows, cuts, cuts, 4, 4)
        assert [(one.name, one.mask, one.causal) for one in seen.attention] == [
            ("scaled_dot_product_attention", None, True),
            ("scaled_dot_product_attention", (8, 8), False),
            ("torch_attn::_varlen_attn", None, True),
        ]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_precision_of_a_run_on_fake_cuda_is_that_of_accelerate(precision, dtype):
    with fake_cuda() as seen, fake_run(precision) as run:
        model = run.prepare(on_cuda(nn.Linear(4, 4)))
        run.accelerator.backward(model(torch.ones(2, 4, device=CUDA)).sum())
        assert run.device == CUDA
        assert (run.accelerator.scaler is not None) == (precision == "fp16")
        assert model.weight.grad.dtype == torch.float32 and model.weight.grad.is_cuda
    products = [one for one in seen.operators if one.name == "aten.addmm.default"]
    assert [one.dtypes[0] for one in products] == [dtype]
    assert not seen.reads and not seen.copies
