"""Causal language modelling: GPT-2 and Llama shapes from scratch, on bytes or on a BPE trained on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.basics.progress import Working, tracked
from oneloop.tasks.base import Task
from oneloop.tasks.corpora import Document, divided, held_out, hub_text, local_text, stdlib
from oneloop.tasks.fused_loss import fuse_loss
from oneloop.tasks.metrics import TextSums

_IGNORE = -100
_WRITTEN, _TEMPERATURE = 48, 0.8


class CausalLM(Task):
    """Text, predicted token by token; the weight of a sample is its number of target tokens.

    Args:
        data: stdlib (the source of Python's standard library), a file or folder of text, or hf:NAME[:CONFIG]. Parts
            that are there (train, validation, test: names of files, folders or splits) are used; else some are held
            out.
        column: where the text stands in .jsonl and .csv files and in hub data sets.
        architecture: gpt2 or llama, built from scratch.
        layers: transformer blocks.
        heads: attention heads.
        width: of the residual stream.
        block: tokens of a sample.
        tokenizer: bytes, or bpe (byte-level, trained on the training texts).
        vocab: entries of the bpe.
        pack: samples cut from all texts one after the other; false: each text by itself, its last sample shorter.
        dropout: of embeddings, attention and residuals (gpt2).
        fused_loss: output layer and cross-entropy in one in training, without all logits in memory (Liger's kernel on
            a GPU where it is installed, else torch's); pays for large vocabularies.
    """

    unit = "tokens"

    def __init__(
        self,
        data: str = "stdlib",
        column: str = "text",
        architecture: Literal["gpt2", "llama"] = "gpt2",
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        block: int = 128,
        tokenizer: Literal["bytes", "bpe"] = "bytes",
        vocab: int = 4096,
        pack: bool = True,
        dropout: float = 0.0,
        fused_loss: bool = False,
    ) -> None:
        if width % heads:
            raise ValueError(f"task.width {width} cannot be divided by task.heads {heads}")
        self.architecture, self.layers, self.heads, self.width = architecture, layers, heads, width
        self.block, self.dropout, self.fused_loss = block, dropout, fused_loss
        documents = _documents(data, column)
        self.tokenizer = Bytes() if tokenizer == "bytes" else BPE(documents["train"], vocab)
        self.token_bytes = torch.from_numpy(self.tokenizer.token_bytes)
        self._sets = {
            name: Blocks(
                [self.tokenizer.encode(one.text) for one in tracked(part, f"tokenizing {name}", total=len(part))],
                block,
                pack=pack,
                whole=name == "train",
            )
            for name, part in documents.items()
        }
        self.sample_weight = float(block) if pack else None

    def model(self) -> nn.Module:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # An attention without a mask function: transformers then asks no tensor whether sequences are packed.
        transformers.AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        size = len(self.token_bytes)
        config: Any
        if self.architecture == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=size,
                n_positions=self.block,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=self.heads,
                resid_pdrop=self.dropout,
                embd_pdrop=self.dropout,
                attn_pdrop=self.dropout,
                use_cache=False,
                bos_token_id=self.tokenizer.separator,
                eos_token_id=self.tokenizer.separator,
            )
            kind = transformers.GPT2LMHeadModel
        else:
            config = transformers.LlamaConfig(
                vocab_size=size,
                hidden_size=self.width,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                intermediate_size=int(8 * self.width / 3 / 32 + 1) * 32,
                max_position_embeddings=self.block,
                use_cache=False,
                bos_token_id=self.tokenizer.separator,
                eos_token_id=self.tokenizer.separator,
            )
            kind = transformers.LlamaForCausalLM
        model: nn.Module = kind._from_config(config, attn_implementation="causal_sdpa")
        if self.fused_loss:
            fuse_loss(model, ignore=_IGNORE)
        return model

    def train_set(self) -> Blocks:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: part for name, part in self._sets.items() if name != "train"}

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        """Samples of one more token than the block; shorter ones are padded, and their padding is not counted."""
        longest = max(len(sample) for sample in samples)
        padded = torch.full((len(samples), longest), _IGNORE)
        for row, sample in zip(padded, samples, strict=True):
            row[: len(sample)] = sample
        return {"input": padded[:, :-1].clamp(min=0), "target": padded[:, 1:].contiguous()}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["target"] != _IGNORE).sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.fused_loss and model.training:
            return model(input_ids=batch["input"], use_cache=False, target=batch["target"]), {}
        logits = model(input_ids=batch["input"], use_cache=False).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        each = F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="none", ignore_index=_IGNORE)
        return each.sum(), {"loss": each.detach().view_as(batch["target"])}

    def metrics(self) -> TextSums:
        return TextSums()

    def update(self, metrics: TextSums, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        target = batch["target"]
        known = target != _IGNORE
        text = self.token_bytes.to(target.device)[target.clamp(min=0)] * known
        metrics.update(outputs["loss"].double().sum(), known.sum(), text.sum())

    def generate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model writes after the first half of each text, at a temperature of 0.8; the same each time."""
        length = (batch["target"] != _IGNORE).sum(1).cpu()
        text = F.pad(batch["input"], (0, self.block - batch["input"].shape[1]))
        at, rows = (length // 2).clamp(min=1), torch.arange(len(text))
        draw = torch.Generator().manual_seed(0)
        written = torch.zeros_like(text)
        for number in range(max(1, min(_WRITTEN, self.block // 2))):
            logits = model(input_ids=text, use_cache=False).logits
            said = (logits[rows, at - 1].float() / _TEMPERATURE).nan_to_num(nan=0.0, posinf=1e9, neginf=-1e9)
            likely = said.softmax(-1).cpu()
            token = torch.multinomial(likely, 1, generator=draw)[:, 0].to(text.device)
            text[rows, at] = written[:, number] = token
            at = (at + 1).clamp(max=self.block - 1)
        return {"written": written[:, : number + 1], "prompt": (length // 2).clamp(min=1)}

    def show(self, sample: Tensor, outputs: dict[str, Tensor]) -> dict[str, Any]:
        tokens = sample.tolist()
        losses = outputs["loss"][: len(tokens) - 1].tolist()
        pieces = [(self.tokenizer.decode([token]), loss) for token, loss in zip(tokens[1:], losses, strict=True)]
        shown: dict[str, Any] = {"tokens": [(self.tokenizer.decode(tokens[:1]), 0.0), *pieces]}
        if "written" in outputs:
            shown["prompt"] = self.tokenizer.decode(tokens[: int(outputs["prompt"])])
            shown["continuation"] = self.tokenizer.decode(outputs["written"].tolist())
        return shown

    def save(self, model: nn.Module, folder: Path) -> None:
        model.config.save_pretrained(folder)  # type: ignore[union-attr,operator]
        self.tokenizer.save(folder)


def _documents(data: str, column: str) -> dict[str, list[Document]]:
    """Texts to train on, to validate with and to test with."""
    if data == "stdlib":
        return held_out(stdlib())
    parts = hub_text(data[3:], column=column) if data.startswith("hf:") else local_text(data, column=column)
    if "" in parts and len(parts[""]) < 40:
        parts = {"": _pieces(parts[""])}
    elif "validation" not in parts and "train" in parts and len(parts["train"]) < 40:
        parts = {**parts, "train": _pieces(parts["train"])}
    return divided(parts)


def _pieces(documents: list[Document]) -> list[Document]:
    """Too few texts to hold some out whole, in pieces of whole lines."""
    pieces = []
    for document in documents:
        lines = document.text.splitlines(keepends=True)
        length = max(1, len(lines) * len(documents) // 100)
        for start in range(0, len(lines), length):
            pieces.append(Document(f"{document.name}#{start}", "".join(lines[start : start + length])))
    return pieces


class Bytes:
    """One token per byte, and a separator between texts."""

    separator = 256

    def __init__(self) -> None:
        self.token_bytes = np.ones(257, dtype=np.int64)
        self.token_bytes[self.separator] = 0

    def encode(self, text: str) -> NDArray[np.int32]:
        tokens = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        return np.append(tokens, np.int32(self.separator))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing to keep: a byte is a byte."""


class BPE:
    """Byte-level byte-pair encoding, trained on these texts by ``tokenizers``."""

    separator = 0

    def __init__(self, documents: list[Document], vocab: int) -> None:
        from tokenizers import ByteLevelBPETokenizer

        if vocab < 257:
            raise ValueError(f"task.vocab {vocab} is too small: a byte-level BPE needs at least 257")
        self.model = ByteLevelBPETokenizer()
        with Working("training the tokenizer"):
            self.model.train_from_iterator(
                (one.text for one in documents), vocab_size=vocab, show_progress=False, special_tokens=["<|endoftext|>"]
            )
        lengths = [len(self.model.id_to_token(token)) for token in range(self.model.get_vocab_size())]
        self.token_bytes = np.array([0, *lengths[1:]], dtype=np.int64)  # byte-level tokens hold a letter per byte

    def encode(self, text: str) -> NDArray[np.int32]:
        return np.array([*self.model.encode(text).ids, self.separator], dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.model.decode(list(tokens)))

    def save(self, folder: Path) -> None:
        self.model.save(str(folder / "tokenizer.json"))


class Blocks:
    """Samples of ``block + 1`` tokens that overlap by one, so that every token but the first is a target once."""

    def __init__(self, texts: list[NDArray[np.int32]], block: int, *, pack: bool, whole: bool) -> None:
        self.block = block
        joined = np.concatenate(texts) if texts else np.zeros(0, dtype=np.int32)
        self.tokens = torch.from_numpy(joined)
        ends = np.array([len(joined)]) if pack else np.cumsum([len(text) for text in texts])
        spans: list[tuple[int, int]] = []
        start = 0
        for end in ends.tolist():
            first = range(start, end - 1, block)
            spans += [(at, min(at + block + 1, end)) for at in first]
            start = end
        if pack and whole and spans and spans[-1][1] - spans[-1][0] <= block:
            spans.pop()  # training samples are all of one length
        self.spans = spans

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Tensor:
        start, stop = self.spans[index]
        return self.tokens[start:stop].long()
