"""Hidden states, output layers and tiny models, for tests of losses without logits."""

from __future__ import annotations

import torch

TOKENS, VOCABULARY, WIDTH = 37, 101, 16
ONE, RAGGED, SINGLE = 1 << 24, 5 * VOCABULARY, 1
"""logits per chunk: all tokens in one chunk; five tokens per chunk and two in the last; one token
per chunk"""


def tensors(dtype=torch.float64, *, tokens=TOKENS, ignored=7, size=1.0):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64) * size
    bias = torch.randn(VOCABULARY, dtype=torch.float64)
    target = torch.randint(0, VOCABULARY, (tokens,))
    target[torch.randperm(tokens)[:ignored]] = -100
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)], target


def capped(logits):
    return torch.tanh(logits / 3.0) * 3.0


def off(found, expected):
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


SHAPE = {"vocab_size": 120, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = SHAPE | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLAMA |= {"num_key_value_heads": 2, "head_dim": 8}
MAMBA = {
    "mamba_d_ssm": 16,
    "mamba_n_heads": 2,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
}
MODELS = {
    "GPT2": SHAPE | {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "Llama": LLAMA,
    "Gemma2": LLAMA | {"final_logit_softcapping": 0.3},
    "Gemma3Text": LLAMA | {"final_logit_softcapping": None},
    "Cohere": LLAMA | {"logit_scale": 0.0625},
    "Granite": LLAMA | {"logits_scaling": 4.0},
    "HyperCLOVAX": LLAMA | {"logits_scaling": 4.0},
    "FalconH1": LLAMA | MAMBA | {"lm_head_multiplier": 3.0},
    "RecurrentGemma": LLAMA | {"logits_soft_cap": 0.3, "lru_width": 16, "attention_window_size": 8,
                               "block_types": ["recurrent"]},
}  # fmt: skip


def tiny(name, **changes):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS.get(name, LLAMA) | changes)
    named = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    model = getattr(transformers, named.get(name, f"{name}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model
