"""Small models: a ViT and a BERT saved like transformers, and blocks for activation
checkpointing."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from lessons import lessons
from oneloop.tasks.language.tokens import chat_tokenizer
from own_files import rows


def vit(folder: Path, classes: int) -> Path:
    """Save a small ViT like transformers, with this number of classes."""
    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ViTForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.4] * 3, "image_std": [0.3] * 3})
    )
    return folder


def llama(folder: Path) -> list[list[dict[str, str]]]:
    """Save a small Llama with its tokenizer, like transformers; return chats to train it on."""
    chats = lessons("train")[:200]
    tokenizer = chat_tokenizer([one["content"] for chat in chats for one in chat], 400)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return chats


def bert(folder: Path, *, positions: int = 16) -> Path:
    """Save a small BERT with its tokenizer, like transformers."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(
        [row["text"] for row in rows(120)],
        trainers.WordPieceTrainer(vocab_size=90, special_tokens=special),
    )
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True
        )
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=90,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        q, k, v = self.inward(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = (
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        x = x + self.drop(self.outward(y)) * gain
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(32) for _ in range(12)])
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, gain=0.5)
        return self.head(x)


def fresh() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def gradients(model: nn.Module) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of one batch, and the bytes that autograd saved for them."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []  # keeps tensors alive, so that no address is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    torch.manual_seed(1)
    x = torch.randn(2, 24, 32)
    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters()], sum(kept.values())


@contextmanager
def logged_by_transformers() -> Iterator[list[str]]:
    """Collect the warnings that transformers logs, also those that it logs only once."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)
        transformers.logging.set_verbosity(before)
