"""Preferences: the losses are those of a plain loop with both models, on every layout, and the
reference is computed once."""

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

from counted_pairs import applied, bins, lay, listed, logged, rows, trained, words, write
from oneloop.data.order import order_of
from oneloop.tasks.language import preference_losses as losses
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.preference import Preference
from same_bits import exact_log
from slow_cases import with_slow
from worlds import back_to, each_message, run

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.pair_rows",
    "oneloop.tasks.language.preference_losses",
    "oneloop.tasks.preference",
)

STEPS = 40
DOCUMENTS = 2 * (60 + 9)  # of the training and the validation set
KINDS: dict[str, tuple[str, ...]] = {
    "dpo": (),
    "conservative": ("--task.label_smoothing", "0.2"),
    "robust": (
        *("--task.loss", "robust", "--task.label_smoothing", "0.2"),
        *("--optimizer.lr", "0.005"),
    ),
    "hinge": ("--task.loss", "hinge", "--task.beta", "0.3"),
    "ipo": ("--task.loss", "ipo", "--task.beta", "0.5", "--optimizer.lr", "0.000005"),
    "ipo of means": (
        *("--task.loss", "ipo_mean", "--task.beta", "0.5"),
        *("--optimizer.lr", "0.01"),
    ),
    "simpo": ("--task.loss", "simpo", "--task.margin", "0.4"),
    "fused": ("--task.fused_loss", "true"),
    "orpo": ("--task.loss", "orpo", "--task.beta", "0.2"),
}


# --- the losses


def probabilities() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(-torch.rand(2, 50, generator=draw, dtype=torch.float64) * 3)  # type: ignore[return-value]


def test_the_losses_are_their_closed_forms():
    chosen, rejected = probabilities()
    apart = 4 * (chosen - rejected)
    right = 1 / (1 + torch.exp(-0.3 * apart))
    smooth = {"beta": 0.3, "smoothing": 0.2}
    expected = {
        "dpo": (losses.dpo(apart, beta=0.3), -right.log()),
        "conservative": (
            losses.dpo(apart, **smooth),
            -0.8 * right.log() - 0.2 * (1 - right).log(),
        ),
        "robust": (
            losses.robust(apart, **smooth),
            (-0.8 * right.log() + 0.2 * (1 - right).log()) / 0.6,
        ),
        "hinge": (losses.hinge(apart, beta=0.3), (1 - 0.3 * apart).clamp(min=0)),
        "ipo": (losses.ipo(apart, beta=0.3), apart**2 - apart / 0.3 + 1 / 0.36),
        "simpo": (
            losses.simpo(chosen - rejected, beta=2.0, margin=0.5),
            (1 + torch.exp(0.5 - 2 * (chosen - rejected))).log(),
        ),
    }
    odds = chosen.exp() / (1 - chosen.exp()) / (rejected.exp() / (1 - rejected.exp()))
    expected["orpo"] = (
        losses.orpo(chosen, rejected, beta=0.2),
        -chosen + 0.2 * (1 + 1 / odds).log(),
    )
    for name, (found, wanted) in expected.items():
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=name)

    # The robust loss is unbiased: its mean over swapped labels is the loss of the right ones.
    swapped = 0.8 * losses.robust(apart, **smooth) + 0.2 * losses.robust(-apart, **smooth)
    torch.testing.assert_close(swapped, losses.dpo(apart, beta=0.3), rtol=1e-12, atol=1e-12)


def test_the_losses_stay_finite_and_exact_at_their_limits():
    for size in (0.0, 1e-30, 1e-8, 1.0, 80.0, 500.0):
        both = torch.tensor([-size, -size - 1e-3, 0.0], requires_grad=True)
        found = (
            losses.orpo(both, both.flip(0), beta=0.2).sum() + losses.dpo(1e4 * both, beta=1).sum()
        )
        found.backward()
        assert found.isfinite() and both.grad is not None and both.grad.isfinite().all(), size
    # log(1 - exp(x)) without cancellation, in float32
    small = torch.tensor([-1e-7, -1e-4, -0.69, -0.7, -20.0])
    exact = [math.log(-math.expm1(float(x))) for x in small]
    assert losses._log_of_rest(small).tolist() == pytest.approx(exact, rel=1e-6)


def test_the_divergence_is_unbiased_under_the_reference():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    policy, reference = logits.log_softmax(-1)
    each = losses.divergence_of_answer(policy - reference)
    exact = (reference.exp() * (reference - policy)).sum()
    assert (each >= 0).all()
    assert float((reference.exp() * each).sum()) == pytest.approx(float(exact), rel=1e-12)


# --- a plain loop


class Plain:
    """Both models in memory; one document after the other, without padding."""

    def __init__(self, base: Path, kind: str, given: tuple[str, ...], pack: str) -> None:
        keys = {one[7:]: value for one, value in zip(given[::2], given[1::2], strict=True)}
        self.kind = kind
        self.beta = float(keys.get("beta", {"simpo": 2.0}.get(kind, 0.1)))
        self.rate = float(given[-1]) if given and given[-2] == "--optimizer.lr" else 0.05
        self.task = Preference(str(base / "data"), model=str(base / "base"), length=96, pack=pack)
        self.task.before_run(None, None)  # only the tokens are used
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.policy = load(base / "base").double().train()
        self.reference = load(base / "base").double().eval()

    def logp(self, model: Any, side: Any) -> torch.Tensor:
        tokens = torch.from_numpy(token_ids(side).astype(np.int64))
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        each = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return each[torch.from_numpy(side[1:] >= 0)]

    def pair(self, pair: Any) -> dict[str, torch.Tensor]:
        """Return the loss of a pair, and its metrics."""
        now = [self.logp(self.policy, side) for side in pair]
        with torch.no_grad():
            then = [self.logp(self.reference, side) for side in pair]
        beta = self.beta
        means = self.kind in ("ipo of means", "simpo", "orpo")
        reduce = torch.mean if means else torch.sum
        chosen, rejected = map(reduce, now)
        rewards = [chosen, rejected]
        if self.kind not in ("simpo", "orpo"):
            rewards = [chosen - reduce(then[0]), rejected - reduce(then[1])]
        apart = rewards[0] - rewards[1]
        loss = {
            "dpo": lambda: F.softplus(-beta * apart),
            "fused": lambda: F.softplus(-beta * apart),
            "conservative": lambda: F.softplus(-beta * apart) + 0.2 * beta * apart,
            "robust": lambda: F.softplus(-beta * apart) - 0.2 * beta * apart / 0.6,
            "hinge": lambda: (1 - beta * apart).clamp(min=0),
            "ipo": lambda: (apart - 0.5 / beta).square(),
            "ipo of means": lambda: (apart - 0.5 / beta).square(),
            "simpo": lambda: F.softplus(0.4 - beta * apart),
            "orpo": lambda: -chosen + beta * F.softplus(odds(rejected) - odds(chosen)),
        }[self.kind]()
        moved = torch.cat(now) - torch.cat(then)
        return {
            "loss": loss,
            "chosen_logp": now[0].sum(),
            "rejected_logp": now[1].sum(),
            "chosen_reward": beta * rewards[0],
            "rejected_reward": beta * rewards[1],
            "reward_margin": beta * apart,
            "reward_accuracy": (apart > 0).double(),
            "kl": (moved.exp() - 1 - moved).mean(),
        }

    def trained(self, steps: int) -> list[dict[str, float]]:
        samples = self.task.train_set()
        order = order_of(samples, seed=0, batch=4)
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=self.rate, momentum=0.9)
        found = []
        for step in range(steps):
            _, ids = order[4 * step : 4 * step + 4]
            sides = [side for index in ids for side in samples[int(index)].documents]
            chosen = [*zip(sides[::2], sides[1::2], strict=True)]
            values: list[dict[str, torch.Tensor]] = []
            for pair in chosen:
                made = self.pair(pair)
                (made["loss"] / len(chosen)).backward()
                values.append({name: value.detach() for name, value in made.items()})
            optimizer.step()
            optimizer.zero_grad()
            means = {}
            for name in values[0]:
                means[name] = float(torch.stack([one[name] for one in values]).mean())
            found.append(means)
        return found


def odds(mean: torch.Tensor) -> torch.Tensor:
    return (mean.exp() / (1 - mean.exp())).log()


def compared(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> float:
    """Return the largest difference of any metric of a step, relative to its size or 1."""
    assert len(found) == len(wanted)
    worst = 0.0
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name in theirs:
            # Before the first update, both rewards are 0 but for rounding.
            if f"train/{name}" in ours and (number or name != "reward_accuracy"):
                apart = abs(ours[f"train/{name}"] - theirs[name])
                worst = max(worst, apart / max(1.0, abs(theirs[name])))
    return worst


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return lay(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def first(base, tmp_path_factory) -> Path:
    """A run of the loss dpo, with evaluations, and its store."""
    folder = tmp_path_factory.mktemp("first")
    trained(folder, words(base, "--task.store", "store", "--eval.every", "4")).ok()
    (folder / "computed").write_text("".join(f"{one}\n" for one in listed(folder)))
    return folder


ALL = [(kind, "packed", "single") for kind in KINDS]
ALL += [("dpo", "padded", layout) for layout in ("single", "ddp", "fsdp2")]
ALL += [("dpo", "packed", layout) for layout in ("ddp", "fsdp2")]
ALL += [("orpo", "padded", "ddp"), ("ipo of means", "padded", "fsdp2")]


def test_the_first_steps_are_those_of_a_plain_loop(base, first, one_thread):
    found = logged(first)
    assert len(found) == 8 and "train/kl" in found[0]
    compare_steps(base, found, "dpo", "packed")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "pack", "layout"), ALL)
def test_forty_steps_are_those_of_a_plain_loop(base, tmp_path, one_thread, kind, pack, layout):
    compare_with_plain(base, tmp_path, kind, pack, layout, steps=STEPS)


def compare_with_plain(
    base: Path, folder: Path, kind: str, pack: str, layout: str, *, steps: int
) -> None:
    given = ["--task.pack", pack, "--duration", str(steps), *KINDS[kind]]
    has_reference = kind not in ("simpo", "orpo")
    if has_reference:
        given += ["--task.store", "store"]
    if layout != "single":
        given += ["--batch.micro", "1"]  # two micro-batches on each of two processes
    trained(folder, words(base, *given), layout).ok()
    assert len(set(listed(folder))) == has_reference * DOCUMENTS
    found = logged(folder)
    assert ("train/kl" in found[0]) == has_reference
    assert len(found) == steps
    print(layout)
    compare_steps(base, found, kind, pack)


def compare_steps(base: Path, found: list[dict[str, float]], kind: str, pack: str) -> None:
    wanted = Plain(base, kind, KINDS[kind], pack).trained(len(found))
    worst = compared(found, wanted)
    print(f"{kind}, {pack}: largest difference {worst:.1e}")
    assert wanted[-1]["loss"] < wanted[0]["loss"] and worst < 1e-10


@pytest.mark.slow
def test_forty_steps_are_those_of_trl(base, tmp_path, one_thread, monkeypatch):
    pytest.importorskip("trl")  # needs Python 3.11
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    # Texts: of messages, TRL also trains the line break after the end token.
    texts = []
    for row in rows(60):
        (question,), (good,), (bad,) = (row[key] for key in ("prompt", "chosen", "rejected"))
        texts.append(
            {
                "prompt": f"{question['content']}:",
                "chosen": f" {good['content']}",
                "rejected": f" {bad['content']}",
            }
        )
    (tmp_path / "texts").mkdir()
    for name, part in (("train", texts), ("validation", texts[:4])):
        write(tmp_path / "texts" / f"{name}.jsonl", part)
    data = str(tmp_path / "texts")
    given = words(base, "--task.store", "store", "--task.pack", "padded", "--duration", str(STEPS))
    given[given.index("--task.data") + 1] = data
    trained(tmp_path, given).ok()
    ours = [line["train/loss"] for line in logged(tmp_path)]

    # The same rows in the same order.
    task = Preference(data, model=str(base / "base"), length=96, pack="padded")
    _, ids = order_of(task.train_set(), seed=0, batch=4)[0 : 4 * STEPS]
    theirs = []

    class Noting(DPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            theirs.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    load = transformers.AutoModelForCausalLM.from_pretrained
    trainer = Noting(
        model=load(base / "base", dtype=torch.float64),
        ref_model=load(base / "base", dtype=torch.float64),
        args=DPOConfig(
            str(tmp_path / "trl"),
            per_device_train_batch_size=4,
            max_steps=STEPS,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            optim="sgd",
            optim_args="momentum=0.9",
            max_grad_norm=0.0,
            weight_decay=0.0,
            beta=0.1,
            max_length=None,
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([texts[int(index)] for index in ids]),
        processing_class=task.tokenizer,
    )
    trainer.train()
    assert len(ours) == len(theirs) == STEPS and ours[-1] < 0.5 * ours[0]
    worst = float(np.abs(np.array(ours) - np.array(theirs)).max())
    print(f"largest difference {worst:.1e}, losses {ours[0]:.4f} to {ours[-1]:.4f}")
    assert worst < 1e-5


# --- one pass, and every layout


@pytest.mark.slow
def test_pairs_packed_and_padded_have_the_same_gradients(base, one_thread):
    """One batch of the same pairs, in float64."""
    found = []
    for pack in ("packed", "padded"):
        task = Preference(str(base / "data"), model=str(base / "base"), length=96, pack=pack)
        torch.manual_seed(0)
        model = task.model().double().train()
        # All pairs: a batch has them once, in any order.
        samples = task.train_set()
        task.before_run(None, None)
        batch = task.collate([samples[index] for index in range(len(samples))])
        total, outputs = task.loss(model, batch)
        (total / task.weight(batch)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append((total.detach(), outputs["chosen_logp"], gradients))
        assert float(task.weight(batch)) == 60
    (one, logp, gradients), (other, same_logp, same_gradients) = found
    torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    torch.testing.assert_close(logp, same_logp, rtol=1e-12, atol=0)
    for gradient, same in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(gradient, same, rtol=1e-10, atol=1e-13)


def test_the_reference_is_computed_once_for_all_losses(base, first, tmp_path):
    counted = (first / "computed").read_text().splitlines()
    assert len(counted) == DOCUMENTS == len(set(counted))
    store = str(first / "store")
    before = bins(first / "store")
    start = logged(first)

    # The store holds each next token of prompts and answers, for any mask.
    plain = Plain(base, "dpo", (), "packed")
    outputs = plain.task.frozen.outputs["train"]
    files = sorted((first / "store").glob("*/*.bin"), key=lambda file: file.stat().st_size)
    outputs.folder = files[-1].parent
    samples = plain.task.samples["train"]
    assert len(outputs) == len(samples.starts) == 2 * 60
    for number in (0, 1, 77):
        with torch.no_grad():
            logp = plain.logp(plain.reference, token_ids(samples.document(number)))
        assert len(logp) == len(samples.document(number)) - 1
        assert np.allclose(outputs[number]["logp"], logp, rtol=0, atol=1e-12)

    # Another loss, with EMA and activation checkpointing: no forward.
    more = ("--task.loss", "ipo", "--task.beta", "0.5", "--ema.half_life", "4", "--eval.every", "4")
    more += ("--machine.recompute", "full", "--optimizer.lr", "0.00002")
    world = trained(tmp_path, words(base, "--task.store", store, *more))
    world.ok()
    assert listed(tmp_path) == []
    assert bins(first / "store") == before
    found = logged(tmp_path)
    assert found[0]["train/loss"] == pytest.approx(1.0, rel=1e-12)  # (0 - 1 / (2 * 0.5))^2
    assert found[0]["train/chosen_logp"] == pytest.approx(start[0]["train/chosen_logp"], rel=1e-12)

    # The evaluation of the EMA is that of other weights, beside the same reference.
    evaluations = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if "eval/kl" in line
    ]
    divergences = {line["weights"]: line["eval/kl"] for line in evaluations if line["step"] == 8}
    assert len(divergences) == 2
    (raw,) = [value for name, value in divergences.items() if name == "raw"]
    (averaged,) = [value for name, value in divergences.items() if name != "raw"]
    assert 0 < averaged < raw


@pytest.mark.slow
def test_a_resume_without_the_store_continues_on_another_layout(base, first, tmp_path):
    shutil.copytree(first / "run", tmp_path / "run")
    back_to(tmp_path / "run", 4)
    more = ("--task.store", "store", "--eval.every", "4", "--batch.micro", "1")
    trained(tmp_path, words(base, *more), "ddp").ok()
    # The pass is repeated by the weights before the first step.
    assert len(listed(tmp_path)) == DOCUMENTS
    one, other = (
        {k: np.frombuffer(v) for k, v in bins(at / "store").items()} for at in (first, tmp_path)
    )
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    for ours, theirs in zip(logged(tmp_path), logged(first), strict=True):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-10)
        assert ours["train/kl"] == pytest.approx(theirs["train/kl"], rel=1e-9, abs=1e-12)
    weights = [load_file(at / "run" / "final" / "model.safetensors") for at in (first, tmp_path)]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_with_a_grain_all_layouts_are_bit_identical(base, tmp_path):
    """In float32, from a store of each layout's own pass."""
    found = {}
    for layout in ("single", "ddp", "fsdp2"):
        given = words(base, "--task.store", "store", "--batch.grain", "2", "--eval.every", "4")
        given[given.index("float64")] = "float32"
        folder = tmp_path / layout
        trained(folder, given, layout).ok()
        lines = exact_log(folder / "run")
        weights = load_file(folder / "run" / "final" / "model.safetensors")
        found[layout] = (bins(folder / "store"), lines, weights)
    for layout in ("ddp", "fsdp2"):
        assert found[layout][:2] == found["single"][:2], layout
        for name, value in found["single"][2].items():
            assert torch.equal(value, found[layout][2][name]), (layout, name)


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["packed", "padded"])
def test_each_source_of_a_mixture_has_its_own_outputs(base, tmp_path, pack):
    data = []
    for name, seed, weight in (("a", 5, 3), ("b", 6, 1)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.jsonl", rows(30, seed=seed))
        write(tmp_path / name / "validation.jsonl", rows(6, seed=seed + 10))
        data.append({"data": name, "weight": weight})
    given = words(base, "--task.store", "store", "--task.pack", pack, "--eval.every", "4")
    given[given.index("--task.data") + 1] = json.dumps(data)
    trained(tmp_path, given, "ddp").ok()
    counted = listed(tmp_path)
    assert len(counted) == len(set(counted)) == 2 * 2 * 36
    sets = {line.split()[0] for line in counted}
    assert sets == {"train/a", "train/b", "validation/a", "validation/b"}
    # Records of another source or pair would not be those of the policy before its first update.
    found = logged(tmp_path)
    assert found[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-12)
    assert found[0]["train/kl"] == pytest.approx(0, abs=1e-12)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"eval/loss/a", "eval/loss/b", "eval/kl"} <= summary.keys()


# --- adapters


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "fsdp2"])
def test_fresh_adapters_share_a_store_and_trained_ones_do_not(base, tmp_path, layout):
    lora = ("--task.lora.rank", "4", "--task.store", str(tmp_path / "store"))
    first_losses = {}
    for name, more, forwards in (
        ("one", (*lora, "--seed", "0"), DOCUMENTS),
        ("another seed", (*lora, "--seed", "3"), 0),
        ("another rank", (*lora[2:], "--task.lora.rank", "2"), 0),
        ("trained", (*lora, "--init.from", str(tmp_path / "one" / "run")), DOCUMENTS),
    ):
        folder = tmp_path / name
        trained(folder, words(base, *more), layout).ok()
        assert len(set(listed(folder))) == forwards, name
        found = logged(folder)
        # Before the first update, the policy is the reference.
        assert found[0]["train/loss"] == pytest.approx(math.log(2), rel=1e-12)
        assert found[0]["train/kl"] == pytest.approx(0, abs=1e-12)
        assert found[-1]["train/kl"] > 0
        first_losses[name] = found[0]["train/chosen_logp"]
    assert first_losses["trained"] != pytest.approx(first_losses["one"], rel=1e-6)


# --- other data


def expected_pairs(base: Path, folder: Path) -> list[Any]:
    """Return what a plain loop computes for the new pairs, with the final weights of a run."""
    plain = Plain(base, "dpo", (), "padded")
    weights = load_file(folder / "final" / "model.safetensors")
    plain.policy.load_state_dict(weights, strict=False)  # the tied head is not stored
    pairs = plain.task.samples_of(str(base / "new.jsonl"), labelled=True)
    plain.task.before_run(None, None)
    with torch.no_grad():
        return [plain.pair(pairs[number].documents) for number in range(7)]


@pytest.mark.slow
def test_other_data_get_their_own_pass(base, first, tmp_path, one_thread):
    shutil.copytree(first / "run", tmp_path / "run")
    (tmp_path / "log").mkdir()
    shutil.copy(base / "new.jsonl", tmp_path / "new.jsonl")
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("store: store", f"store: {tmp_path / 'store'}"))
    (tmp_path / "recipe.yaml").write_text("task: counted_pairs.Counted\n")
    given = ("run", "--data", "new.jsonl")
    world = applied(tmp_path, "single", "predict", *given, "--to", "each.jsonl")
    world.ok()
    assert {line for line in listed(tmp_path) if line.startswith("data ")} == {
        f"data {number}" for number in range(14)
    }
    world = applied(tmp_path, "single", "evaluate", *given, "--json")
    world.ok()
    assert listed(tmp_path) == []
    (line,) = [line for line in world.output.splitlines() if line.startswith("{")]
    whole = json.loads(line)

    # A plain loop over the same rows.
    wanted = expected_pairs(base, tmp_path / "run")
    each = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    for name in wanted[0]:
        values = [float(one[name]) for one in wanted]
        assert [one[name] for one in each] == pytest.approx(values, rel=1e-10, abs=1e-12)
        mean = sum(values) / 7
        assert whole[f"data/{name}"] == pytest.approx(mean, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("layout", with_slow(["single", "ddp", "fsdp2"], ["ddp", "fsdp2"]))
def test_new_pairs_of_the_packaged_task_need_the_weights_of_its_model(
    base, first, tmp_path, one_thread, layout
):
    """Its evaluation begins without them. The metrics are those of a plain loop, without a store
    and with one."""
    shutil.copytree(first / "run", tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("counted_pairs.Counted", "preference"))
    shutil.copy(base / "new.jsonl", tmp_path / "new.jsonl")
    (tmp_path / "log").mkdir()

    wanted = expected_pairs(base, tmp_path / "run")

    given = ("run", "--data", "new.jsonl")
    world = applied(tmp_path, layout, "evaluate", *given, "--json")
    world.ok()
    (line,) = [line for line in world.output.splitlines() if line.startswith("{")]
    found = json.loads(line)
    for name in wanted[0]:
        mean = sum(float(one[name]) for one in wanted) / 7
        assert found[f"data/{name}"] == pytest.approx(mean, rel=1e-10, abs=1e-12)

    world = applied(tmp_path, layout, "predict", *given, "--to", "each.jsonl")
    world.ok()
    each = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    for name in wanted[0]:
        values = [float(one[name]) for one in wanted]
        assert [one[name] for one in each] == pytest.approx(values, rel=1e-10, abs=1e-12)


def test_a_set_of_the_task_raises_without_the_store(base):
    """In another loop, the reference would give each token the probability 1."""
    task = Preference(str(base / "data"), model=str(base / "base"), length=96)
    with pytest.raises(ValueError, match="outputs of a reference or a teacher are missing"):
        task.train_set()[0]


# --- wrong settings


WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "beta": (("--task.beta", "0"), "task.beta 0.0 must be a positive number (common: 0.1)"),
    "smoothing": (("--task.label_smoothing", "0.5"), "must be at least 0 and below 0.5"),
    "smoothing of ipo": (
        ("--task.loss", "ipo", "--task.label_smoothing", "0.1"),
        "task.label_smoothing",
    ),
    "gamma": (("--task.margin", "2"), "task.margin"),
    "gamma nan": (("--task.loss", "simpo", "--task.margin", "nan"), "task.margin"),
    "store": (("--task.loss", "orpo", "--task.store", "store"), "task.store"),
    "address": (("--task.store", "ftp://host/store"), "task.store"),
    "overlong": (("--task.overlong", "split"), "task.overlong"),
    "pack": (("--task.pack", "bins"), "task.pack"),
    "loss": (("--task.loss", "kto"), "task.loss"),
    "chosen": (("--task.chosen", "good"), "cannot find 'good'"),
}


def test_wrong_settings_are_rejected_with_one_message(base, tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: preference\n")
    several = [words(base, *more) for more, _ in WRONG.values()]
    (found,) = run(each_message, several, folder=tmp_path).ok()
    for (name, (_, expected)), (code, output) in zip(WRONG.items(), found, strict=True):
        print(name, output.strip().splitlines()[-1:])
        assert code == 2 and expected in output and "Traceback" not in output, (name, output)
    assert not (tmp_path / "run").exists() and not (tmp_path / "store").exists()


def test_a_wrong_row_of_new_data_is_named(base, first, tmp_path):
    made = rows(3)
    made[1]["rejected"] = made[1]["chosen"]
    write(tmp_path / "new.jsonl", made)
    shutil.copytree(first / "run", tmp_path / "run")
    (tmp_path / "log").mkdir()
    world = applied(tmp_path, "single", "evaluate", "run", "--data", "new.jsonl")
    assert world.codes == [2] and "new.jsonl, row 1: both answers are equal" in world.output
