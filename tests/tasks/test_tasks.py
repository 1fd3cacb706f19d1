"""Tasks on real data: loading, batch weights, rejected input."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from oneloop.task_protocol.protocol import check, check_sets
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.language.tokens import (
    END_OF_TEXT,
    byte_tokenizer,
    encode_bytes,
    encode_text,
    learn_bpe,
    token_bytes,
    tokenizer_from,
)
from oneloop.tasks.text_classification import TextClassification
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.task_protocol.protocol",
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.labels",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.text_classification",
)

SEPARATOR = 256  # of bytes


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(60):
        (folder / f"{number}.txt").write_text(
            f"text {number}: " + "the cat sat on the mat. " * (1 + number % 7)
        )
    return folder


def test_digits_are_divided_by_class_and_never_shared():
    task = ImageClassification()
    check(task)
    sets = {"train": task.train_set(), **task.eval_sets()}
    assert {name: len(part) for name, part in sets.items()} == {
        "train": 1258,
        "validation": 270,
        "test": 269,
    }
    images = [image.numpy().tobytes() for part in sets.values() for image in part.rows.images]
    # scikit-learn has almost no duplicates
    assert len(images) == 1797 and len(images) - len(set(images)) < 3
    for part in sets.values():
        assert sorted(set(part.rows.labels)) == list(range(10))


def test_augmentation_moves_the_image_and_keeps_the_label():
    plain, moved = ImageClassification(augment=False).train_set(), ImageClassification().train_set()
    torch.manual_seed(0)
    assert any(not torch.equal(plain[i][0], moved[i][0]) for i in range(5))
    assert [plain[i][1] for i in range(5)] == [moved[i][1] for i in range(5)]


@pytest.mark.parametrize("pack", ["concat", "packed", "padded"])
def test_every_token_is_a_target_exactly_once(text_folder, pack):
    task = CausalLM(str(text_folder), block=16, pack=pack)
    for part in task.eval_sets().values():
        samples = [part[i] for i in range(len(part))]
        batch = task.collate(samples)
        targets = batch["target"][batch["target"] >= 0]
        tokens = part.tokens
        texts = 1 if pack == "concat" else int((tokens == SEPARATOR).sum())
        assert len(targets) == int(task.weight(batch)) == len(tokens) - texts
    train_set = task.train_set()
    lengths = {len(train_set[i].documents[0]) for i in range(len(train_set))}
    assert (lengths == {17}) is (pack == "concat")
    assert task.sample_weight == (16.0 if pack == "concat" else None)
    if pack == "packed":
        batch = task.collate([train_set[i] for i in range(len(train_set))])
        tokens = train_set.tokens
        assert int(task.weight(batch)) == len(tokens) - int((tokens == SEPARATOR).sum())
        assert set(batch["input"].shape[1:]) == {16} and batch["padding"] < 0.2


def test_bpe_counts_its_bytes():
    text = "def f(x):\n    return 'naïve' + x  # ünïcode\n" * 3
    written = learn_bpe([text] * 20, 300, [END_OF_TEXT])
    tokenizer = tokenizer_from(written, eos_token=END_OF_TEXT)
    tokens = encode_text(tokenizer, text)
    assert token_bytes(tokenizer)[tokens].sum() == len(text.encode())
    assert tokenizer.decode(tokens[:-1].tolist()) == text
    assert len(tokens) < len(text)


def test_bytes_are_read_by_transformers_as_they_are_trained(tmp_path):
    text = "naïve ünïcode <|endoftext|> [PAD] 😀\n\x00 'll  do"
    byte_tokenizer(eos_token=END_OF_TEXT).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == [*text.encode()]
    assert encode_bytes(text).tolist() == encode_text(loaded, text).tolist()
    assert loaded.decode([*text.encode()]) == text


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_language_models_predict_only_from_what_came_before(text_folder, architecture):
    task = CausalLM(
        str(text_folder), architecture=architecture, layers=2, heads=2, width=32, block=16
    )
    torch.manual_seed(0)
    model = task.model().eval()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 65
    one, other = (model(input_ids=x, use_cache=False).logits for x in (tokens, changed))
    assert torch.equal(one[:, :10], other[:, :10]) and not torch.equal(one[:, 10:], other[:, 10:])


def test_padding_does_not_change_a_classification():
    task = TextClassification(layers=1, width=32, packages=3)
    torch.manual_seed(0)
    model = task.model().eval()
    short, long = (
        task.train_set()[0],
        max((task.train_set()[i] for i in range(50)), key=lambda s: len(s[0]["input_ids"])),
    )
    alone = task.reader.logits(model, task.collate([short]))
    padded = task.reader.logits(model, task.collate([short, long]))[:1]
    assert torch.allclose(alone, padded, atol=1e-6)


def test_snippets_are_held_out_by_file():
    task = TextClassification()
    assert len(task.classes) == 8
    parts = {"train": task.train_set(), **task.eval_sets()}
    assert min(len(part) for part in parts.values()) > 100


def test_own_texts_and_labels(tmp_path):
    for name, count in (("train", 40), ("validation", 8)):
        rows = [
            {"text": f"{word} {n}", "label": word}
            for n in range(count // 2)
            for word in ("good", "bad")
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = TextClassification(str(tmp_path))
    assert task.classes == ["bad", "good"] and len(task.train_set()) == 40
    (tmp_path / "test.jsonl").write_text('{"text": "x", "label": "ugly"}')
    with pytest.raises(ValueError, match=r"labels \['ugly'\] occur in test but not in train"):
        TextClassification(str(tmp_path))
    (tmp_path / "test.jsonl").write_text('{"text": "x"}')
    task = TextClassification(str(tmp_path))  # as contests have it
    assert task.notes[0].endswith("has no column 'label'; it has text: the test split is ignored")
    assert set(task.eval_sets()) == {"validation"}
    (tmp_path / "test.jsonl").write_text('{"text": "x", "label": null}')
    task = TextClassification(str(tmp_path))
    assert task.notes[0].endswith("no row of the test split has a label, so it is not evaluated")
    assert set(task.eval_sets()) == {"validation"}


def test_own_text_as_one_file_or_json_lines(tmp_path):
    one = tmp_path / "one.txt"
    one.write_text("\n".join(f"line {n} of the only text" for n in range(3000)))
    task = CausalLM(str(one), block=32)
    assert all(len(part) > 10 for part in task.eval_sets().values())
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"body": f"row {n} " * 20}) for n in range(100)))
    assert len(CausalLM(str(rows), column="body", block=32).train_set()) > 100
    with pytest.raises(ValueError, match="has no column 'text'; it has body"):
        CausalLM(str(rows), block=32)
    with pytest.raises(ValueError, match="is not a file or folder"):
        CausalLM(str(tmp_path / "nowhere"))


def test_a_member_may_be_set_on_the_task_itself_and_a_stub_is_none():
    from oneloop.task_protocol.protocol import Task

    class Mine(Task):
        def __init__(self, **members):
            self.__dict__.update(members)

    names = ("model", "train_set", "eval_sets", "collate", "weight", "loss")
    check(Mine(**dict.fromkeys(names, lambda *_: None)))
    # inherited from the protocol, not written
    with pytest.raises(ValueError, match="lacks eval_sets, loss"):
        check(Mine(**dict.fromkeys(("model", "train_set", "collate", "weight"), lambda *_: None)))


def test_what_is_no_task_is_reported_what_it_lacks():
    class Half:
        def model(self): ...
        def metrics(self): ...

    with pytest.raises(
        ValueError, match="lacks train_set, eval_sets, collate, weight, loss, update"
    ):
        check(Half())
    with pytest.raises(ValueError, match="the train set is a generator"):
        check_sets((x for x in range(3)), {})
    with pytest.raises(ValueError, match="validation set is empty"):
        check_sets([1], {"validation": []})


def test_gpt_saves_what_transformers_loads(tmp_path, text_folder):
    words = [
        "gpt",
        "--task.data",
        str(text_folder),
        "--task.layers",
        "1",
        "--task.width",
        "32",
        "--task.block",
        "16",
        "--task.tokenizer",
        "bpe",
        "--task.vocab",
        "300",
        "--duration",
        "3",
        "--run.dir",
        "run",
        "--track",
        "none",
    ]
    run(train, words, folder=tmp_path).ok()
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

    final = tmp_path / "run" / "final"
    model = GPT2LMHeadModel.from_pretrained(final)
    weights = load_file(final / "model.safetensors")
    assert torch.equal(model.transformer.wte.weight, weights["transformer.wte.weight"])
    assert model.lm_head.weight is model.transformer.wte.weight  # tied weights are saved once
    assert "lm_head.weight" not in weights
    assert PreTrainedTokenizerFast(tokenizer_file=str(final / "tokenizer.json")).encode("the cat")
