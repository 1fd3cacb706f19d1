"""Tasks whose tiny models of transformers write texts, and record what they wrote."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.basics.exit_codes import BadInput

WORDS = 23
PAD = 0
ENDS = [
    1,
    6,
    9,
    14,
    19,
]  # several, so that texts of one batch end after different numbers of tokens


class Sentences:
    """Sentences of 3 to 9 words, the same on every machine."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
        self.samples = [
            torch.randint(2, WORDS, (length,), generator=generator) for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


def text_of(tokens: list[int]) -> str:
    """Return tokens up to the first end token as words."""
    words = []
    for token in tokens:
        if token in ENDS:
            break
        words.append(f"w{token}")
    return " ".join(words)


class Writes:
    """A model that reads sentences and writes texts; the reference is the sentence itself.

    Args:
        held_out: validation sentences.
        beams: of the beam search.
        fails: the number of the batch for which generating fails (0: none).
        length: most tokens of a text.
        layers: of the model.
    """

    unit = "tokens"
    progress: Any = None

    def __init__(
        self,
        held_out: int = 13,
        beams: int = 1,
        fails: int = 0,
        length: int = 12,
        layers: int = 2,
    ) -> None:
        self.held_out = held_out
        self.beams = beams
        self.fails = fails
        self.length = length
        self.layers = layers
        self.calls = 0

    def train_set(self) -> Sentences:
        return Sentences(60, seed=1)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": Sentences(self.held_out, seed=2)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != -100).sum()

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        pad = nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(samples, batch_first=True, padding_value=PAD),
            "labels": pad(samples, batch_first=True, padding_value=-100),
        }

    def generate(self, model: Any, batch: dict[str, Tensor]) -> list[str]:
        self.calls += 1
        if self.calls == self.fails:
            raise RuntimeError("the writer is out of ink")
        if str(self.calls) == os.environ.get("WRITERS_STOP"):
            os.kill(os.getpid(), signal.SIGTERM)
        inputs = batch["input_ids"]
        first = inputs.shape[1] if self.decodes else 0
        tokens = model.generate(
            input_ids=inputs,
            attention_mask=(inputs != PAD).long(),
            max_new_tokens=self.length,
            do_sample=False,
            num_beams=self.beams,
            eos_token_id=ENDS,
        )
        return [text_of(row) for row in tokens[:, first:].tolist()]

    def generated_metrics(self) -> Any:
        from torchmetrics import MetricCollection
        from torchmetrics.text import CHRFScore

        return MetricCollection({"chrf": CHRFScore()})

    def update_generated(self, metrics: Any, batch: dict[str, Tensor], texts: list[str]) -> None:
        references = [" ".join(f"w{t}" for t in row if t) for row in batch["input_ids"].tolist()]
        metrics["chrf"].update(texts, [[one] for one in references])
        folder = os.environ.get("WRITERS_FOLDER")
        if folder and self.progress.step:  # not those of the preflight check
            with Path(folder, f"texts-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
                for index, text in zip(batch["index"].tolist(), texts, strict=True):
                    file.write(json.dumps([index, text]) + "\n")


class Copies(Writes):
    """An encoder-decoder model (T5)."""

    decodes = False

    def model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=self.layers,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=PAD,
            decoder_start_token_id=PAD,
            initializer_factor=3.0,
        )
        return T5ForConditionalGeneration(config)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, labels = batch["input_ids"], batch["labels"]
        shifted = F.pad(labels[:, :-1], (1, 0), value=PAD).clamp(min=0)
        mask = (inputs != PAD).long()
        logits = model(input_ids=inputs, attention_mask=mask, decoder_input_ids=shifted).logits
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return each.sum(), {"loss": each.detach().view_as(labels)}


class Careless(Copies):
    """A writer that makes one mistake.

    Args:
        mistake: ``metrics`` at once; on rank 1 ``short`` and ``input``, in the first evaluation.
    """

    def __init__(self, mistake: str = "", length: int = 12, layers: int = 2) -> None:
        super().__init__(length=length, layers=layers)
        self.mistake = mistake

    def generate(self, model: Any, batch: dict[str, Tensor]) -> Any:
        texts = super().generate(model, batch)
        ties = torch.ones(len(texts), dtype=torch.bool)
        late = self.progress.step > 0
        if late and os.environ.get("RANK") == "1":
            if self.mistake == "short":
                return texts[:-1]
            if self.mistake == "input":
                raise BadInput("found in the run")
        return {"texts": texts, "near_ties": ties}

    def generated_metrics(self) -> Any:
        from torchmetrics import SumMetric
        from torchmetrics.text import CHRFScore

        if self.mistake == "metrics":
            return None
        return {"chrf": CHRFScore(), "near_ties": SumMetric()}

    def update_generated(self, metrics: Any, batch: dict[str, Any], texts: list[str]) -> None:
        super().update_generated(metrics, batch, texts)
        metrics["near_ties"].update(batch["near_ties"])


class Continues(Writes):
    """A decoder-only model (Llama); here padding is on the right, which only tests may do."""

    decodes = True

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=self.layers,
            num_attention_heads=2,
            pad_token_id=PAD,
            max_position_embeddings=64,
            initializer_range=0.5,
        )
        return LlamaForCausalLM(config)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, labels = batch["input_ids"], batch["labels"]
        logits = model(input_ids=inputs, attention_mask=(inputs != PAD).long()).logits[:, :-1]
        targets = labels[:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return each.sum(), {"loss": each.detach().view_as(targets)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()
