"""Packed documents do not see each other: the loss of each token equals the padded one, for every
supported model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from oneloop.tasks.language import attention
from oneloop.tasks.language.generation import written
from oneloop.tasks.language.language_model import LanguageModel, ModelSettings
from oneloop.tasks.language.sequences import Sample, collated, cut_texts
from oneloop.tasks.rows.cached_arrays import Ragged
from small_models import logged_by_transformers

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.attention",
    "oneloop.tasks.language.generation",
    "oneloop.tasks.language.language_model",
    "oneloop.tasks.language.sequences",
    "oneloop.tasks.rows.cached_arrays",
)

SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {
    "vocab_size": 90,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
}
GPT2 |= {"eos_token_id": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "llama": ("LlamaConfig", SIZES),
    "a window of five": ("MistralConfig", {**SIZES, "sliding_window": 5}),
    "windows in some layers": (
        "Gemma3TextConfig",
        {**SIZES, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "experts": (
        "Qwen3MoeConfig",
        {
            **SIZES,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "router_aux_loss_coef": 0.0,
        },
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a state space": (
        "MambaConfig",
        {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2},
        "carry a state",
    ),
    "convolutions": (
        "Lfm2Config",
        {**SIZES, "full_attn_idxs": [1]},
        "carry state from one document to the next",
    ),
    "positions of a mask": (
        "OPTConfig",
        {
            "vocab_size": 90,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
        },
        "does not take such masks",
    ),
    "attention of its own": (
        "BloomConfig",
        {"vocab_size": 90, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "does not use transformers' attention interface",
    ),
    "sinks": (
        "GptOssConfig",
        {**SIZES, "num_local_experts": 2, "router_aux_loss_coef": 0.0},
        "does not use transformers' attention interface",
    ),
    "capped": (
        "Gemma2Config",
        SIZES,
        "does not use transformers' attention interface|caps its logits",
    ),
}


class Documents(LanguageModel):
    """A language task with a model and documents of random tokens."""

    def __init__(self, name: str, *, packed: bool, fused: bool = False) -> None:
        super().__init__(ModelSettings(fused_loss=fused, length=48), packed=packed)
        self.config = getattr(transformers, MODELS[name][0])(**MODELS[name][1])
        draw = np.random.default_rng(0)
        lengths = draw.integers(2, 30, 40)
        tokens = draw.integers(3, 90, lengths.sum()).astype(np.int32)
        hidden = draw.random(len(tokens)) < 0.3
        texts = Ragged(np.where(hidden, ~tokens, tokens), np.cumsum(lengths))
        self.documents = cut_texts(texts, 48, "drop", room=48 if packed else 0)

    @property
    def entries(self) -> int:
        return 90

    def bare_model(self) -> nn.Module:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(self.config)

    def each(self, model: nn.Module) -> tuple[dict[int, Tensor], Tensor]:
        """Return the losses of every document's tokens, and their sum."""
        rows = self.documents
        members = [[*map(int, rows.groups(row))] for row in range(len(rows))]
        batch = collated([rows[row] for row in range(len(rows))], width=48, most=rows.most)
        total, outputs = self.loss(model, batch)
        found = {}
        for row, documents in enumerate(members):
            at = 0
            for document in documents:
                size = int(self.documents.sizes[document]) - 1
                found[document] = outputs["loss"][row, at : at + size]
                at += size
        return found, total


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_is_padded(name, dtype, fused):
    if dtype is torch.float64 and name != "gpt2":
        pytest.skip("its norms and experts compute in float32 always")
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    losses, gradients = [], []
    for packed in (True, False):
        task = Documents(name, packed=packed, fused=fused)
        model = task.model().to(dtype)
        each, total = task.each(model)
        total.backward()
        losses.append(each)
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    assert losses[0].keys() == losses[1].keys() == set(range(len(task.documents.starts)))
    for document, loss in losses[0].items():
        assert (loss != 0).any()
        assert (loss - losses[1][document]).abs().max() <= tolerance * loss.abs().max()
    assert (gradients[0] - gradients[1]).abs().max() <= tolerance * gradients[1].abs().max()


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name != "experts"]
)  # its products have other shapes
def test_a_changed_document_changes_no_other_by_a_bit(name):
    task = Documents(name, packed=True)
    model = task.model()
    before, _ = task.each(model)
    for changed in (0, 7, len(task.documents.starts) - 1):
        other = Documents(name, packed=True)
        here = slice(other.documents.starts[changed], other.documents.stops[changed])
        tokens = other.documents.tokens[here]
        other.documents.tokens[here] = np.where(
            tokens < 0, ~((~tokens + 11) % 90), (tokens + 11) % 90
        )
        after, _ = other.each(model)
        assert not torch.equal(before[changed], after[changed])
        assert all(torch.equal(before[one], after[one]) for one in before if one != changed)


@pytest.mark.parametrize("name", MODELS)
def test_documents_leak_where_attention_does_not_end(name, monkeypatch):
    """Without document boundaries the loss differs, so the tests above can fail."""
    monkeypatch.setattr(attention, "_visible", lambda documents: attention.causal(documents.device))
    with pytest.raises(
        ValueError,
        match=r"task.pack packed: .*(from one document to the next|depend on the document before)",
    ):
        Documents(name, packed=True).model()


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_would_leak_are_rejected(name):
    kind, sizes, expected_text = REFUSED[name]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=expected_text):
        attention.attend_within_documents(model, packed=True)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", MODELS)
def test_where_documents_begin_states_as_much_as_their_numbers(name):
    """The document starts that CUDA kernels get produce the same mask as document numbers."""
    task = Documents(name, packed=True)
    model = task.model()
    rows = task.documents
    batch = collated([rows[row] for row in range(5)], width=48, most=rows.most)
    assert len(batch["cuts"]) == 5 * (rows.most + 1) + 1
    given = {"input_ids": batch["input"], "position_ids": batch["position"], "use_cache": False}
    masks = [attention.borders(batch["document"], batch["cuts"]), batch["cuts"][None, None, None]]
    with torch.no_grad():
        one, other = (model(**given, attention_mask=mask).logits for mask in masks)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_padded_prompts_are_answered_as_alone(name):
    model = Documents(name, packed=False).model().eval()
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 90, (length,), generator=draw) for length in (3, 17, 8, 1)]
    with torch.no_grad():
        together = written(model, prompts, 12)
        for row, prompt in enumerate(prompts):
            assert torch.equal(together[row], written(model, [prompt], 12)[0])
            text = prompt[None]
            for _ in range(12):  # without a cache, a mask or padding
                text = torch.cat(
                    [text, model(input_ids=text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1
                )
            assert torch.equal(together[row], text[0, len(prompt) :])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_uses_no_deprecated_name_of_transformers(name):
    model = Documents(name, packed=False).model().eval()
    with logged_by_transformers() as logged, torch.no_grad():
        written(model, [torch.tensor([5, 6, 7])], 3)
    assert not logged


def test_an_answer_ends_where_it_ends():
    model = Documents("llama", packed=False).model().eval()
    with torch.no_grad():
        prompt = torch.tensor([5, 6, 7])
        free = written(model, [prompt], 12)[0]
        ended = written(model, [prompt], 12, ends=[int(free[4])])[0]
    first = free.tolist().index(int(free[4]))
    assert torch.equal(ended[: first + 1], free[: first + 1]) and set(ended[first:].tolist()) == {
        int(free[4])
    }


def test_only_the_logits_of_the_last_tokens_of_prompts_are_computed():
    model = Documents("llama", packed=False).model().eval()
    shapes = []
    model.lm_head.register_forward_hook(lambda *given: shapes.append(tuple(given[-1].shape[:2])))
    with torch.no_grad():
        written(model, [torch.tensor([5, 6, 7, 8]), torch.tensor([5])], 3)
    assert shapes == [(2, 1)] * 3


class Reads(TorchDispatchMode):
    """Count how often a tensor's value is read on the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.is_nonzero.default,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])
def test_no_forward_asks_the_device(name, packed):
    task = Documents(name, packed=packed)
    model = task.model()
    with Reads() as reads:
        _, total = task.each(model)
        total.backward()
    assert reads.count == 0
    with Reads() as reads, torch.no_grad():  # transformers' own code does read
        own = transformers.AutoModelForCausalLM.from_config(task.config)
        before = reads.count
        own(
            input_ids=torch.ones(1, 4, dtype=torch.int64),
            position_ids=torch.arange(4)[None],
            use_cache=False,
        )
    assert reads.count > before


def test_padding_alone_is_no_nan():
    task = Documents("llama", packed=True)
    model = task.model()
    batch = collated([Sample([np.array([5, 6], np.int32)], is_row=True)], width=48, most=3)
    total, outputs = task.loss(model, batch)
    total.backward()
    assert outputs["padding"] == pytest.approx(47 / 48) and torch.isfinite(total)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    alone = F.cross_entropy(
        model(input_ids=torch.tensor([[5]]), use_cache=False).logits[0], torch.tensor([6])
    )
    assert torch.allclose(total, alone, rtol=1e-6)
