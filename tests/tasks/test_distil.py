"""Distillation: the losses are those of a plain loop with the teacher in memory, on every layout,
and the teacher is computed once."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F

from adapters import a_base
from counted_pairs import bins, logged, write
from counted_teacher import a_teacher, applied, chats, lay, listed, trained, words
from oneloop.basics.seeds import key
from oneloop.data.order import order_of
from oneloop.tasks.distil import Distil
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.sequences import Sample
from slow_cases import with_slow
from worlds import back_to, each_message, run

pytestmark = pytest.mark.covers(
    "oneloop.tasks.distil",
    "oneloop.tasks.language.teachers",
)

STEPS = 20
DOCUMENTS = 60 + 9  # of the training and the validation set
KINDS: dict[str, dict[str, Any]] = {
    "forward": {"top_k": 0, "share": 1.0},
    "reverse": {"top_k": 0, "divergence": "reverse", "share": 0.7},
    "js": {"top_k": 0, "divergence": "js", "beta": 0.3, "share": 0.9},
    "warm": {"top_k": 0, "temperature": 2.0},
    "few": {"top_k": 5, "temperature": 1.5, "share": 0.8},
    "few, reverse": {"top_k": 5, "divergence": "reverse", "share": 0.8},
}


def keys(kind: str) -> list[str]:
    given = []
    for name, value in KINDS[kind].items():
        given += [f"--task.{name}", str(value)]
    return given


class Plain:
    """The teacher in memory; one document after the other, without padding."""

    def __init__(self, base: Path, pack: str, **settings: Any) -> None:
        self.settings = {"divergence": "forward", "beta": 0.5, "temperature": 1.0, "share": 0.5}
        self.settings |= settings
        self.task = Distil(
            str(base / "data"),
            teacher=str(base / "teacher"),
            length=96,
            layers=1,
            width=32,
            pack=pack,  # type: ignore[arg-type]
            **settings,
        )
        self.task.before_run(None, None)  # only the tokens are used
        torch.manual_seed(key(0))
        self.student = self.task.model().double().train()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.teacher = load(base / "teacher").eval()

    def document(self, span: Any) -> dict[str, torch.Tensor]:
        """Return sums over the targets of a document."""
        tokens = torch.from_numpy(token_ids(span).astype(np.int64))
        targets = torch.from_numpy(span[1:] >= 0)
        temperature = self.settings["temperature"]
        student = self.student(input_ids=tokens[None, :-1]).logits[0][targets]
        with torch.no_grad():
            teacher = self.teacher(input_ids=tokens[None, :-1]).logits[0][targets].double()
        q = (student / temperature).log_softmax(-1)
        p = (teacher / temperature).log_softmax(-1)
        if self.settings.get("top_k"):
            p, q = self.coarse(p, q)
        apart = self.divergence(p, q)
        cross_entropy = F.cross_entropy(student, tokens[1:][targets], reduction="sum")
        share = self.settings["share"]
        loss = share * temperature**2 * apart + (1 - share) * cross_entropy
        return {
            "loss": loss,
            "divergence": apart,
            "cross_entropy": cross_entropy,
            "count": targets.sum(),
        }

    def coarse(self, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge all but the teacher's most likely entries, as sums of probabilities."""
        best = p.topk(self.settings["top_k"], -1).indices
        several = []
        for one in (p, q):
            chosen = one.gather(-1, best)
            rest = one.exp().scatter(-1, best, 0).sum(-1, keepdim=True).log()
            several.append(torch.cat([chosen, rest], -1))
        return several[0], several[1]

    def divergence(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
            return F.kl_div(to, of, reduction="sum", log_target=True)

        weight = self.settings["beta"]
        middle = (weight * p.exp() + (1 - weight) * q.exp()).log()
        return {
            "forward": lambda: kl(p, q),
            "reverse": lambda: kl(q, p),
            "js": lambda: weight * kl(p, middle) + (1 - weight) * kl(q, middle),
        }[self.settings["divergence"]]()

    def trained(self, steps: int) -> list[dict[str, float]]:
        samples = self.task.train_set()
        order = order_of(samples, seed=0, batch=4)
        optimizer = torch.optim.SGD(self.student.parameters(), lr=0.1, momentum=0.9)
        found = []
        for step in range(steps):
            _, ids = order[4 * step : 4 * step + 4]
            documents = [one for index in ids for one in samples[int(index)].documents]
            sums = [self.document(document) for document in documents]
            count = sum(float(one["count"]) for one in sums)
            (sum(one["loss"] for one in sums) / count).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            means = {}
            for name in ("loss", "divergence", "cross_entropy"):
                means[name] = sum(float(one[name].detach()) for one in sums) / count
            found.append(means)
        return found


def compared(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> float:
    """Return the largest difference of a metric of a step, relative to its size or 1."""
    assert len(found) == len(wanted)
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            worst = max(worst, abs(ours[f"train/{name}"] - value) / max(1.0, abs(value)))
    return worst


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return lay(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def first(base, tmp_path_factory) -> Path:
    """A run of the kind forward, with evaluations, and its store."""
    folder = tmp_path_factory.mktemp("first")
    trained(folder, words(base, *keys("forward"), "--eval.every", "10")).ok()
    return folder


# --- a plain loop with the teacher in memory

ALL = [(kind, "packed", "single") for kind in KINDS]
ALL += [("few", "padded", layout) for layout in ("single", "ddp", "fsdp2")]
ALL += [("js", "packed", layout) for layout in ("ddp", "fsdp2")]
ALL += [("js", "packed", "accumulation"), ("reverse", "padded", "ddp")]
DEFAULT = [("forward", "packed", "single")]


@pytest.mark.parametrize(
    ("kind", "pack", "layout"), with_slow(ALL, [one for one in ALL if one not in DEFAULT])
)
def test_twenty_steps_are_those_of_a_plain_loop(
    base, tmp_path, one_thread, request, kind, pack, layout
):
    folder = tmp_path
    if (kind, pack, layout) == DEFAULT[0]:
        folder = request.getfixturevalue("first")
    else:
        given = [*keys(kind), "--task.pack", pack]
        if layout != "single":
            given += ["--batch.micro", "1"]
        trained(folder, words(base, *given), layout.replace("accumulation", "single")).ok()
    counted = listed(folder, "pass")
    assert len(set(counted)) == DOCUMENTS
    # Under FSDP2, a process without a range repeats the forwards of another.
    assert len(counted) == DOCUMENTS or layout == "fsdp2"

    # The teacher is not in memory while the student trains.
    assert listed(folder, "built") == ["LlamaForCausalLM"] * (1 + (layout in ("ddp", "fsdp2")))
    assert set(listed(folder, "memory")) == {"0"}

    plain = Plain(base, pack, **KINDS[kind])
    wanted = plain.trained(STEPS)
    worst = compared(logged(folder), wanted)
    print(f"{kind}, {pack}, {layout}: largest difference {worst:.1e}")
    assert wanted[-1]["loss"] < wanted[0]["loss"] and worst < 1e-6
    weights = load_file(folder / "run" / "final" / "model.safetensors")
    for name, value in plain.student.state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_the_divergence_is_that_of_trl(base, kind):
    """TRL's GKD with ``beta`` 0, 1 and between, without our factor temperature^2."""
    trainer = pytest.importorskip("trl.experimental.gkd")  # needs Python 3.11
    settings = {"top_k": 0, "share": 1.0, "temperature": 1.7, "divergence": kind, "beta": 0.3}
    plain = Plain(base, "padded", **settings)
    task = plain.task
    samples = task.train_set()
    spans = [samples.document(number) for number in range(4)]
    batch = super(Distil, task).collate([Sample([span]) for span in spans])
    student = plain.student(input_ids=batch["input"]).logits[..., : task.entries]
    with torch.no_grad():
        teacher = plain.teacher(input_ids=batch["input"]).logits[..., : task.entries]
        ours = sum(float(plain.document(span)["divergence"]) for span in spans)
        theirs = trainer.GKDTrainer.generalized_jsd_loss(
            student,
            teacher.double(),
            labels=batch["target"],
            beta={"forward": 0, "reverse": 1, "js": 0.3}[kind],
            temperature=1.7,
            reduction="sum",
        )
    assert ours == pytest.approx(float(theirs), rel=1e-5)


# --- one pass, and every layout


@pytest.mark.slow
def test_the_teacher_is_computed_once_and_a_resume_continues_on_another_layout(
    base, first, tmp_path
):
    listed(first, "pass")
    shutil.copytree(first / "run", tmp_path / "run")
    shutil.copytree(first / "store", tmp_path / "store")
    before = bins(first / "store")
    back_to(tmp_path / "run", 10)
    more = ("--eval.every", "10", "--batch.micro", "1")
    world = trained(tmp_path, words(base, *keys("forward"), *more), "ddp")
    world.ok()
    assert listed(tmp_path, "built") == []
    assert bins(tmp_path / "store") == before
    for ours, theirs in zip(logged(tmp_path), logged(first), strict=True):
        for name in ("loss", "divergence", "cross_entropy"):
            assert ours[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], rel=1e-10)
    summaries = [json.loads((at / "run/summary.json").read_text()) for at in (first, tmp_path)]
    for name in ("eval/divergence", "eval/loss"):
        assert summaries[0][name] == pytest.approx(summaries[1][name], rel=1e-10)


@pytest.mark.slow
def test_a_store_serves_other_losses_and_not_other_records(base, first, tmp_path):
    shutil.copytree(first / "store", tmp_path / "store")
    for name, given, forwards in (
        ("reverse", keys("reverse"), 0),
        ("padded", [*keys("forward"), "--task.pack", "padded"], 0),
        ("temperature", [*keys("forward"), "--task.temperature", "2"], DOCUMENTS),
        ("k", [*keys("forward")[2:], "--task.top_k", "8"], DOCUMENTS),
    ):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        trained(tmp_path, words(base, *given, "--duration", "2")).ok()
        assert len(listed(tmp_path, "pass")) == forwards, name


def test_a_teacher_that_changes_before_it_is_loaded_is_rejected(base, tmp_path):
    shutil.copytree(base, tmp_path / "base")
    given = str(next((tmp_path / "base").rglob("model.safetensors")).parent)
    data = str(base / "data")
    task = Distil(data, teacher=given, layers=1, width=32, length=96, top_k=4)
    assert task.frozen.build() is not None
    config = Path(given, "config.json")
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ValueError, match="has changed since the start"):
        task.frozen.build()


@pytest.mark.slow
def test_another_teacher_is_rejected_at_a_resume(base, first, tmp_path):
    for name in ("data", "teacher"):
        shutil.copytree(base / name, tmp_path / name)
    given = words(tmp_path, *keys("forward"))
    trained(tmp_path, given).ok()
    back_to(tmp_path / "run", 10)
    a_teacher(tmp_path / "teacher", seed=7)
    world = trained(tmp_path, given)
    assert world.codes == [2] and "Traceback" not in world.output, world.output
    assert "teacher" in world.output


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["packed", "padded"])
def test_with_a_grain_all_layouts_are_bit_identical(base, tmp_path, pack):
    """In float32, from a store of each layout's own pass."""
    found = {}
    for layout in ("single", "ddp", "fsdp2"):
        given = words(base, *keys("few"), "--batch.grain", "2", "--task.pack", pack)
        given[given.index("float64")] = "float32"
        folder = tmp_path / layout
        trained(folder, given, layout).ok()
        weights = load_file(folder / "run" / "final" / "model.safetensors")
        losses = [line["train/loss"] for line in logged(folder)]
        found[layout] = (bins(folder / "store"), losses, weights)
    for layout in ("ddp", "fsdp2"):
        assert found[layout][:2] == found["single"][:2], layout
        for name, value in found["single"][2].items():
            assert torch.equal(value, found[layout][2][name]), (layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["few", "js"])
def test_packed_and_padded_have_the_same_gradients(base, one_thread, kind):
    """One batch of all documents, in float64, with the teacher's records from one pass."""
    found = []
    for pack in ("packed", "padded"):
        plain = Plain(base, pack, **KINDS[kind])
        task, model = plain.task, plain.student
        samples = task.train_set()
        frozen = task.frozen
        made = []
        for number in range(len(samples.starts)):
            batch = frozen.batch("train", [number])
            with torch.no_grad():
                made += frozen.compute(plain.teacher, batch)

        # Give each sample the records of its documents.
        samples.outputs = made
        batch = task.collate([samples[number] for number in range(len(samples))])
        total, outputs = task.loss(model, batch)
        (total / task.weight(batch)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((total.detach(), outputs["divergence"], task.weight(batch), gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# --- students and data of other kinds


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "fsdp2"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_student_of_transformers_learns(base, tmp_path, layout, lora):
    a_base(tmp_path / "student", seed=5)
    given = [*keys("few"), "--task.model", str(tmp_path / "student"), "--eval.every", "10"]
    if lora:
        given += ["--task.lora.rank", "4"]
    else:
        given += ["--machine.recompute", "full", "--ema.half_life", "4"]
    several = words(base, *given)
    for name in ("--task.layers", "--task.width"):
        at = several.index(name)
        del several[at : at + 2]
    trained(tmp_path, several, layout).ok()
    found = logged(tmp_path)
    assert found[-1]["train/divergence"] < found[0]["train/divergence"]
    assert (tmp_path / "run/final/adapter_model.safetensors").exists() == lora


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "completions", "mixture"])
def test_other_data_are_distilled(base, tmp_path, one_thread, kind):
    rows = {
        "text": lambda one: {"text": one[1]["content"] + " " + one[0]["content"]},
        "completions": lambda one: {
            "prompt": f"{one[0]['content']}: ",
            "completion": one[1]["content"],
        },
        "mixture": lambda one: {"messages": one},
    }[kind]
    (tmp_path / "data").mkdir()
    for name, count, seed in (("train", 60, 0), ("validation", 9, 1)):
        made = [rows(row["messages"]) for row in chats(count, seed=seed)]
        write(tmp_path / "data" / f"{name}.jsonl", made)
    shutil.copytree(base / "teacher", tmp_path / "teacher")
    given = words(tmp_path, *keys("few"), "--eval.every", "20")
    if kind == "mixture":
        (tmp_path / "data").rename(tmp_path / "more")
        data = [{"data": str(base / "data"), "weight": 3}, {"data": "more", "weight": 1}]
        given[given.index("--task.data") + 1] = json.dumps(data)
    trained(tmp_path, given, "ddp").ok()
    found = logged(tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval/divergence"] > 0
    if kind == "mixture":
        counted = listed(tmp_path, "pass")
        assert len(counted) == len(set(counted)) == 2 * DOCUMENTS
    else:
        wanted = Plain(tmp_path, "packed", **KINDS["few"]).trained(STEPS)
        assert compared(found, wanted) < 1e-6


def test_other_data_get_their_own_pass(base, first, tmp_path, one_thread):
    shutil.copytree(first / "run", tmp_path / "run")
    shutil.copy(base / "new.jsonl", tmp_path / "new.jsonl")
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("store: store", f"store: {tmp_path / 'store'}"))
    (tmp_path / "recipe.yaml").write_text("task: counted_teacher.Counted\n")
    world = applied(tmp_path, "single", "evaluate", "run", "--data", "new.jsonl", "--json")
    world.ok()
    computed = {line for line in listed(tmp_path, "pass") if line.startswith("data ")}
    assert computed == {f"data {number}" for number in range(7)}
    (line,) = [line for line in world.output.splitlines() if line.startswith("{")]
    found = json.loads(line)

    # A plain loop over the same rows.
    plain = Plain(base, "padded", **KINDS["forward"])
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    plain.student.load_state_dict(weights, strict=False)
    samples = plain.task.samples_of(str(base / "new.jsonl"), labelled=True)
    plain.task.before_run(None, None)
    with torch.no_grad():
        sums = [plain.document(samples.document(number)) for number in range(7)]
    count = sum(float(one["count"]) for one in sums)
    means = {name: sum(float(one[name]) for one in sums) / count for name in sums[0]}
    assert found["data/divergence"] == pytest.approx(means["divergence"], rel=1e-5)
    assert found["data/loss"] == pytest.approx(means["loss"], rel=1e-5)
    # Perplexity is that of the data.
    assert found["data/perplexity"] == pytest.approx(math.exp(means["cross_entropy"]), rel=1e-5)


# --- wrong settings

WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "temperature": (("--task.temperature", "0"), "must be a positive number"),
    "infinite": (("--task.temperature", "inf"), "must be a number"),
    "share": (("--task.share", "0"), "must be above 0 and at most 1"),
    "large share": (("--task.share", "1.5"), "must be above 0 and at most 1"),
    "beta": (("--task.divergence", "js", "--task.beta", "1"), "must be between 0 and 1"),
    "beta of forward": (("--task.beta", "0.3"), "task.beta"),
    "divergence": (("--task.divergence", "hellinger"), "task.divergence"),
    "k": (("--task.top_k", "100000"), "must be from 1 to the 320 entries"),
    "negative k": (("--task.top_k", "-1"), "must be from 1 to the 320 entries"),
    "fused": (("--task.fused_loss", "true"), "distillation needs logits"),
    "no teacher": (("--task.teacher", ""), "task.teacher '' is not a folder saved by transformers"),
    "name": (("--task.teacher", "gpt2"), "is not a folder saved by transformers"),
    "pickle": (("--task.teacher", "PICKLE"), "has no safetensors"),
    "quantized": (("--task.teacher", "QUANTIZED"), "is quantized"),
    "small": (("--task.teacher", "SMALL"), "has a vocabulary of 300 entries"),
    "short": (("--task.teacher", "SHORT"), "has 64 positions; set task.length 64"),
    "tokenizer": (("--task.model", "OTHER"), "has another tokenizer"),
    "template": (("--task.model", "TEMPLATE"), "has another chat template"),
    "remote code": (("--task.teacher", "CODE"), "needs Python code stored with its weights"),
    "store": (("--task.store", "ftp://host/store"), "task.store"),
    "lmbda": (("--task.lmbda", "0.5"), "outputs of the teacher are computed before the first step"),
    "seq_kd": (("--task.seq_kd", "true"), "write them with oneloop predict"),
    "trl's teacher": (("--task.teacher_model_name_or_path", "x"), "did you mean 'task.teacher'?"),
}


def lay_wrong(base: Path, folder: Path) -> None:
    """Write teachers and students that do not fit."""
    for name in ("PICKLE", "QUANTIZED", "CODE", "OTHER", "TEMPLATE"):
        shutil.copytree(base / "teacher", folder / name)
    weights = load_file(folder / "PICKLE" / "model.safetensors")
    (folder / "PICKLE" / "model.safetensors").unlink()
    torch.save(weights, folder / "PICKLE" / "pytorch_model.bin")
    change(
        folder / "QUANTIZED/config.json", quantization_config={"quant_method": "gptq", "bits": 4}
    )
    (folder / "CODE" / "own.py").write_text("raise SystemExit('remote code ran')\n")
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change(folder / "CODE/config.json", model_type="own", auto_map=own)
    a_teacher(folder / "SMALL", vocab_size=300)
    a_teacher(folder / "SHORT", max_position_embeddings=64)

    # Two tokens have each other's number.
    file = folder / "OTHER" / "tokenizer.json"
    tokens = json.loads(file.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "TEMPLATE")
    tokenizer.chat_template = "{# other #}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder / "TEMPLATE")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_wrong_settings_are_rejected_with_one_message(base, tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: distil\n")
    lay_wrong(base, tmp_path)
    several = []
    for more, _ in WRONG.values():
        given = words(base, *more)
        if "--task.model" in more:
            at = given.index("--task.layers")
            del given[at : at + 4]
        several.append(given)
    (found,) = run(each_message, several, folder=tmp_path).ok()
    wrong = []
    for (name, (_, expected)), (code, output) in zip(WRONG.items(), found, strict=True):
        print(name, output.strip().splitlines()[-1:])
        if code != 2 or expected not in output or "Traceback" in output:
            wrong.append((name, code, output[-600:]))
    assert not wrong, wrong
    assert not (tmp_path / "run").exists() and not (tmp_path / "store").exists()
