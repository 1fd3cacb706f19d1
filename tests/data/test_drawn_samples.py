"""Collators of transformers that draw: per sample, so that no layout changes the numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from oneloop import fit
from oneloop.data.seeded_samples import SeededSamples
from oneloop.tasks.language.drawn_samples import DrawnSamples
from small_models import bert

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.drawn_samples",
    "oneloop.data.seeded_samples",
)

QUIET: dict[str, Any] = {"watch": {"output": "quiet"}, "track": [], "machine": {"workers": 0}}
COLLATORS = {"tokens": transformers.DataCollatorForLanguageModeling}
COLLATORS["whole words"] = partial(
    COLLATORS["tokens"], whole_word_mask=True, mask_replace_prob=1, random_replace_prob=0
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    folder = bert(tmp_path_factory.mktemp("bert"))
    return transformers.AutoTokenizer.from_pretrained(folder)


def rows(tokenizer: Any, count: int = 40, *, offsets: bool = False) -> list[dict[str, Any]]:
    texts = ["alpha beta gamma 12 " * (1 + number % 3) for number in range(count)]
    how = {"truncation": True, "max_length": 14}
    return [dict(tokenizer(text, return_offsets_mapping=offsets, **how)) for text in texts]


@pytest.mark.parametrize("name", COLLATORS)
def test_a_sample_is_the_same_in_any_batch(tokenizer, name):
    collator = COLLATORS[name](tokenizer=tokenizer, mlm_probability=0.5)
    samples = DrawnSamples(rows(tokenizer, offsets=name == "whole words"), collator)
    seeded = SeededSamples(samples, seed=3)

    def batch(*numbers: int) -> dict[str, Tensor]:
        return seeded.batch(
            [(1, n) for n in numbers], lambda s: samples.collate([one for _, one in s])
        )

    whole, apart = batch(0, 1, 2, 3), [batch(n) for n in range(4)]
    masked = 0
    for number, alone in enumerate(apart):
        width = alone["input_ids"].shape[1]
        for key, values in alone.items():
            assert torch.equal(whole[key][number, :width], values[0])
        assert (whole["labels"][number, width:] == -100).all()
        assert (whole["attention_mask"][number, width:] == 0).all()
        assert (whole["input_ids"][number, width:] == tokenizer.pad_token_id).all()
        masked += int((alone["labels"] != -100).sum())
    assert masked
    assert not torch.equal(batch(0, 1)["input_ids"], seeded.batch(
        [(2, 0), (2, 1)], lambda s: samples.collate([one for _, one in s])
    )["input_ids"])  # another epoch  # fmt: skip


def test_the_share_of_masked_tokens_is_that_of_the_collator(tokenizer):
    collator = COLLATORS["tokens"](tokenizer=tokenizer, mlm_probability=0.3)
    samples = DrawnSamples(rows(tokenizer, 400), collator)
    torch.manual_seed(0)
    drawn = total = 0
    for number in range(400):
        sample = samples[number]
        drawn += int((sample["labels"] != -100).sum())
        total += len(sample["labels"]) - 2  # without [CLS] and [SEP]
    assert abs(drawn / total - 0.3) < 0.03


def test_multiples_and_what_cannot_be_padded(tokenizer):
    collator = COLLATORS["tokens"](tokenizer=tokenizer, mlm_probability=0.3, pad_to_multiple_of=16)
    samples = DrawnSamples(rows(tokenizer), collator)
    assert samples.collate([samples[0], samples[2]])["labels"].shape == (2, 16)
    with pytest.raises(ValueError, match="includes input_ids, but you provided .'other'"):
        samples.collate([{"other": torch.zeros(3)}])
    with pytest.raises(ValueError, match="has its own seed"):
        DrawnSamples(rows(tokenizer), COLLATORS["tokens"](tokenizer=tokenizer, seed=1))


class Masked:
    """Masked words, drawn in collate or per sample."""

    def __init__(self, folder: str = "", per_sample: bool = False) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        collator = COLLATORS["tokens"](tokenizer=self.tokenizer, mlm_probability=0.4)
        self.rows: Any = rows(self.tokenizer)
        self.folder = folder
        self.collate: Any = lambda samples: dict(collator(samples))
        if per_sample:
            self.rows = DrawnSamples(self.rows, collator)
            self.collate = self.rows.collate

    def model(self) -> nn.Module:
        return transformers.BertForMaskedLM.from_pretrained(self.folder)

    def train_set(self) -> Any:
        return self.rows

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != -100).sum().float()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        ), {}


def test_the_start_names_the_cure_and_the_cure_works(tmp_path, capfd):
    """Drawn per sample, accumulation trains the same loss; the start no longer warns."""
    folder = str(bert(tmp_path / "model"))
    losses = {}
    for per_sample in (False, True):
        for micro in (8, 2):
            run = tmp_path / f"{per_sample}-{micro}"
            keys = {"duration": 3, "batch": {"size": 8, "micro": micro}, "log": {"every": 1}}
            keys |= {"save": {"every": 0}}
            found = fit(
                Masked,
                task={"folder": folder, "per_sample": per_sample},
                run={"dir": str(run)},
                track=[],
                machine={"workers": 0},
                **keys,
            )
            losses[per_sample, micro] = found["train/loss"]
            said = capfd.readouterr().out
            assert ("DrawnSamples" in said) != per_sample, said
    assert losses[False, 8] != pytest.approx(losses[False, 2], rel=1e-4)
    assert losses[True, 8] == pytest.approx(losses[True, 2], rel=1e-5)
