"""Text models of transformers: fine-tuned with frozen layers and layer-wise rates, and loaded in
transformers again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F

from oneloop.basics.seeds import key
from oneloop.data.order import order_of
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.text_encoders import TextReader
from oneloop.tasks.text_regression import TextRegression
from oneloop.tasks.token_classification import TokenClassification
from own_files import rows, write
from silent_cases import unfinished
from slow_cases import with_slow
from small_models import bert
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.text_classification",
    "oneloop.tasks.text_encoders",
    "oneloop.tasks.text_regression",
    "oneloop.tasks.text_rows",
    "oneloop.tasks.token_classification",
    "oneloop.tasks.transformers_models",
)


COMMON = [
    "--duration",
    "6",
    "--batch.size",
    "8",
    "--save.every",
    "3",
    "--eval.every",
    "0",
    "--track",
    "none",
]
COMMON += [
    "--task.held_out",
    "0.2",
    "--task.length",
    "12",
    "--optimizer.lr",
    "1e-3",
    "--run.dir",
    "run",
]
GROUPS = {"bert.embeddings": {"freeze": True}, "bert.encoder.layer.0": {"freeze": True}}
SPLITS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]


CASES = [("text_classification", *split) for split in SPLITS]
CASES += [("text_regression", "single", 1), ("token_classification", "fsdp2", 2)]


@pytest.mark.parametrize(("name", "config", "ranks"), with_slow(CASES, CASES[1:]))
def test_a_language_model_is_fine_tuned_gone_on_with_and_loaded_by_transformers(
    tmp_path, name, config, ranks
):
    write(tmp_path / "data", "jsonl", rows(120))
    bert(tmp_path / "bert")
    words = ["digits", "--task", name, "--task.data", "data", "--task.model", "bert", *COMMON]
    words += ["--optimizer.groups", json.dumps(GROUPS), "--optimizer.layer_decay", "0.5"]
    label = ["--task.label", "number"] if name == "text_regression" else []
    world = run(train, [*words, *label], ranks=ranks, config=config, folder=tmp_path)
    world.ok()
    assert (
        "classifier) is re-initialized: the weights have none" in world.output
        and "left out of the weights: cls" in world.output
    )
    assert "is not the sum" not in world.output  # the gradient of key biases is rounding noise
    printed = json.loads((tmp_path / "run" / "summary.json").read_text())
    final = tmp_path / "run" / "final"
    last = load_file(final / "model.safetensors")
    unfinished(tmp_path / "run", 3)
    run(train, [*words, *label], ranks=ranks, config=config, folder=tmp_path).ok()
    again = load_file(final / "model.safetensors")
    assert {tensor for tensor in last if not torch.equal(last[tensor], again[tensor])} == set()
    first = load_file(tmp_path / "bert" / "model.safetensors")
    frozen = [
        tensor for tensor in last if tensor.startswith(("bert.embeddings", "bert.encoder.layer.0."))
    ]
    assert frozen and all(torch.equal(first[tensor], last[tensor]) for tensor in frozen)
    assert not torch.equal(
        first["bert.encoder.layer.1.output.dense.weight"],
        last["bert.encoder.layer.1.output.dense.weight"],
    )

    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    kind = "Token" if name == "token_classification" else "Sequence"
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(final).eval()
    made = {"text_classification": TextClassification, "text_regression": TextRegression}.get(
        name, TokenClassification
    )
    task = made(
        str(tmp_path / "data"),
        model=str(tmp_path / "bert"),
        held_out=0.2,
        length=12,
        **({"label": label[1]} if label else {}),
    )
    held_out = task.eval_sets()["validation"]
    total = weight = 0.0
    with torch.no_grad():
        for index in range(len(held_out)):
            row = held_out.rows[index]
            if kind == "Token":
                inputs = tokenizer(
                    row["tokens"],
                    is_split_into_words=True,
                    return_tensors="pt",
                    truncation=True,
                    max_length=12,
                )
                first_of = [
                    inputs.word_ids().index(word)
                    for word in range(len(row["tokens"]))
                    if word in inputs.word_ids()
                ]
                tags = torch.tensor(
                    [model.config.label2id[tag] for tag in row["tags"][: len(first_of)]]
                )
                total += F.cross_entropy(
                    model(**inputs).logits[0, first_of], tags, reduction="sum"
                ).item()
                weight += len(first_of)
                continue
            logits = model(
                **tokenizer(row["text"], return_tensors="pt", truncation=True, max_length=12)
            ).logits
            if label:
                total += (logits[0, 0] - row["number"]).square().item()
            else:
                total += F.cross_entropy(
                    logits, torch.tensor([model.config.label2id[row["label"]]])
                ).item()
            weight += 1
    assert total / weight == pytest.approx(printed["eval/loss"], abs=1e-5)


def gpt(folder: Path) -> Path:
    """Save a small GPT-2 with a byte-level tokenizer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet
    )
    made.train_from_iterator([row["text"] for row in rows(120)], trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>"
    ).save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=300,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), SPLITS)
def test_a_language_model_continues_learning(tmp_path, config, ranks):
    write(tmp_path / "data", "jsonl", rows(120))
    gpt(tmp_path / "gpt")
    words = [
        "digits",
        "--task",
        "causal_lm",
        "--task.data",
        "data",
        "--task.model",
        "gpt",
        "--task.block",
        "16",
    ]
    words += [
        "--task.held_out",
        "0.2",
        "--duration",
        "6",
        "--batch.size",
        "8",
        "--save.every",
        "3",
        "--eval.every",
        "0",
    ]
    words += [
        "--optimizer.groups",
        '{"transformer.wte": {"freeze": true}}',
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
    final = tmp_path / "run" / "final"
    last, first = (
        load_file(final / "model.safetensors"),
        load_file(tmp_path / "gpt" / "model.safetensors"),
    )
    tied = next(name for name in first if name.endswith("wte.weight"))
    assert torch.equal(first[tied], last[tied]) and "lm_head.weight" not in last
    printed = json.loads((tmp_path / "run" / "summary.json").read_text())
    unfinished(tmp_path / "run", 3)
    run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
    again = load_file(final / "model.safetensors")
    assert all(torch.equal(last[name], again[name]) for name in last)

    model = transformers.AutoModelForCausalLM.from_pretrained(final).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    task = CausalLM(str(tmp_path / "data"), model=str(tmp_path / "gpt"), block=16, held_out=0.2)
    total = count = size = 0.0
    with torch.no_grad():
        held_out = task.eval_sets()["validation"]
        for index in range(len(held_out)):
            tokens = torch.tensor(held_out[index].tolist())[None]
            loss = F.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:], reduction="sum")
            total, count = total + loss.item(), count + tokens.shape[1] - 1
            texts = tokenizer.decode(tokens[0, 1:], skip_special_tokens=True)
            size += len(texts.encode())
    assert total / count == pytest.approx(printed["eval/loss"], abs=1e-5)
    assert total / math.log(2) / size == pytest.approx(printed["eval/bits_per_byte"], rel=1e-5)


def test_a_language_model_that_does_not_fit_is_reported(tmp_path):
    write(tmp_path / "data", "jsonl", rows(60))
    own = {"data": str(tmp_path / "data"), "held_out": 0.2}
    with pytest.raises(ValueError, match="task.block 64 exceeds the 32 positions"):
        CausalLM(**own, model=str(gpt(tmp_path / "gpt")), block=64).model()
    with pytest.raises(ValueError, match="'gpt2' is not a folder saved by transformers"):
        CausalLM(**own, model="gpt2")
    with pytest.raises(ValueError, match="the tokenizer has no end token"):
        CausalLM(**own, model=str(bert(tmp_path / "bert")))
    bert(tmp_path / "gpt")
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    ).save_pretrained(tmp_path / "gpt")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt")
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(tmp_path / "gpt")
    with pytest.raises(ValueError, match="its tokenizer has .* entries, and the model 9"):
        CausalLM(**own, model=str(tmp_path / "gpt")).model()


def test_pairs_are_read_as_the_tokenizer_reads_them(tmp_path):
    made = TextReader(model=str(bert(tmp_path / "bert")), length=12)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    pairs = [("alpha 1", "beta 2"), ("gamma 17 alpha", "beta"), ("alpha", None)]
    batch = made.collate([made.encode(*pair) for pair in pairs[:2]])
    texts = [list(side) for side in zip(*pairs[:2], strict=True)]
    expected = tokenizer(*texts, padding=True, return_tensors="pt", truncation=True, max_length=12)
    assert set(expected) <= set(batch) and all(
        torch.equal(batch[name], expected[name]) for name in expected
    )
    assert made.decode(made.encode(*pairs[2])) == tokenizer.decode(tokenizer("alpha")["input_ids"])


def test_a_shape_alone_is_drawn_from_the_seed(tmp_path):
    write(tmp_path / "data", "jsonl", rows(30))
    task = TextClassification(
        str(tmp_path / "data"),
        model=str(bert(tmp_path / "bert")),
        pretrained=False,
        held_out=0.2,
        length=16,
    )
    about_data = task.notes
    torch.manual_seed(key(0))
    model = task.model()
    trained = load_file(tmp_path / "bert" / "model.safetensors")[
        "bert.embeddings.word_embeddings.weight"
    ]
    assert not torch.equal(model.bert.embeddings.word_embeddings.weight, trained)
    assert task.notes == about_data


BAD = {
    "nothing there": (lambda folder: "nowhere", "'nowhere' is not a folder saved by transformers"),
    "weights of another shape": (
        lambda folder: spoiled(folder, "encoder"),
        "the weights do not fit this model \\(missing: ",
    ),
    "pickles": (lambda folder: pickled(folder), "cannot be loaded: .*safetensors"),
    "no tokenizer": (lambda folder: without(folder, "tokenizer*"), "no tokenizer"),
    "code beside it": (lambda folder: with_code(folder), "trust_remote_code"),
}


def spoiled(folder: Path, part: str) -> str:
    from safetensors.torch import save_file

    weights = load_file(bert(folder) / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if part not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def pickled(folder: Path) -> str:
    torch.save(load_file(bert(folder) / "model.safetensors"), folder / "pytorch_model.bin")
    return without(folder, "model.safetensors")


def without(folder: Path, names: str) -> str:
    if not folder.exists():
        bert(folder)
    for file in folder.glob(names):
        file.unlink()
    return str(folder)


def with_code(folder: Path) -> str:
    config = json.loads((bert(folder) / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('it was run')")
    return str(folder)


@pytest.mark.parametrize("name", BAD)
def test_models_that_are_none_are_reported(tmp_path, name):
    make, expected_text = BAD[name]
    write(tmp_path / "data", "jsonl", rows(30))
    with pytest.raises(ValueError, match=expected_text):
        TextClassification(
            str(tmp_path / "data"), model=make(tmp_path / "bert"), held_out=0.2, length=16
        ).model()


def test_texts_that_do_not_fit_are_reported(tmp_path):
    own = str(bert(tmp_path / "bert"))
    with pytest.raises(ValueError, match="task.length 17 exceeds the 16 positions"):
        TextReader(model=own, length=17).model(["a", "b"])
    with pytest.raises(
        ValueError, match="task.length 2 has no room for text next to the special tokens"
    ):
        TextReader(model=own, length=2).encode("alpha 1", "beta 2")
    words = TextReader(model=own, length=12)
    assert len(words.encode_words(["alpha", "beta"])[1]) == 2
    with pytest.raises(ValueError, match="word 1 .* has no tokens; remove it"):
        words.encode_words(["alpha", " ", "beta"])
    with pytest.raises(ValueError, match="the text has no tokens; remove the row"):
        TextReader(model=str(gpt(tmp_path / "gpt")), length=12).encode("")


@pytest.mark.slow
def test_the_losses_are_those_of_transformers_own_trainer(tmp_path):
    write(tmp_path / "data", "jsonl", rows(240))
    bert(tmp_path / "bert")
    words = [
        "digits",
        "--task",
        "text_classification",
        "--task.data",
        "data",
        "--task.model",
        "bert",
        *COMMON,
    ]
    words += ["--optimizer.lr", "5e-3", "--duration", "40", "--log.every", "1"]
    words += ["--optimizer.clip", "0.5", "--optimizer.weight_decay", "0.01"]
    words += ["--schedule.name", "constant", "--schedule.warmup", "0"]
    run(train, words, folder=tmp_path).ok()
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    ours = [line["train/loss"] for line in lines if "train/loss" in line]

    task = TextClassification(
        str(tmp_path / "data"), model=str(tmp_path / "bert"), held_out=0.2, length=12
    )
    torch.manual_seed(key(0))
    model = task.model()
    train_set = task.train_set()
    _, ids = order_of(train_set, seed=0, batch=8)[0:320]

    class Ordered(torch.utils.data.Dataset):
        def __len__(self):
            return 320

        def __getitem__(self, position):
            return train_set[int(ids[position])]

    theirs = []

    class Noting(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            theirs.append(loss.item())
            return loss

    def collate(samples):
        batch = task.collate(samples)
        return {**batch, "labels": batch.pop("label")}

    how = {
        "per_device_train_batch_size": 8,
        "max_steps": 40,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
    }
    how |= {
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
    }
    how |= {
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    arguments = transformers.TrainingArguments(str(tmp_path / "trainer"), **how)
    Noting(model=model, args=arguments, train_dataset=Ordered(), data_collator=collate).train()
    assert len(ours) == len(theirs) == 40 and ours[-1] < 0.9 * ours[0]
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"largest difference {worst:.1e}, losses {ours[0]:.4f} to {ours[-1]:.4f}")
    assert worst < 1e-4
