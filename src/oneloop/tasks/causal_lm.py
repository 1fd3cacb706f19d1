"""Causal language modelling: GPT-2 and Llama shapes from scratch, on bytes or on a BPE trained on the spot; or a model
that transformers knows, with its own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.data.rows.sources import Source, combined, named_sources
from oneloop.tasks.base import Task
from oneloop.tasks.fused_loss import fuse_loss
from oneloop.tasks.metrics import TextSums
from oneloop.tasks.texts import Texts, all_texts, texts_of
from oneloop.tasks.tokens import BPE, Blocks, Bytes, Vocabulary
from oneloop.tasks.transformers_models import auto_model, is_transformers

_IGNORE = -100
_WRITTEN, _TEMPERATURE = 48, 0.8


class CausalLM(Task):
    """Text, predicted token by token; the weight of a sample is its number of target tokens.

    Args:
        data: stdlib (the source of Python's standard library); a file or folder of text, parquet, json lines, csv or
            arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7}, …]. Parts that are there (train,
            validation, test: names of files, folders or splits) are used; else some are held out.
        column: where the text stands in rows.
        held_out: share of the rows for validation, and as much for test, where the data has no such parts.
        window: megabytes of parquet rows that a process may hold while it makes tokens of them.
        model: a folder that transformers saved, or hf:ID[@REVISION], with its tokenizer (null: one from scratch, as the
            next keys say).
        pretrained: with its weights; false: only its shape.
        trust_remote_code: run Python that lies beside those weights (only of people you trust).
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
        data: str | list[dict[str, Any]] = "stdlib",
        column: str = "text",
        held_out: float = 0.05,
        window: int = 256,
        model: str | None = None,
        pretrained: bool = True,
        trust_remote_code: bool = False,
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
        self.name, self.weights = model, {"pretrained": pretrained, "trust_remote_code": trust_remote_code}
        self.notes: list[str] = []
        if model is not None and not is_transformers(model):
            raise ValueError(f"task.model {model!r} is neither a folder that transformers saved, nor hf:ID")
        self.column, self.window, self.pack = column, window, pack
        sources = named_sources(data, {"column": column})
        texts = [texts_of(source, share=held_out, window=window) for source in sources]
        trained = [parts["train"] for parts in texts]
        told = [part.fingerprint() for part in trained]
        kept = None if None in told else told
        whole = (text for part in trained for text in part)
        self.tokenizer: Any
        if model is not None:
            self.tokenizer = Vocabulary(model, trust_remote_code=trust_remote_code)
            self._made_by = [self.tokenizer.content]
        else:
            self.tokenizer = Bytes() if tokenizer == "bytes" else BPE(whole, vocab, kept=kept)
            self._made_by = [tokenizer, *([] if tokenizer == "bytes" else [vocab, kept])]
        self.token_bytes = torch.from_numpy(self.tokenizer.token_bytes)
        each = [{name: self._blocks(part, name) for name, part in parts.items()} for parts in texts]
        self._sets = combined(sources, each)
        self.sample_weight = float(block) if pack else None

    def _blocks(self, part: Texts, name: str) -> Blocks:
        tokens = part.tokens(self.tokenizer.encode, made_by=self._made_by, what=f"tokenizing {name}")
        return Blocks(tokens, self.block, pack=self.pack, whole=name == "train", content=part.fingerprint())

    def model(self) -> nn.Module:
        if self.name is not None:
            return self._known(self.name)
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

    def _known(self, name: str) -> nn.Module:
        model, self.notes = auto_model("AutoModelForCausalLM", name, None, **self.weights)
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        longest = getattr(config, "max_position_embeddings", None)
        if longest and self.block > longest:
            raise ValueError(f"task.block {self.block} is longer than the {longest} positions of {name}; lower it")
        entries = len(self.token_bytes)
        if entries > config.vocab_size:
            raise ValueError(f"{name}: its tokenizer has {entries:,} entries, and the model {config.vocab_size:,}")
        if self.fused_loss:
            fuse_loss(model, ignore=_IGNORE)
        return model

    def train_set(self) -> Any:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: part for name, part in self._sets.items() if name != "train"}

    def samples_of(self, data: str, *, labelled: bool) -> Blocks:
        return self._blocks(all_texts(Source(data, {"column": self.column}), window=self.window), "texts")

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
        return TextSums(by_bytes=bool(self.token_bytes.any()))

    def update(self, metrics: TextSums, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        target = batch["target"]
        known = target != _IGNORE
        text = self.token_bytes.to(target.device)[target.clamp(min=0)] * known
        metrics.update(outputs["loss"].double().sum(), known.sum(), text.sum())

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        """The mean loss of each sample's tokens (nats), and how many they are."""
        known = batch["target"] != _IGNORE
        losses = (outputs["loss"].double() * known).sum(1) / known.sum(1)
        return {"loss": losses.tolist(), "tokens": known.sum(1).tolist()}

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
