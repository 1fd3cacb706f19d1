"""Models of transformers make their masks without a look at them, and compute the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers

from oneloop.tasks import unread_masks
from oneloop.tasks.unread_masks import NAME, leave_masks_unread

pytestmark = pytest.mark.covers("oneloop.tasks.unread_masks")

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BART = {"vocab_size": 60, "d_model": 32, "max_position_embeddings": 64}


def built(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    name, _, _ = kind.partition("For")
    config = getattr(transformers, f"{name.removesuffix('Model')}Config")(**settings)
    return getattr(transformers, kind)(config).eval()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("BertModel", SIZES),
        ("DistilBertModel", {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 2}),
        ("LlamaForSequenceClassification", SIZES | {"pad_token_id": 0}),
        # a window of 4 tokens in each layer but the first
        ("ModernBertModel", SIZES | {"local_attention": 4, "pad_token_id": 0, "layer_types": None}),
        ("BartForConditionalGeneration", BART),
    ],
)
def test_outputs_are_equal_with_and_without_padding(kind: str, settings: dict[str, Any]) -> None:
    model = built(kind, **settings)
    inputs = {"input_ids": torch.arange(40).view(2, 20)}
    masks = [torch.ones(2, 20, dtype=torch.int64) for _ in range(2)]
    masks[1][1, 12:] = 0
    before = [model(**inputs, attention_mask=mask)[0] for mask in masks]
    leave_masks_unread(model)
    assert model.config._attn_implementation == NAME
    with patch("torch.Tensor.__bool__", side_effect=AssertionError("the host reads a value")):
        after = [model(**inputs, attention_mask=mask)[0] for mask in masks]
    for mask, one, other in zip(masks, before, after, strict=True):
        if one.ndim == 3 and one.shape[1] == 20:
            one, other = one[mask.bool()], other[mask.bool()]
        torch.testing.assert_close(one, other)
    assert "unread" not in model.config.to_json_string()


def test_a_model_with_other_attention_stays_as_it_is() -> None:
    settings = SIZES | {"attn_implementation": "eager"}
    model = built("BertModel", **settings)
    leave_masks_unread(model)
    assert model.config._attn_implementation == "eager"
    leave_masks_unread(torch.nn.Linear(2, 2))


def test_a_model_that_computes_something_else_stays_as_it_is() -> None:
    model = built("BertModel", **SIZES)
    with patch.object(unread_masks, "unread_mask", lambda *_, **__: None):
        leave_masks_unread(model)
    assert model.config._attn_implementation == "sdpa"
