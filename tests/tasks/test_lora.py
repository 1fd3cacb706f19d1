"""Adapters on a frozen model: the same on every parallel layout, compatible with peft and
transformers, and checkpoints without the base model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F

from adapters import SPLITS, WORDS, a_base, adapters_of, furthest, of_words
from oneloop.cli import main
from oneloop.data.order import order_of
from oneloop.tasks.sft import SFT
from planning import few_chats
from silent_cases import unfinished
from slow_cases import with_slow
from worlds import after, each_message, run

pytestmark = pytest.mark.covers(
    "oneloop.basics.base_models",
    "oneloop.checkpoint.frozen_weights",
    "oneloop.checkpoint.weights",
    "oneloop.machine.frozen_dtype",
    "oneloop.run.final_weights",
    "oneloop.tasks.language.lora",
    "oneloop.tasks.language.lora_settings",
    "oneloop.tasks.sft",
)


def on_each(
    layouts, folder: Path, words: list[str], expected_text: str = ""
) -> dict[str, dict[str, torch.Tensor]]:
    """Train adapters with these options on each layout, each in its own folder, and return them."""
    for config, ranks in layouts:
        (folder / config).mkdir()
        world = of_words(folder / config, *words, config=config, ranks=ranks)
        world.ok()
        assert expected_text in world.output
    return {config: adapters_of(folder / config) for config, _ in layouts}


def mean_loss(model: torch.nn.Module, samples) -> float:
    """Return the mean loss of a plain model, computed one sample at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for index in range(len(samples)):
            each = losses(model, samples[index])
            total, count = total + each.double().sum(), count + len(each)
    return (total / count).item()


def losses(model: torch.nn.Module, sample) -> torch.Tensor:
    """Return the loss of each trained token of a sample; untrained tokens are stored as ~token."""
    marked = torch.tensor(sample.documents[0].tolist())
    tokens = torch.where(marked < 0, ~marked, marked)
    trained = marked[1:] >= 0
    logits = model(input_ids=tokens[None, :-1]).logits[0].float()
    return F.cross_entropy(logits[trained], tokens[1:][trained], reduction="none")


@pytest.fixture(scope="module")
def peft_alone(tmp_path_factory) -> Path:
    """Save a base model, a few chats, new peft adapters (start), and these adapters after 40 steps
    of a plain loop (wanted)."""
    folder = tmp_path_factory.mktemp("peft")
    base = a_base(folder / "base")
    _, data = few_chats(folder)
    torch.manual_seed(3)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(plain, config)
    model.save_pretrained(folder / "start")
    task = SFT(data, model=str(folder / "start"), length=96, pack="padded")
    samples = task.train_set()
    order = order_of(samples, seed=0, batch=8)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=0.01,
        weight_decay=0.0,
        betas=(0.9, 0.95),
    )
    for step in range(40):
        each = [losses(model, samples[int(index)]) for index in order[step * 8 : step * 8 + 8][1]]
        (sum(one.sum() for one in each) / sum(len(one) for one in each)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "wanted")
    return folder


def names_in(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each tensor in the folder's files."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            found |= {name: held.get_tensor(name).nbytes for name in held.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize(("config", "ranks"), with_slow(SPLITS, SPLITS[1:]))
def test_forty_steps_are_those_of_plain_peft(peft_alone, tmp_path, config, ranks):
    before = {file.name: file.read_bytes() for file in (peft_alone / "base").iterdir()}
    data = str(peft_alone / "chats.jsonl")
    words = [
        "--task.data",
        data,
        "--task.model",
        str(peft_alone / "start"),
        "--duration",
        "40",
        "--optimizer.weight_decay",
        "0",
    ]
    words += ["--optimizer.clip", "0", "--optimizer.name", "adamw", "--optimizer.lr", "0.01"]
    world = of_words(tmp_path, *words, config=config, ranks=ranks)
    world.ok()
    worst = furthest(
        adapters_of(tmp_path), load_file(peft_alone / "wanted" / "adapter_model.safetensors")
    )
    print(f"{config}: furthest from plain peft after 40 steps: {worst:.1e}")
    assert worst < 1e-5
    assert {file.name: file.read_bytes() for file in (peft_alone / "base").iterdir()} == before

    here = tmp_path / "run"
    assert {file.name for file in next((here / "base").iterdir()).iterdir()} == {
        "origin.json",
        "MANIFEST.json",
    }
    origin = json.loads(next((here / "base").glob("*/origin.json")).read_text())
    assert origin["place"] == str(peft_alone / "base") and "model.safetensors" in origin["files"]
    [path] = (here / "checkpoints").glob("step-*40")
    held = names_in(path)
    trained = {name for name in held if name.startswith("model.")}
    buffers = {name for name in held if name.startswith("rank.")}
    assert len(trained) == 12 and all(".lora_" in name for name in held.keys() - buffers)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{config}: a checkpoint of {size:,} bytes, {sum(held.values()):,} of them tensors")
    assert size < 0.25 * (peft_alone / "base" / "model.safetensors").stat().st_size
    assert main(["verify", str(here)]) == 0
    if ranks == 1:
        as_others_load_it(tmp_path, peft_alone / "base", data)


def as_others_load_it(folder: Path, base: Path, data: str) -> None:
    printed = json.loads((folder / "run" / "summary.json").read_text())["eval/loss"]
    final = folder / "run" / "final"
    samples = SFT(data, model=str(base), length=96, pack="padded").eval_sets()["validation"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    alone = mean_loss(plain, samples)
    by_peft = mean_loss(PeftModel.from_pretrained(plain, final).eval(), samples)
    assert main(["export", str(folder / "run"), "--to", str(folder / "merged"), "--merged"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    by_transformers = mean_loss(merged, samples)
    print(
        f"printed {printed:.6f}, peft {by_peft:.6f}, merged {by_transformers:.6f}, without "
        f"adapters {alone:.6f}"
    )
    assert by_peft == pytest.approx(printed, abs=1e-5) and by_transformers == pytest.approx(
        printed, abs=1e-5
    )
    assert alone > printed + 0.3
    assert transformers.AutoTokenizer.from_pretrained(folder / "merged").chat_template
    assert not (folder / "merged" / "adapter_config.json").exists()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return a_base(tmp_path_factory.mktemp("base") / "small")


def same(one: Path, other: Path) -> None:
    files = sorted(file.name for file in one.glob("*.safetensors"))
    assert files == sorted(file.name for file in other.glob("*.safetensors")) and files
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "optimizer"),
    [(config, ranks, optimizer) for config, ranks in SPLITS for optimizer in ("adamw", "muon")],
)
def test_a_resumed_run_is_the_run_left_alone(base, tmp_path, config, ranks, optimizer):
    words = [
        "--task.model",
        str(base),
        "--task.lora.rank",
        "4",
        "--task.lora.dropout",
        "0.1",
        "--duration",
        "8",
    ]
    words += [
        "--save.every",
        "4",
        "--optimizer.name",
        optimizer,
        "--ema.half_life",
        "16",
        "--task.pack",
        "packed",
    ]
    of_words(tmp_path, *words, config=config, ranks=ranks).ok()
    shutil.copytree(tmp_path / "run" / "final", tmp_path / "final")
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step-00000008", tmp_path / "eight")
    unfinished(tmp_path / "run", 4)
    world = of_words(tmp_path, *words, config=config, ranks=ranks)
    world.ok()
    assert "resuming from run/checkpoints/step-00000004" in world.output
    same(tmp_path / "run" / "final", tmp_path / "final")
    same(tmp_path / "run" / "checkpoints" / "step-00000008", tmp_path / "eight")


@pytest.mark.slow
def test_muon_trains_adapters_alike_on_every_split(base, tmp_path):
    words = [
        "--task.model",
        str(base),
        "--task.lora.rank",
        "4",
        "--optimizer.name",
        "muon",
        "--duration",
        "40",
    ]
    found = on_each(SPLITS, tmp_path, words)
    for config in ("ddp", "fsdp2"):
        print(f"muon, 40 steps, {config}: {furthest(found[config], found['single']):.1e}")
        assert furthest(found[config], found["single"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("splits", [SPLITS[:2], [SPLITS[0], SPLITS[2]]])
def test_a_base_in_four_bits(base, tmp_path, splits):
    words = [
        "--task.model",
        str(base),
        "--task.lora.rank",
        "4",
        "--task.lora.quantize",
        "nf4",
        "--duration",
        "40",
    ]
    words += ["--save.every", "20", "--eval.every", "20"]
    found = on_each(splits, tmp_path, words, "in 4 bits (nf4, double)")
    other = splits[1][0]
    print(f"4 bits, 40 steps, {other}: {furthest(found[other], found['single']):.1e}")
    assert furthest(found[other], found["single"]) < 1e-5
    for config, ranks in splits:
        folder = tmp_path / config
        shutil.copytree(folder / "run" / "final", folder / "final")
        unfinished(folder / "run", 20)
        world = of_words(folder, *words, config=config, ranks=ranks)
        world.ok()
        assert "resuming from run/checkpoints/step-00000020" in world.output
        same(folder / "run" / "final", folder / "final")
    whole = tmp_path / "single" / "whole"
    assert main(["export", str(tmp_path / "single" / "run"), "--to", str(whole), "--merged"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(whole).eval()
    samples = SFT(model=str(base), length=96, pack="padded").eval_sets()["validation"]
    printed = json.loads((tmp_path / "single" / "run" / "summary.json").read_text())["eval/loss"]
    assert mean_loss(merged, samples) == pytest.approx(printed, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), SPLITS)
def test_metrics_afterwards_are_those_of_the_run(base, tmp_path, config, ranks):
    words = [
        "--task.model",
        str(base),
        "--task.lora.rank",
        "4",
        "--duration",
        "4",
        "--task.lora.quantize",
        "fp4",
    ]
    of_words(tmp_path, *words, config=config, ranks=ranks).ok()
    printed = json.loads((tmp_path / "run" / "summary.json").read_text())["eval/loss"]
    for more in ([], ["--checkpoint", "newest"]):
        world = after(tmp_path, "evaluate", "run", "--json", *more, config=config, ranks=ranks)
        world.ok()
        [line] = [line for line in world.output.splitlines() if line.startswith("{")]
        assert json.loads(line)["eval/loss"] == pytest.approx(printed, abs=1e-6)


@pytest.mark.slow
def test_a_base_in_bfloat16_stays_so_under_adapters_in_float32(tmp_path):
    base = a_base(tmp_path / "half", dtype=torch.bfloat16)
    words = [
        "--task.model",
        str(base),
        "--task.lora.rank",
        "4",
        "--duration",
        "6",
        "--eval.every",
        "3",
    ]
    found = on_each(SPLITS, tmp_path, words)
    assert {tensor.dtype for made in found.values() for tensor in made.values()} == {torch.float32}
    for config in ("ddp", "fsdp2"):
        assert furthest(found[config], found["single"]) < 1e-2
    wide = of_words(
        tmp_path / "single", *words, "--machine.base_dtype", "float32", "--run.dir", "wide"
    )
    wide.ok()
    losses = [
        json.loads((tmp_path / "single" / name / "summary.json").read_text())["eval/loss"]
        for name in ("run", "wide")
    ]
    assert 0 < abs(losses[0] - losses[1]) < 0.02
    samples = SFT(model=str(base), length=96, pack="padded").eval_sets()["validation"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    by_peft = mean_loss(
        PeftModel.from_pretrained(plain, tmp_path / "single" / "wide" / "final").eval(), samples
    )
    assert by_peft == pytest.approx(losses[1], abs=1e-5)


def an_adapter(folder: Path, base: Path, **how) -> Path:
    torch.manual_seed(5)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(
        plain, LoraConfig(**({"r": 4, "target_modules": "all-linear"} | how))
    ).save_pretrained(folder)
    return folder


WRONG = [
    (
        ["--task.lora.rank", "0"],
        "task.lora.rank 0 must be at least 1 (common: 16; null: train all parameters)",
    ),
    (["--task.lora.alpha", "8"], "task.lora.alpha requires task.lora.rank (common: 16)"),
    (["--task.lora.quantize", "nf4"], "task.lora.quantize requires task.lora.rank"),
    (
        ["--task.lora.rank", "4", "--task.lora.dropout", "1"],
        "task.lora.dropout 1.0 must be at least 0 and below 1",
    ),
    (["--task.lora.rank", "4", "--task.pretrained", "false"], "requires a trained model"),
    (["--init.from", "ADAPTER"], "contains adapters, but the model has none; set it as task.model"),
    (
        ["--task.model", "ADAPTER", "--task.lora.rank", "4"],
        "holds adapters, which continue training as they are",
    ),
    (["--task.model", "DORA"], "unsupported adapter settings (use_dora True)"),
]
SLOW_WRONG = [
    (
        ["--task.lora.rank", "4", "--task.lora.targets", '["q_proj", "query"]'],
        (
            "task.lora.targets 'query' matches no layer that can have an adapter; the model's "
            "linear layers, without its output layer, are q_proj, k_proj, v_proj, o_proj"
        ),
    ),
    (
        ["--task.lora.rank", "4", "--task.lora.targets", '["self_attn"]'],
        "task.lora.targets 'self_attn' matches no layer that can have an adapter",
    ),
    (
        ["--task.lora.rank", "4", "--task.lora.targets", '["lm_head"]'],
        "task.lora.targets 'lm_head' matches no layer that can have an adapter",
    ),
    (
        ["--task.lora.rank", "4", "--init.from", "BASE"],
        "contains a whole model, but the model has only adapters to train",
    ),
    (["--task.lora.rank", "8", "--init.from", "ADAPTER"], "is of another model (other shape: "),
    (["--task.lora.rank", "4", "--init.from", "OTHER"], "its adapters are for "),
    (
        ["--task.lora.rank", "4", "--init.from", "ADAPTER"],
        "have another scale (lora_alpha 8, expected 32)",
    ),
]


@pytest.fixture(scope="module")
def places(base, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    other = a_base(folder / "another", seed=1)
    made = {
        "BASE": base,
        "ADAPTER": an_adapter(folder / "adapter", base),
        "OTHER": an_adapter(folder / "other", other),
        "DORA": an_adapter(folder / "dora", base, use_dora=True),
    }
    return {name: str(place) for name, place in made.items()}


def messages_of(
    wrong: list[list[str]], base: Path, places: dict[str, str], top: Path
) -> dict[str, tuple[Path, Any, str]]:
    """Return the folder of the run, exit code and output of each wrong input, by its words.

    One process runs all of them on the same data.
    """
    common = [*WORDS, *few_chats(top), "--task.model", str(base)]
    folders = [top / f"run-{number}" for number in range(len(wrong))]
    several = []
    for words, folder in zip(wrong, folders, strict=True):
        given = [places.get(word, word) for word in words]
        several.append([*common, "--run.dir", str(folder), *given])
    (found,) = run(each_message, several, folder=top).ok()
    by_words = {}
    for words, folder, (code, output) in zip(wrong, folders, found, strict=True):
        by_words[" ".join(words)] = (folder, code, output)
    return by_words


@pytest.fixture(scope="module")
def messages(base, places, tmp_path_factory) -> dict[str, tuple[Path, Any, str]]:
    wrong = [words for words, _ in WRONG]
    return messages_of(wrong, base, places, tmp_path_factory.mktemp("wrong"))


@pytest.fixture(scope="module")
def slow_messages(base, places, tmp_path_factory) -> dict[str, tuple[Path, Any, str]]:
    wrong = [words for words, _ in SLOW_WRONG]
    return messages_of(wrong, base, places, tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize(
    ("words", "expected_text"),
    with_slow([*WRONG, *SLOW_WRONG], SLOW_WRONG),
    ids=[" ".join(words) for words, _ in [*WRONG, *SLOW_WRONG]],
)
def test_wrong_inputs_are_reported(request, words, expected_text):
    slow = (words, expected_text) in SLOW_WRONG
    messages = request.getfixturevalue("slow_messages" if slow else "messages")
    folder, code, output = messages[" ".join(words)]
    assert code == 2, output
    assert expected_text in output and "Traceback" not in output, output
    assert not folder.exists()


@pytest.mark.slow
def test_a_base_that_has_changed_since_is_rejected(tmp_path):
    base = a_base(tmp_path / "base")
    words = [
        "--task.model",
        str(base),
        "--task.lora.rank",
        "4",
        "--duration",
        "4",
        "--save.every",
        "2",
    ]
    of_words(tmp_path, *words).ok()
    unfinished(tmp_path / "run", 2)
    a_base(base, seed=1)
    world = of_words(tmp_path, *words)
    assert world.codes == [2] and "step-00000002 needs the base model " in world.output, (
        world.output
    )
    assert "set task.model to the model that it was trained with" in world.output
    world = after(tmp_path, "evaluate", "run", "--checkpoint", "newest")
    assert world.codes == [2] and "restore it at the path in task.model" in world.output
    a_base(base)
    shutil.move(base, tmp_path / "elsewhere")  # the same model in another folder
    there = [word.replace(str(base), str(tmp_path / "elsewhere")) for word in words]
    world = of_words(tmp_path, *there)
    assert world.codes == [2] and "task.model" in world.output  # the recipe names another folder
    world = of_words(tmp_path, *there, "--run.accept_changes", "true")
    world.ok()
    assert "resuming from run/checkpoints/step-00000002" in world.output


@pytest.mark.slow
def test_adapters_are_taken_on_where_they_were_left(base, tmp_path):
    of_words(tmp_path, "--task.model", str(base), "--task.lora.rank", "4", "--duration", "3").ok()
    first = adapters_of(tmp_path)
    still = ["--duration", "1", "--optimizer.lr", "0", "--run.dir", "again"]
    final = str(tmp_path / "run" / "final")
    for number, words in enumerate(
        (
            ["--task.model", final],
            ["--task.model", str(base), "--task.lora.rank", "4", "--init.from", "run"],
        )
    ):
        (tmp_path / str(number)).mkdir()
        shutil.copytree(tmp_path / "run", tmp_path / str(number) / "run")
        of_words(tmp_path / str(number), *words, *still).ok()
        again = load_file(tmp_path / str(number) / "again" / "final" / "adapter_model.safetensors")
        assert again.keys() == first.keys() and all(
            torch.equal(again[name], first[name]) for name in first
        )
