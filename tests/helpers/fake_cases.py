"""Small recipes that run on fake CUDA tensors: all packaged ones, and others on the same data."""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Callable
from pathlib import Path

import transformers

import own_files
import preference_rows
import small_models
from adapters import a_base
from fake_steps import Prepared
from oneloop.tasks.language.tokens import ending_tokenizer
from oneloop.tasks.packaged_rows import PackagedRows

_SMALL = ["--task.width", "32", "--task.heads", "2", "--task.layers", "2"]
_BATCH = ["--batch.size", "4", "--batch.micro", "2"]
# Some log steps repeat a micro-batch, which waits for the device.
_NO_REPEATS = ["--machine.check_every", "0"]

# keys of each recipe besides _BATCH; {name} is a path of a data set or a model
RECIPES = {
    "digits": "digits",
    "images": "images --task.data {images}",
    "gpt": "gpt --task.data {texts} --task.block 32",
    "gpt2": "gpt2 --task.data {texts} --task.block 32 --task.vocab 300 --task.padded_vocab 512",
    "llama": "llama --task.data {texts} --task.block 64 --task.vocab 300",
    "llama-1b": "llama-1b --task.data {texts} --task.block 32 --task.vocab 300 "
    "--task.padded_vocab 512 --task.kv_heads 1 --task.mlp 64",
    "llama-7b": "llama-7b --task.data {texts} --task.block 32 --task.vocab 300 "
    "--task.padded_vocab 512 --task.mlp 64",
    "sft": "sft",
    "preference": "preference",
    "distil": "distil --task.teacher {base} --task.length 96 --task.top_k 8",
    "snippets": "snippets --task.data {rows} --task.length 64",
    "docstrings": "docstrings --task.data {pairs} --task.length 24",
    "bert": "bert --task.data {texts} --task.block 32 --task.vocab 300",
    "numbers": "numbers --task.length 16",
}
OTHERS = {
    "gpt packed": RECIPES["gpt"] + " --task.pack packed",
    "sft packed": "sft --task.pack packed",
    "reward": "{reward.yaml}",
    "bert classifier": "{classifier.yaml}",
    "bart": "{bart.yaml}",
    "bert packed": "bert --task.data {texts} --task.block 32 --task.vocab 300 --task.pack packed",
    "lora": "sft --task.pack padded --task.length 96 --task.model {base} --task.lora.rank 4",
    "lora packed": "sft --task.pack packed --task.length 96 --task.model {base} --task.lora.rank 4",
    "recompute": RECIPES["llama"] + " --machine.recompute full",
    "grain": RECIPES["gpt"] + " --batch.grain 2 --ema.half_life 5ep",
    "window": RECIPES["gpt"] + " --guard.sigma 6 --ema.half_life 5ep",
    "muon": RECIPES["gpt"] + " --optimizer.name muon --ema.power [0.1]",
    "bf16 parameters": "{half.yaml}",
    "clip": "{contrast.yaml} --task.loss clip",
    "siglip": "{contrast.yaml} --task.loss siglip --task.dropout 0.1",
    "supcon": "{contrast.yaml} --task.loss supcon",
}
_OF_TRANSFORMERS = (
    "preference",
    "distil",
    "gpt",
    "gpt2",
    "llama",
    "llama-1b",
    "llama-7b",
    "sft",
    "snippets",
    "docstrings",
    "bert",
    "numbers",
)


def prepared(folder: Path) -> Callable[[str], Prepared]:
    """Return a function that prepares the case of a name, each one once."""
    return functools.cache(functools.partial(_prepared, folder))


def words(folder: Path, name: str) -> list[str]:
    """Return a case as the words of a command line; write its data, if they are not there."""
    text = {**RECIPES, **OTHERS}[name]
    paths = {}
    for data, write in _DATA.items():
        paths[data] = folder / data
        if f"{{{data}}}" in text and not paths[data].exists():
            write(paths[data])
    for data, path in paths.items():
        text = text.replace(f"{{{data}}}", str(path))
    made = text.split()
    small = _SMALL if made[0] in _OF_TRANSFORMERS and "--task.model" not in made else []
    batch = _BATCH[:2] if "--batch.grain" in made else _BATCH
    return [*made, *small, *batch, *_NO_REPEATS]


def _prepared(folder: Path, name: str) -> Prepared:
    return Prepared(words(folder, name))


def _texts(folder: Path) -> None:
    folder.mkdir()
    for number in range(40):
        lines = [f"line {line} of text {number * line}" for line in range(40)]
        (folder / f"{number}.txt").write_text("\n".join(lines))


def _pairs(folder: Path) -> None:
    folder.mkdir()
    with (folder / "pairs.csv").open("w") as file:
        out = csv.writer(file)
        out.writerow(["anchor", "positive"])
        out.writerows([f"question {number}", f"answer to {number}"] for number in range(60))


def _rewards(file: Path) -> None:
    data = preference_rows.write(file.with_name("pairs.jsonl"), preference_rows.rows(60))
    sizes = "layers: 2, heads: 2, width: 32, length: 48, held_out: 0.2"
    file.write_text(f"task: {{name: reward, data: {data}, {sizes}}}\n")


def _classifier(file: Path) -> None:
    model = small_models.bert(file.with_name("bert"))
    data = own_files.write(file.with_name("classified"), "csv", own_files.rows(60))
    file.write_text(
        f"task: {{name: text_classification, data: {data}, model: {model}, length: 8}}\n"
    )


def _bart(file: Path) -> None:
    rows = PackagedRows("numbers", "validation")
    data = file.with_name("numbers.jsonl")
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folder = file.with_name("bart")
    texts = [text for row in rows for text in row.values()]
    ending_tokenizer(texts, 300).save_pretrained(folder)
    sizes = {"d_model": 32, "max_position_embeddings": 64, "vocab_size": 300}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1}
    config = transformers.BartConfig(**sizes, **tokens, bos_token_id=1, dropout=0.0)
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)
    lengths = "length: 32, target_length: 12"
    file.write_text(f"task: {{name: seq2seq, data: {data}, model: {folder}, {lengths}}}\n")


def _recipe(task: str, file: Path) -> None:
    file.write_text(f"task: {task}\n")


_DATA: dict[str, Callable[[Path], object]] = {
    "texts": _texts,
    "pairs": _pairs,
    "rows": lambda folder: own_files.write(folder, "csv", own_files.rows(60)),
    "images": lambda folder: own_files.images(folder, "png", each=20),
    "base": a_base,
    "half.yaml": functools.partial(_recipe, "fake_steps.HalfParameters"),
    "contrast.yaml": functools.partial(_recipe, "whole_batches.Contrast"),
    "reward.yaml": _rewards,
    "classifier.yaml": _classifier,
    "bart.yaml": _bart,
}
