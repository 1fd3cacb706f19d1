"""Text embeddings from pairs: the losses of sentence-transformers, data, and an export that it
loads."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import Table, parquet
from torch.nn import functional as F

from oneloop.task_protocol.protocol import check
from oneloop.task_protocol.whole_batch import columns_of, loss_alone
from oneloop.tasks.text_pairs import TextPairs
from oneloop.tools.check.check_data import check_data
from worlds import after, run, train

pytestmark = pytest.mark.covers(
    "oneloop.task_protocol.evaluation_metrics",
    "oneloop.task_protocol.protocol",
    "oneloop.task_protocol.whole_batch",
    "oneloop.tasks.docstring_pairs",
    "oneloop.tasks.rows.text_tables",
    "oneloop.tasks.text_encoders",
    "oneloop.tasks.text_pairs",
)

COLOURS = ["red", "green", "blue", "black", "white", "pink", "brown", "grey"]
THINGS = ["cat", "dog", "house", "tree", "car", "bird", "fish", "boat"]
SMALL = ["--task.layers", "1", "--task.width", "32", "--task.length", "24", "--task.vocab", "300"]


def pairs(file: Path, number: int = 120, seed: int = 0) -> Path:
    draw = random.Random(seed)
    with file.open("w") as out:
        writer = csv.writer(out)
        writer.writerow(["anchor", "positive", "wrong", "also wrong"])
        for _ in range(number):
            colour, thing, count = draw.choice(COLOURS), draw.choice(THINGS), draw.randrange(50)
            others = [f"{draw.choice(COLOURS)} {draw.choice(THINGS)}" for _ in range(2)]
            writer.writerow(
                [f"{colour} {thing} no {count}", f"no {count} is a {thing}, {colour}", *others]
            )
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pairs")
    pairs(made / "pairs.csv")
    return made


TINY = {"layers": 1, "width": 32, "length": 24, "vocab": 300}


def saved(folder: Path, rows: list[dict[str, str]], kind: str) -> Path:
    folder.mkdir()
    if kind == "parquet":
        parquet.write_table(Table.from_pylist(rows), folder / "train.parquet")
    else:
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


class Indexed(TextPairs):
    """With the indices that a run adds to each batch."""

    def collate(self, samples):
        return {**super().collate(samples), "index": torch.arange(len(samples))}


def task(folder: Path, **options) -> TextPairs:
    made = Indexed(str(folder / "pairs.csv"), layers=1, width=32, length=24, vocab=300, **options)
    check(made)
    return made


@pytest.fixture(scope="module")
def base(folder):
    """A model of transformers with its tokenizer, as a user has it, with a pooler that takes no
    part."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    made = task(folder)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertModel(
        BertConfig(vocab_size=300, max_position_embeddings=32, pad_token_id=0, **shape)
    )
    model.save_pretrained(folder / "base")
    made.reader.tokenizer.save_pretrained(folder / "base")
    return folder / "base"


def test_a_batch_holds_tokens_and_numbers_of_equal_texts(folder):
    made = task(folder, negatives="wrong, also wrong")
    sets = {"train": made.train_set(), **made.eval_sets()}
    assert sum(map(len, sets.values())) == 120 and len(sets["train"]) > 100
    batch = made.collate([sets["train"][index] for index in range(5)])
    assert batch["candidate_id"].shape == (5, 3) and batch["candidate.input_ids"].shape[0] == 15
    parts = made.embed(made.model().eval(), batch)
    assert parts["anchor"].shape == (5, 32) and parts["candidate"].shape == (5, 3, 32)
    texts = [made.reader.decode(text) for text, _ in sets["train"][0]]
    assert texts[0].startswith("[CLS] ") and len(texts) == 4


def test_equal_texts_are_counted_or_masked(tmp_path):
    rows = [("a b", "x"), ("a b", "y"), ("c d", "y"), ("e f", "z")] * 10
    lines = "\n".join(
        f"{one} {n if n > 9 else 0},{other} {n}" for n, (one, other) in enumerate(rows)
    )
    (tmp_path / "pairs.csv").write_text("anchor,positive\n" + lines)
    _, counted = task(tmp_path, held_out=0.1).notes
    assert (
        "1 anchors" not in counted
        and "are negatives of each other: --task.mask_duplicates true" in counted
    )
    _, masked = task(tmp_path, held_out=0.1, mask_duplicates=True).notes
    assert masked.endswith("they are not negatives of each other")


def test_masked_duplicates_do_not_count(folder):
    made = task(folder, mask_duplicates=True)
    samples = [made.train_set()[index] for index in range(6)]
    model = made.model().eval()
    twice = made.collate(samples + samples)
    with torch.no_grad():
        parts = made.embed(model, made.collate(samples))
        masked = loss_alone(made, model, twice)[0]
        counted = loss_alone(task(folder), model, twice)[0]
    similarity = (
        20 * F.normalize(parts["anchor"], dim=1) @ F.normalize(parts["candidate"][:, 0], dim=1).T
    )
    right, others = similarity.diagonal(), similarity + torch.log(torch.tensor(2.0))
    others.fill_diagonal_(-torch.inf)
    expected = torch.logaddexp(right, others.logsumexp(1)) - right  # each other pair occurs twice
    torch.testing.assert_close(masked, 2 * expected.sum(), rtol=1e-5, atol=1e-4)
    assert counted > masked + 1


def _theirs(base: Path, texts: list[list[str]], kind: str, **options):
    """Return loss and gradients of a loss of sentence-transformers, in float64."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    model = SentenceTransformer(str(base), device="cpu").double().eval()
    loss = getattr(losses, kind)(model, **options)
    features = [model.preprocess(column) for column in texts]
    with torch.enable_grad():
        value = loss(features, torch.zeros(len(texts[0])))
        value.backward()
    inner = model[0].model
    return value.detach(), {name: parameter.grad for name, parameter in inner.named_parameters()}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"positive": ""}, "a text of the pair is empty; fill it, or remove the row"),
        ({"positive": " \n"}, "a text of the pair is empty; fill it, or remove the row"),
        ({"anchor": ""}, "a text of the pair is empty; fill it, or remove the row"),
        ({"also": ""}, "a text of the pair is empty; fill it, or remove the row"),
        ({"wrong": "a 7"}, "a hard negative is equal to the positive; write another text"),
        ({"also": "a 7"}, "a hard negative is equal to the positive; write another text"),
    ],
)
def test_a_pair_from_which_nothing_is_learned_is_rejected(tmp_path, kind, row, why):
    rows = [
        {"anchor": f"q {n}", "positive": f"a {n}", "wrong": f"w {n}", "also": f"v {n}"}
        for n in range(40)
    ]
    TextPairs(str(saved(tmp_path / "good", rows, kind)), negatives="wrong,also", **TINY)
    rows[7] |= row
    data = str(saved(tmp_path / "bad", rows, kind))
    with pytest.raises(ValueError, match=rf"row \d+: {why}"):
        TextPairs(data, negatives="wrong,also", **TINY)
    findings = check_data("docstrings", ["--task.data", data, "--task.negatives", "wrong,also"])
    assert why in str(findings.unusable)


@pytest.mark.parametrize("negatives", ["", "wrong,also wrong"])
@pytest.mark.parametrize(
    "kind", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"]
)
def test_the_loss_is_that_of_sentence_transformers(folder, base, kind, negatives):
    made = task(folder, model=str(base), negatives=negatives)
    rows = list(csv.DictReader((folder / "pairs.csv").open()))[:12]
    columns = ["anchor", "positive", *(negatives.split(",") if negatives else [])]
    options = {"mini_batch_size": 4} if kind.startswith("Cached") else {}
    value, gradients = _theirs(
        base, [[row[name] for row in rows] for name in columns], kind, scale=20.0, **options
    )
    model = made.model().double().eval()
    samples = [made.encoded(made.reader, made.columns, int, row) for row in rows]
    loss, _ = loss_alone(made, model, made.collate(samples))
    (loss / len(rows)).backward()
    torch.testing.assert_close(loss.detach() / len(rows), value, rtol=1e-9, atol=0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-6, atol=1e-9)


def test_matryoshka_and_symmetric_losses_are_sums(folder, base):
    made = task(folder, model=str(base), matryoshka=[8, 16], symmetric=True, temperature=0.1)
    batch = made.collate([made.train_set()[index] for index in range(7)])
    model = made.model().eval()
    parts = made.embed(model, batch)
    loss, _ = made.batch_loss(parts, columns_of(made, batch))
    expected = 0.0
    for size in (8, 16, 32):
        a, b = (
            F.normalize(value[:, :size], dim=1)
            for value in (parts["anchor"], parts["candidate"][:, 0])
        )
        for similarity in (a @ b.T, b @ a.T):
            expected = (
                expected + F.cross_entropy(10 * similarity, torch.arange(7), reduction="sum") / 2
            )
    torch.testing.assert_close(loss, expected)
    with pytest.raises(ValueError, match="task.matryoshka 32 must be between 1 and 31"):
        task(folder, model=str(base), matryoshka=[32]).model()


@pytest.mark.parametrize(
    "pooling",
    [
        "mean",
        pytest.param("cls", marks=pytest.mark.slow),
        pytest.param("last", marks=pytest.mark.slow),
    ],
)
def test_sentence_transformers_loads_the_export_with_the_same_embeddings(
    folder, base, pooling, tmp_path
):
    from sentence_transformers import SentenceTransformer

    made = ["--task.model", str(base), "--task.length", "20"] if pooling != "mean" else SMALL
    words = [
        "docstrings",
        "--task.data",
        str(folder / "pairs.csv"),
        "--task.pooling",
        pooling,
        *made,
        "--duration",
        "3",
    ]
    words += [
        "--batch.size",
        "16",
        "--batch.micro",
        "4",
        "--eval.micro",
        "4",
        "--run.dir",
        "run",
        "--track",
        "none",
    ]
    config, ranks = ("fsdp2", 2) if pooling == "last" else ("single", 1)
    assert run(train, words, ranks=ranks, config=config, folder=tmp_path).codes == [0] * ranks
    model = SentenceTransformer(str(tmp_path / "run/final"), device="cpu")
    texts = ["green cat no 4", "no 4 is a cat,  green ", "word " * 60]
    theirs = model.encode(texts, convert_to_tensor=True)
    with (tmp_path / "new.csv").open("w") as out:
        csv.writer(out).writerows([["anchor", "positive"], *([text, text] for text in texts)])
    world = after(tmp_path, "predict", "run", "--data", "new.csv", "--to", "found.jsonl", "--raw")
    assert world.codes == [0], world.output
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    ours = np.array([row["anchor"] for row in found])
    assert np.abs(ours - theirs.numpy()).max() < 1e-5 and found[0]["similarity"] == pytest.approx(
        1.0, abs=1e-5
    )
    files = json.loads((tmp_path / "run/final/MANIFEST.json").read_text())["files"]
    assert {"modules.json", "1_Pooling/config.json", "tokenizer.json"} <= files.keys()


def test_a_run_compares_new_pairs_without_its_training_data(folder, tmp_path):
    data = pairs(tmp_path / "pairs.csv", seed=3)
    words = [
        "docstrings",
        "--task.data",
        str(data),
        *SMALL,
        "--duration",
        "4",
        "--batch.size",
        "16",
        "--run.dir",
        "run",
    ]
    assert run(train, [*words, "--track", "none"], folder=tmp_path).codes == [0]
    data.rename(tmp_path / "moved.csv")
    world = after(tmp_path, "predict", "run", "--data", "moved.csv", "--to", "found.jsonl")
    assert world.codes == [0], world.output
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 120


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "task.pooling 'max' is unknown; known: mean, cls, last"),
        ({"temperature": 0.0}, "task.temperature 0.0 must be positive"),
        ({"model": "bytes"}, "is not a folder saved by transformers; give one, bpe, or hf:ID"),
        ({"temperature": float("nan")}, "task.temperature nan must be positive"),
        ({"negatives": "positive"}, "'positive' is there twice; name each one once"),
        ({"matryoshka": [8, 8]}, "task.matryoshka: '8' is there twice"),
        ({"vocab": 100}, "task.vocab 100 is too small: a byte-level BPE needs at least 261"),
        ({"negatives": "wrongs"}, "name another with task.negatives"),
        ({"width": 30, "heads": 4}, "task.width 30 is not divisible by task.heads 4"),
    ],
)
def test_bad_keys_are_rejected(folder, options, message):
    shape = {"layers": 1, "width": 32, "length": 24, "vocab": 300} | options
    with pytest.raises(ValueError, match=message):
        TextPairs(str(folder / "pairs.csv"), **shape)


def test_a_row_that_is_twice_in_a_batch_is_not_its_own_negative(folder):
    made = task(folder)
    samples = [made.train_set()[index] for index in range(5)]
    batch = made.collate([*samples, samples[0]])
    batch["index"][5] = 0
    model = made.model().eval()
    with torch.no_grad():
        parts = made.embed(model, batch)
        loss = made.batch_loss(parts, columns_of(made, batch))[0]
    a, b = (F.normalize(value, dim=1) for value in (parts["anchor"], parts["candidate"][:, 0]))
    expected = 0.0
    for row in range(6):
        others = [j for j in range(6) if j == row or {j, row} != {0, 5}]
        expected -= (20 * a[row] @ b[others].T).log_softmax(0)[others.index(row)]
    torch.testing.assert_close(loss, expected)


def learned(folder: Path) -> str:
    return TextPairs(str(folder / "pairs.csv"), layers=1, width=32, length=24, vocab=320).recorded[
        "tokenizer"
    ]


def test_the_tokens_are_the_same_without_a_common_cache(folder, tmp_path):
    made = [
        run(
            learned,
            folder,
            variables={"ONELOOP_CACHE": str(tmp_path / name), "RAYON_NUM_THREADS": threads},
        ).ok()
        for name, threads in (("one", "1"), ("two", "2"), ("three", "2"))
    ]
    assert made[0] == made[1] == made[2] and (tmp_path / "one" / "bpe").is_dir()


def test_a_csv_without_rows_is_named(tmp_path):
    (tmp_path / "pairs.csv").write_text("anchor,positive\n")
    with pytest.raises(ValueError, match=r"pairs.csv has no rows; remove it"):
        TextPairs(str(tmp_path / "pairs.csv"))


def test_ranks_of_distinct_answers_are_those_of_a_set():
    """Copies count once, and every answer of an equal question is right."""
    from oneloop.tasks.retrieval_metrics import Retrieval

    draw = np.random.default_rng(0)
    questions, answers = draw.integers(0, 12, 60), draw.integers(0, 9, 60)
    queries = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))[questions]
    documents = torch.randn(9, 8, generator=torch.Generator().manual_seed(2))[answers]
    metrics = Retrieval(group=True)
    ids = [torch.tensor(questions) * 7 - 3, torch.tensor(answers) * 5 + 1]
    metrics.update(queries, documents, ids=ids)
    found = metrics.compute()

    def ranks(own: np.ndarray, other: np.ndarray, similar: torch.Tensor) -> list[int]:
        made = []
        for row in range(60):
            right = {int(other[n]) for n in range(60) if own[n] == own[row]}
            wrong = {
                int(other[n])
                for n in range(60)
                if int(other[n]) not in right and similar[row, n] >= similar[row, row]
            }
            made.append(1 + len(wrong))
        return made

    similar = queries @ documents.T
    for prefix, known in (
        ("", ranks(questions, answers, similar)),
        ("reverse_", ranks(answers, questions, similar.T)),
    ):
        assert found[f"{prefix}mrr"] == pytest.approx(np.mean([1 / rank for rank in known]))
        for k in (1, 5, 10):
            assert found[f"{prefix}recall@{k}"] == np.mean([rank <= k for rank in known])
    assert min(found["mrr"], found["reverse_mrr"]) < 1


def test_copies_of_answers_are_named_and_can_be_grouped(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    for name, answers in (("train", 40), ("validation", 5)):
        rows = [{"anchor": f"question {n}", "positive": f"answer {n % answers}"} for n in range(40)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"layers": 1, "heads": 2, "width": 32, "length": 24, "vocab": 300}
    plain = TextPairs(str(data), **keys)
    [note] = [note for note in plain.notes if "group_answers" in note]
    assert note.startswith("35 texts of validation are copies of another row's text")
    grouped = TextPairs(str(data), group_answers=True, **keys)
    assert not any("group_answers" in note for note in grouped.notes)

    # A model that finds every answer is right only if the copies are one.
    torch.manual_seed(0)
    anchors = torch.eye(40)
    metrics = [task.metrics() for task in (plain, grouped)]
    batch = {"anchor_id": torch.arange(40), "candidate_id": torch.arange(40)[:, None] % 5}
    candidate = torch.zeros(40, 1, 40)
    for number in range(40):
        candidate[number, 0, number % 5 :: 5] = 1.0
    for task, metric in zip((plain, grouped), metrics, strict=True):
        task.update(metric, batch, {"anchor": anchors, "candidate": candidate})
    assert metrics[1].compute()["recall@1"] == 1.0
