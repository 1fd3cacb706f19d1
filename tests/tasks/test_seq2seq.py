"""The task ``seq2seq``: losses of transformers' Seq2SeqTrainer, texts, files, and wrong inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing

from oneloop.basics.seeds import key
from oneloop.data.order import order_of
from oneloop.tasks.language.tokens import ending_tokenizer
from oneloop.tasks.packaged_rows import SPLITS, PackagedRows
from oneloop.tasks.seq2seq import Seq2Seq
from worlds import after, each_message, run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.seq2seq",
    "oneloop.tasks.language.source_target",
    "oneloop.tasks.language.encoder_decoder",
    "oneloop.tasks.packaged_rows",
    "oneloop.tasks.language.token_targets",
)
STEPS, BATCH = 40, 16


def pairs(count: int) -> list[dict[str, str]]:
    """Return pairs of different lengths, so that padding matters."""
    rows = PackagedRows("numbers", "train")
    return [{"english": rows[i]["target"], "digits": rows[i]["source"]} for i in range(count)]


def tokenizer_of_numbers() -> Any:
    texts = [text for row in PackagedRows("numbers", "train") for text in row.values()]
    return ending_tokenizer(texts, 300)


def a_model(folder: Path, kind: str, **more: Any) -> Path:
    """Save a tiny encoder-decoder model without dropout, and its tokenizer."""
    tokenizer = tokenizer_of_numbers()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    common = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1} | more
    if kind == "T5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
        start = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
        config = transformers.T5Config(**{**common, **sizes, **start, **more})
        model: Any = transformers.T5ForConditionalGeneration(config)
    else:
        sizes = {"d_model": 32, "max_position_embeddings": 64, "bos_token_id": 1}
        for side in ("encoder", "decoder"):
            sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
        start = {"decoder_start_token_id": 1, "dropout": 0.0, "forced_eos_token_id": None}
        config = getattr(transformers, f"{kind}Config")(**{**common, **sizes, **start, **more})
        names = {"Bart": "BartForConditionalGeneration", "Marian": "MarianMTModel"}
        model = getattr(transformers, names[kind])(config)
    model.save_pretrained(folder)
    return folder


def data_in(folder: Path, count: int = 200) -> None:
    lines = [json.dumps(row) + "\n" for row in pairs(count)]
    (folder / "pairs.jsonl").write_text("".join(lines))


def words(*more: str) -> list[str]:
    settings = {
        "task": "seq2seq",
        "task.data": "pairs.jsonl",
        "task.source": "english",
        "task.target": "digits",
        "task.model": "model",
        "task.length": "32",
        "task.target_length": "12",
        "duration": "4",
        "batch.size": str(BATCH),
        "optimizer.lr": "2e-3",
        "eval.every": "0",
        "schedule.name": "constant",
        "schedule.warmup": "0",
        "log.every": "1",
        "track": "none",
        "machine.workers": "0",
        "run.dir": "run",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return [*flags, *more]


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "smoothing"), [("T5", 0.0), ("T5", 0.1), ("Bart", 0.0), ("Bart", 0.1)]
)
def test_the_losses_are_those_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, smoothing: float
) -> None:
    a_model(tmp_path / "model", kind)
    data_in(tmp_path)
    more = ["--duration", str(STEPS), "--optimizer.weight_decay", "0", "--optimizer.clip", "1.0"]
    more += ["--optimizer.betas", "[0.9,0.999]", "--task.label_smoothing", str(smoothing)]
    run(train, words(*more), folder=tmp_path).ok()
    ours = losses(tmp_path / "run")

    # The same samples in the same order.
    monkeypatch.chdir(tmp_path)
    task = Seq2Seq("pairs.jsonl", "english", "digits", model="model", length=32, target_length=12)
    torch.manual_seed(key(0))
    model: Any = task.model()
    data = task.train_set()
    _, ids = order_of(data, seed=0, batch=BATCH)[0 : STEPS * BATCH]
    rows = []
    for index in ids.tolist():
        source, target = data[index].documents
        rows.append({"input_ids": source.tolist(), "labels": target.tolist()})

    theirs = []

    class Recorded(transformers.Seq2SeqTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            theirs.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        label_smoothing_factor=smoothing,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    collator = transformers.DataCollatorForSeq2Seq(task.tokenizer, model=model)
    Recorded(model, arguments, train_dataset=rows, data_collator=collator).train()
    assert len(theirs) == len(ours) == STEPS
    assert ours[0] - ours[-1] > 1.0
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("kind", ["T5", "Bart", "Marian"])
def test_the_loss_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    a_model(tmp_path / "model", kind)
    data_in(tmp_path)
    task = Seq2Seq(
        str(tmp_path / "pairs.jsonl"),
        "english",
        "digits",
        model=str(tmp_path / "model"),
        length=32,
        target_length=12,
    )
    model: Any = task.model().eval()
    batch = task.collate([task.train_set()[index] for index in range(5)])
    assert (batch["target"] < 0).any() and (batch["mask"] == 0).any()
    with torch.no_grad():
        total, _ = task.loss(model, batch)
        labels = batch["target"]
        mean = model(input_ids=batch["input"], attention_mask=batch["mask"], labels=labels).loss
    assert float(total / task.weight(batch)) == pytest.approx(float(mean), rel=1e-6)


def test_texts_files_and_predictions(tmp_path: Path) -> None:
    """Generated metrics are those of a loop by hand; final/ and an export write the same texts."""
    from torchmetrics.text import CHRFScore, ROUGEScore, SacreBLEUScore

    a_model(tmp_path / "model", "T5")
    data_in(tmp_path)
    more = ["--eval.generate", "all", "--eval.micro", "8", "--task.prefix", "say "]
    more += ["--task.source", "digits", "--task.target", "english", "--duration", "40"]
    more += ["--task.target_length", "32", "--optimizer.lr", "1e-2", "--log.every", "20"]
    run(train, words(*more), folder=tmp_path).ok()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "eval/loss" in line][-1]

    # Generate by hand, with what final/ holds.
    final = tmp_path / "run/final"
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(final).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    after(tmp_path, "predict", "run", "--to", "found.jsonl").ok()
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    texts = []
    for start in range(0, len(found), 8):
        sources = [row["source"] for row in found[start : start + 8]]
        batch = tokenizer(sources, return_tensors="pt", padding=True)
        tokens = model.generate(**batch, max_new_tokens=32, do_sample=False)
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert [row["answer"] for row in found] == texts
    assert all(row["source"].startswith("say ") for row in found)

    # Rows to predict may have targets, or none.
    rows = [{"digits": "40", "english": "forty"}, {"digits": "41", "english": ""}]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    after(tmp_path, "predict", "run", "--data", "new.jsonl", "--to", "new.csv.jsonl").ok()
    (forty, other) = map(json.loads, (tmp_path / "new.csv.jsonl").read_text().splitlines())
    assert forty["target"] == "forty" and forty["tokens"] > 1 and other["loss"] is None
    references = [row["target"] for row in found]
    in_words = {}
    for split in SPLITS:
        in_words |= {row["source"]: row["target"] for row in PackagedRows("numbers", split)}
    assert [in_words[row["source"][4:]] for row in found] == references

    # The metrics of torchmetrics.
    nested = [[reference] for reference in references]
    assert logged["eval/bleu"] == pytest.approx(float(SacreBLEUScore()(texts, nested)), rel=1e-6)
    chrf = CHRFScore(n_word_order=0)(texts, nested)
    assert logged["eval/chrf"] == pytest.approx(float(chrf), rel=1e-6)
    rouge = ROUGEScore(rouge_keys=("rouge1", "rouge2", "rougeL"))(texts, references)
    for name in ("rouge1", "rouge2", "rougeL"):
        assert logged[f"eval/{name}"] == pytest.approx(float(rouge[f"{name}_fmeasure"]), rel=1e-6)
    same = [text == reference for text, reference in zip(texts, references, strict=True)]
    assert logged["eval/exact_match"] == pytest.approx(sum(same) / len(same))
    assert logged["eval/chrf"] > 0.1


@pytest.mark.slow
def test_adapters_are_saved_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_model(tmp_path / "model", "T5")
    data_in(tmp_path)
    more = ["--task.lora.rank", "4", "--optimizer.lr", "0.01", "--duration", "6"]
    run(train, words(*more), folder=tmp_path).ok()
    final = tmp_path / "run/final"
    assert json.loads((final / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    assert all("lora_" in name for name in load_file(final / "adapter_model.safetensors"))

    from peft import PeftModel

    from oneloop import export

    export(tmp_path / "run", to=tmp_path / "merged", merged=True)
    merged = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    base = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    batch = {"input_ids": torch.arange(3, 13)[None], "decoder_input_ids": torch.tensor([[0, 5, 9]])}
    with torch.no_grad():
        before = base(**batch).logits
        adapted = PeftModel.from_pretrained(base, final).eval()(**batch).logits
        both = merged(**batch).logits
    assert not torch.allclose(adapted, before, atol=1e-4)
    assert torch.allclose(adapted, both, atol=1e-4)


def test_long_texts_are_cut_before_their_end_or_dropped(tmp_path: Path) -> None:
    a_model(tmp_path / "model", "T5")
    data_in(tmp_path)
    model, file = str(tmp_path / "model"), str(tmp_path / "pairs.jsonl")
    common: dict[str, Any] = {"source": "english", "target": "digits", "model": model}
    cut = Seq2Seq(file, length=8, target_length=12, **common)
    whole = Seq2Seq(file, length=32, target_length=12, **common)
    dropped = Seq2Seq(file, length=8, target_length=12, overlong="drop", **common)
    sources = [cut.train_set()[index].documents[0] for index in range(len(cut.train_set()))]
    long = [whole.train_set()[index].documents[0] for index in range(len(whole.train_set()))]
    assert max(map(len, sources)) == 8 and max(map(len, long)) > 8
    for short, full in zip(sources, long, strict=True):
        assert short[-1] == full[-1] == 1
        assert short[:-1].tolist() == full[: len(short) - 1].tolist()
    fitting = [full for full in long if len(full) <= 8]
    assert len(dropped.train_set()) == len(fitting)
    limit = "are longer than task.length (8 source tokens) or task.target_length (12 target tokens)"
    assert any(limit in note for note in cut.notes)
    with pytest.raises(ValueError, match=r"train: all 182 pairs are longer than task\.length \(2 "):
        Seq2Seq(file, length=2, target_length=12, overlong="drop", **common)


def test_a_source_without_an_end_token_is_cut_at_its_end(tmp_path: Path) -> None:
    from oneloop.tasks.language.source_target import encoded_source

    tokenizer = tokenizer_of_numbers()
    row = {"source": "forty thousand and one", "target": "40001"}
    columns = {key: key for key in row}
    whole = encoded_source(row, columns, tokenizer, prefix="", lengths=(99, 99)).tolist()
    source, target = whole[2 : 2 + whole[0]], whole[2 + whole[0] :]
    assert whole[1] == 0 and len(source) > 4 and source[-1] == target[-1] == 1

    # The end token stays; the number says whether the target is cut.
    for lengths, is_cut in (((3, 99), 0), ((3, 2), 1)):
        cut = encoded_source(row, columns, tokenizer, prefix="", lengths=lengths).tolist()
        expected = [*target[: lengths[1] - 1], 1] if is_cut else target
        assert cut == [3, is_cut, *source[:2], 1, *expected]

    # Without an end token, a source is cut at its end.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A", special_tokens=[])
    cut = encoded_source(row, columns, tokenizer, prefix="", lengths=(3, 99)).tolist()
    assert cut == [3, 0, *source[:3], *target]


def test_cut_targets_are_no_references(tmp_path: Path) -> None:
    a_model(tmp_path / "model", "T5")
    data_in(tmp_path)
    common: dict[str, Any] = {"source": "english", "target": "digits", "length": 32}
    file, model = str(tmp_path / "pairs.jsonl"), str(tmp_path / "model")
    for length, is_cut in ((12, False), (2, True)):
        task = Seq2Seq(file, model=model, target_length=length, **common)
        reason = task.eval_sets()["validation"].cut_references
        assert bool(reason) == is_cut and ("task.target_length" in reason) == is_cut


def test_settings_of_the_model_that_change_the_form_of_texts_do_not_apply(tmp_path: Path) -> None:
    a_model(tmp_path / "model", "Bart")
    data_in(tmp_path)
    task = Seq2Seq(
        str(tmp_path / "pairs.jsonl"), "english", "digits", model=str(tmp_path / "model"), length=32
    )
    model: Any = task.model().eval()
    batch = task.collate([task.train_set()[index] for index in range(3)])
    plain = task.generate(model, batch)["texts"]
    model.generation_config.return_dict_in_generate = True
    model.generation_config.num_return_sequences = 2
    model.generation_config.eos_token_id = None
    assert task.generate(model, batch)["texts"] == plain and len(plain) == 3


def test_a_tokenizer_from_scratch_is_trained_on_the_training_texts(tmp_path: Path) -> None:
    rows = [{"source": f"purplish {n}", "target": f"zyxwv {n}"} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Seq2Seq(str(tmp_path / "rows.jsonl"), vocab=300)
    assert len(task.tokenizer("purplish")["input_ids"]) == 2  # the word and the end token
    assert len(task.tokenizer("seventeen")["input_ids"]) > 5


WRONG = [
    ("no target column", [], {"rows": [{"no target": ""}]}, "digits"),
    ("an empty source", [], {"rows": [{"english": " ", "digits": "1"}]}, "the source is empty"),
    ("an empty target", [], {"rows": [{"english": "one", "digits": ""}]}, "the target is empty"),
    ("numbers", [], {"rows": [{"digits": 1}]}, "task.target must name texts"),
    ("a decoder", [], {"kind": "gpt2"}, "is not an encoder-decoder model (gpt2)"),
    ("no start", [], {"config": {"decoder_start_token_id": None}}, "no decoder_start_token_id"),
    ("no padding", [], {"config": {"pad_token_id": None}}, "no pad_token_id"),
    ("no pad token", [], {"tokenizer": {"pad_token": None}}, "its tokenizer has no pad_token"),
    ("no end token", [], {"tokenizer": {"eos_token": None}}, "its tokenizer has no eos_token"),
    ("a long source", ["--task.length", "65"], {}, "task.length 65 exceeds the 64 positions"),
    ("a long target", ["--task.target_length", "70"], {}, "task.target_length 70 exceeds the 64"),
    ("no beams", ["--task.beams", "0"], {}, "task.beams 0 must be at least 1"),
    ("no answer", ["--task.answer", "0"], {}, "task.answer 0 must be at least 1"),
    ("smoothing", ["--task.label_smoothing", "1"], {}, "task.label_smoothing 1.0 must be"),
    ("a metric", ["--task.text_metrics", "[meteor]"], {}, "'meteor' is unknown; known: exact"),
    ("no nltk", ["--task.text_metrics", "[rougeLsum]"], {}, "rougeLsum needs nltk"),
    ("too many entries", [], {"config": {"vocab_size": 280}}, "its tokenizer has 300 entries"),
    ("languages", [], {"kind": "languages"}, "needs the languages"),
    ("generate", ["--eval.generate", "-1"], {}, "eval.generate"),
]


def rows_with(changed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of which one is changed, or all if a column has no texts or is missing."""
    rows: list[dict[str, Any]] = pairs(40)
    if "no target" in changed:
        return [{"english": row["english"]} for row in rows]
    if changed.get("digits") == 1:
        return [row | {"digits": 1} for row in rows]
    rows[17] |= changed
    return rows


def lay_wrong(folder: Path, model: Path, changes: dict[str, Any]) -> None:
    """Write the data and the model of a wrong input; ``model`` is the one without changes."""
    if "config" in changes:
        a_model(folder / "model", "Bart", **changes["config"])
    else:
        shutil.copytree(model, folder / "model")
    data_in(folder, 40)
    if "rows" in changes:
        lines = [json.dumps(row) + "\n" for row in rows_with(changes["rows"][0])]
        (folder / "pairs.jsonl").write_text("".join(lines))
    if changes.get("kind") == "gpt2":
        config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    if changes.get("kind") == "languages":
        vocabulary = {f"w{number}": number for number in range(300)}
        tokenizer = transformers.NllbTokenizer(vocab=vocabulary, merges=[])
        tokenizer.save_pretrained(folder / "model")
    if "tokenizer" in changes:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
        for name, value in changes["tokenizer"].items():
            setattr(tokenizer, name, value)
        tokenizer.save_pretrained(folder / "model")


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, str]]:
    """Return the folder, exit code and output of each wrong input, by its name.

    One process runs all of them, each on files of its own.
    """
    top = tmp_path_factory.mktemp("wrong")
    model = a_model(top / "model", "Bart")
    several = []
    for name, more, changes, _ in WRONG:
        lay_wrong(top / name, model, changes)
        places = ["--task.data", str(top / name / "pairs.jsonl")]
        places += ["--task.model", str(top / name / "model"), "--run.dir", str(top / name / "run")]
        several.append(words(*more, *places))
    (found,) = run(each_message, several, folder=top).ok()
    by_name = {}
    for (name, *_), (code, output) in zip(WRONG, found, strict=True):
        by_name[name] = (top / name, code, output)
    return by_name


@pytest.mark.parametrize(
    ("name", "message"), [(w[0], w[3]) for w in WRONG], ids=[w[0] for w in WRONG]
)
def test_wrong_inputs(messages: dict[str, tuple[Path, Any, str]], name: str, message: str) -> None:
    folder, code, output = messages[name]
    assert code == 2, output
    assert message in output, output
    assert "Traceback" not in output
    assert not (folder / "run").exists()


def test_sources_of_a_mixture_may_name_their_columns(tmp_path):
    others = [{"from": row["digits"], "to": row["english"]} for row in pairs(60)]
    for name, rows in {"a": pairs(60), "b": others}.items():
        lines = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    mixture = [
        {"data": str(tmp_path / "a.jsonl")},
        {"data": str(tmp_path / "b.jsonl"), "source": "from", "target": "to"},
    ]
    task = Seq2Seq(mixture, source="digits", target="english", vocab=300, held_out=0.2)
    tokens: dict[str, set[str]] = {"a": set(), "b": set()}
    for split in (task.train_set(), *task.eval_sets().values()):
        for name in tokens:
            samples = [split.sets[name][index] for index in range(len(split.sets[name]))]
            tokens[name] |= {str([part.tolist() for part in one.documents]) for one in samples}
    assert tokens["a"] == tokens["b"] and len(tokens["a"]) == 60
