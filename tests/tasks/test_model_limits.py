"""Positions, vocabulary and padding of models of transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from oneloop.machine.recompute import recompute
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.model_limits import positions_of
from oneloop.tasks.sft import SFT
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.text_pairs import TextPairs
from oneloop.tasks.text_regression import TextRegression
from oneloop.tasks.token_classification import TokenClassification
from slow_cases import with_slow
from small_models import logged_by_transformers

pytestmark = pytest.mark.covers(
    "oneloop.machine.recompute",
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.model_limits",
    "oneloop.tasks.sft",
    "oneloop.tasks.text_classification",
    "oneloop.tasks.text_encoders",
    "oneloop.tasks.text_pairs",
    "oneloop.tasks.text_regression",
    "oneloop.tasks.token_classification",
    "oneloop.tasks.transformers_models",
)

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<pad2>"]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))


def tokenizer_in(folder: Path, **names: str) -> Any:
    made: Any = Tokenizer(models.BPE())
    made.normalizer = normalizers.BertNormalizer()  # removes zero-width characters
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", **names
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def saved(
    folder: Path, kind: str, *, positions: int = 64, padding: int | None, **names: str
) -> str:
    """Save a model with this padding token in its configuration, and its tokenizer."""
    tokenizer = tokenizer_in(folder, **names)
    size = len(tokenizer)
    torch.manual_seed(0)
    model: Any
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=size, n_embd=32, n_layer=1, n_head=2, n_positions=positions,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=size, intermediate_size=64, max_position_embeddings=positions, **SHAPE
            )
        )
    else:
        names_of = {"bert": "Bert", "roberta": "Roberta", "camembert": "Camembert"}
        config_class = getattr(transformers, f"{names_of[kind]}Config")
        config = config_class(
            vocab_size=size, intermediate_size=64, max_position_embeddings=positions,
            pad_token_id=padding, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SHAPE,
        )  # fmt: skip
        model = getattr(transformers, f"{names_of[kind]}ForMaskedLM")(config)
    model.save_pretrained(folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "pad_token_id": padding}))
    return str(folder)


def rows_in(folder: Path) -> str:
    """Write texts of very different lengths."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(40):
        text = "the cat sat " * (1 + number % 4) + str(number)
        row = {"text": text, "label": "pos" if number % 3 else "neg", "number": number / 40}
        row |= {"anchor": text, "positive": f"mat {number} " * (1 + number % 5)}
        row |= {"tokens": text.split(), "tags": ["A", "B"] * 9}
        row["tags"] = row["tags"][: len(row["tokens"])]
        lines.append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    return str(folder)


PADDING = {
    "of the model": (1, {}),
    "of the tokenizer": (None, {"pad_token": "<pad>"}),
    "of neither": (None, {}),
    "different": (5, {"pad_token": "<pad>"}),
    "the end of the tokenizer": (1, {"pad_token": "</s>"}),
    "outside of the vocabulary": (-1, {"pad_token": "<pad>"}),
}


# One place decides for all kinds which token pads. By default each choice is made for one kind, and
# each kind has two choices.
QUICK = {
    ("gpt2", "of neither"),
    ("gpt2", "the end of the tokenizer"),
    ("llama", "of the tokenizer"),
    ("llama", "different"),
    ("llama", "outside of the vocabulary"),
    ("bert", "of the model"),
    ("bert", "different"),
    ("roberta", "of the model"),
    ("roberta", "the end of the tokenizer"),
}
CASES = [(kind, name) for name in PADDING for kind in ("gpt2", "llama", "bert", "roberta")]


@pytest.mark.parametrize(
    ("kind", "name"), with_slow(CASES, [case for case in CASES if case not in QUICK])
)
def test_padded_rows_have_the_loss_of_rows_one_by_one(tmp_path, kind, name):
    padding, names = PADDING[name]
    if kind == "roberta" and (padding or -1) < 0:
        pytest.skip("RoBERTa cannot be built without a padding token")
    model_folder = saved(tmp_path / "model", kind, padding=padding, **names)
    data = rows_in(tmp_path / "data")
    tasks: list[Any] = [
        TextClassification(data, model=model_folder, length=50),
        TextRegression(data, label="number", model=model_folder, length=50),
        TokenClassification(data, model=model_folder, length=50),
        TextPairs(data, model=model_folder, length=50, pooling="last"),
    ]
    for task in tasks:
        torch.manual_seed(0)
        model = task.model().eval()
        samples = [task.train_set()[n] for n in range(12)]

        def total(chosen: list[Any], task: Any = task, model: Any = model) -> torch.Tensor:
            batch = task.collate(chosen)
            with torch.no_grad():
                if hasattr(task, "embed"):
                    parts = task.embed(model, batch)
                    return torch.stack([parts["anchor"].sum(), parts["candidate"].sum()])
                return task.loss(model, batch)[0]

        apart = sum(total([sample]) for sample in samples)
        torch.testing.assert_close(total(samples), apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_new_head_is_one_line_and_recomputation_changes_nothing(tmp_path, kind):
    """transformers logs nothing: neither a table of new weights, nor about keys and values, which
    a recomputation would add twice."""
    model_folder = saved(tmp_path / "model", kind, padding=1, pad_token="<pad>")
    data = rows_in(tmp_path / "data")
    with logged_by_transformers() as logged:
        for task in (
            TextClassification(data, model=model_folder, length=50),
            TokenClassification(data, model=model_folder, length=50),
            TextPairs(data, model=model_folder, length=50, pooling="last"),
        ):
            losses = []
            for mode in ("none", "full"):
                torch.manual_seed(0)
                model = task.model()
                recompute(model, mode)
                batch = task.collate([task.train_set()[n] for n in range(8)])
                if isinstance(task, TextPairs):
                    loss = task.embed(model, batch)["anchor"].square().sum()
                else:
                    loss = task.loss(model, batch)[0]
                loss.backward()
                grads = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
                losses.append([loss.item(), sum(grads).item()])
            assert losses[0] == losses[1]
            assert losses[0][1] > 0
            assert sum("is re-initialized" in note for note in task.notes) == (
                kind == "bert" or not isinstance(task, TextPairs)
            )
        logging.getLogger("transformers.modeling_utils").warning("about something else")
    assert logged == ["about something else"]


def test_the_saved_folder_pads_as_training_did(tmp_path):
    model_folder = saved(tmp_path / "model", "llama", padding=5, pad_token="<pad>")
    task = TextClassification(rows_in(tmp_path / "data"), model=model_folder, length=50)
    task.save(task.model(), tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.pad_token_id == 5
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == 5


def test_an_ordinary_token_for_padding_stays_ordinary(tmp_path):
    """As a special token it would split words that contain it."""
    tokenizer = tokenizer_in(tmp_path / "probe", pad_token="<pad>")
    letter = tokenizer.convert_tokens_to_ids("t")
    model_folder = saved(tmp_path / "model", "llama", padding=letter, pad_token="<pad>")
    task = TextClassification(rows_in(tmp_path / "data"), model=model_folder, length=50)
    before = task.reader.encode("the cat sat on the mat")["input_ids"]
    model = task.model()
    assert model.config.pad_token_id == letter
    task.save(model, tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again("the cat sat on the mat")["input_ids"] == before


def test_positions_of_another_class_of_embeddings():
    config = transformers.IBertConfig(
        vocab_size=100, intermediate_size=64, max_position_embeddings=34, pad_token_id=1, **SHAPE
    )
    assert positions_of(transformers.IBertModel(config)) == 32


@pytest.mark.parametrize("kind", ["roberta", "camembert"])
def test_positions_after_the_padding_token(tmp_path, kind):
    """Of 34 positions the first two are not used: 32 tokens fit."""
    folder = saved(tmp_path / "model", kind, positions=34, padding=1)
    data = rows_in(tmp_path / "data")
    for length in (34, 33):
        with pytest.raises(ValueError, match=f"task.length {length} exceeds the 32 positions"):
            TextClassification(data, model=folder, length=length).model()
    task = TextClassification(data, model=folder, length=32)
    model = task.model().eval()
    longest = [task.reader.encode("the cat sat on the mat " * 9)]
    assert len(longest[0]["input_ids"]) == 32
    assert model(**task.reader.collate(longest)).logits.isfinite().all()


def test_a_default_length_is_lowered_with_one_line(tmp_path):
    data = rows_in(tmp_path / "data")
    for kind, positions in (("roberta", 48), ("bert", 50)):
        folder = saved(tmp_path / kind, kind, positions=50, padding=1)
        for make in (TextClassification, TokenClassification):
            task = make(data, model=folder)
            assert task.reader.length == positions
            assert any(f"task.length is {positions}, not" in note for note in task.notes)
            task.model()
        with pytest.raises(ValueError, match="task.length 255 exceeds"):
            TextClassification(data, model=folder, length=255).model()
    folder = saved(tmp_path / "llama", "llama", positions=100, padding=None)
    task = CausalLM(data, model=folder)
    assert task.block == 100 and any("task.block is 100, not 128" in one for one in task.notes)
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q {n}", "completion": " a"}) + "\n" for n in range(30))
    )
    chat = SFT(str(prompts), model=folder)
    assert chat.length == 100 and any("task.length is 100, not 256" in one for one in chat.notes)


def test_a_tokenizer_larger_than_the_embedding_is_named(tmp_path):
    folder = saved(tmp_path / "model", "bert", padding=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    tokenizer.add_tokens(["<new1>", "<new2>"])
    tokenizer.save_pretrained(folder)
    data = rows_in(tmp_path / "data")
    for make in (TextClassification, TokenClassification, TextPairs):
        with pytest.raises(
            ValueError, match=f"its tokenizer has {size + 2} entries, and the model {size}"
        ):
            make(data, model=folder, length=50).model()


@pytest.mark.parametrize(
    ("words", "number"),
    [(["the", "\u200b", "cat"], 1), (["the", "cat", "\u200b"], 2), (["\u200b", "cat"], 0)],
)
def test_a_word_without_tokens_is_named_at_any_position(tmp_path, words, number):
    folder = saved(tmp_path / "model", "bert", padding=1)
    task = TokenClassification(rows_in(tmp_path / "data"), model=folder, length=50)
    with pytest.raises(ValueError, match=f"word {number} .* has no tokens; remove it"):
        task.reader.encode_words(words)
    # A word that is cut needs no tokens.
    task.reader.length = 4
    sample, starts, length = task.reader.encode_words(["the", "cat", "sat", "on", "\u200b", "mat"])
    assert len(sample["input_ids"]) == length <= 4 and len(starts) < 5
