"""Losses over the whole batch: the gradient is exact on any parallel layout."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import same_bits
import whole_batches
from oneloop.cli import main
from same_bits import exact_log
from worlds import back_to, run, timeless_log, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.retrieval_metrics",
    "oneloop.tasks.row_blocks",
    "oneloop.basics.tensors",
    "oneloop.checks.preflight",
    "oneloop.checks.rows",
    "oneloop.job.two_passes",
    "oneloop.loop.gradients",
    "oneloop.measure.meter",
    "oneloop.task_protocol.evaluation_metrics",
    "oneloop.task_protocol.protocol",
    "oneloop.task_protocol.whole_batch",
    "oneloop.tasks.contrastive",
)

LOSSES = ("infonce", "clip", "siglip", "supcon")
DOUBLE = ["--machine.dtype", "float64"]
VARIANTS = {
    "plain": [],
    "recompute": ["--machine.recompute", "full", "--machine.blocks", "[Layer]"],
    "dropout": [
        "--task.dropout",
        "0.2",
        "--machine.recompute",
        "full",
        "--machine.blocks",
        "[Layer]",
    ],
    "lora": ["--task.lora", "true", "--task.dropout", "0.2"],
}
LAYOUTS = {
    "1 x 32": ("single", 1, 32),
    "4 x 8": ("single", 1, 8),
    "DDP 2": ("ddp", 2, 8),
    "DDP 4": ("ddp", 4, 4),
}
LAYOUTS |= {"FSDP2 2": ("fsdp2", 2, 8)}


ALL = list(VARIANTS)
FEW = ["plain", "dropout"]  # dropout is with recompute; adapters take seconds to import
MORE = ["recompute", "lora"]
SLOW = pytest.mark.slow


def cells(kinds, variants):
    return [(kind, variant) for kind in kinds for variant in variants]


# The losses are the same on every layout. By default, one of them has all variants. A step of
# FSDP2 is compared with one process below, bit by bit.
CLIP = LOSSES[1:2]
OTHERS = (LOSSES[0], *LOSSES[2:])
EACH = cells(LOSSES, ALL)
PLAIN = [*cells(CLIP, ALL), *cells(OTHERS, ["plain"])]
CELLS = [pytest.param("4 x 8", PLAIN, id="4 x 8-kinds0")]
CELLS.append(pytest.param("4 x 8", cells(OTHERS, ALL[1:]), id="4 x 8-others", marks=SLOW))
for layout in ("DDP 2", "FSDP2 2"):
    marks = [SLOW] if layout == "FSDP2 2" else []
    CELLS.append(pytest.param(layout, cells(CLIP, FEW), id=f"{layout}-clip", marks=marks))
    CELLS.append(pytest.param(layout, cells(CLIP, MORE), id=f"{layout}-clip-more", marks=SLOW))
    CELLS.append(pytest.param(layout, cells(OTHERS, ALL), id=f"{layout}-others", marks=SLOW))
CELLS.append(pytest.param("1 x 32", EACH, id="1 x 32-kinds5", marks=SLOW))
CELLS.append(pytest.param("DDP 4", EACH, id="DDP 4-kinds6", marks=SLOW))


@pytest.mark.parametrize(("layout", "chosen"), CELLS)
def test_the_gradient_is_that_of_one_loss_over_the_batch(layout, chosen):
    config, ranks, micro = LAYOUTS[layout]
    words = [*DOUBLE, "--batch.micro", str(micro)]
    cases = [(kind, [*words, *VARIANTS[variant]]) for kind, variant in chosen]
    world = run(whole_batches.gradients, cases, ranks=ranks, config=config)
    assert len(world.ok()[0]) == len(cases)
    for case, (loss, reference, one_forward) in world.results[0].items():
        assert loss > 0 and reference < 1e-12, case
        assert (one_forward < 1e-12) == ("--task.dropout" not in case or layout == "1 x 32"), case


@pytest.mark.slow
def test_dropout_recompute_and_sharding_leave_no_trace_with_a_grain():
    """With batch.grain, the gradient is the reference's, whose leaves are numbered over all
    ranks."""
    words = [*DOUBLE, "--batch.grain", "4", "--task.dropout", "0.2", "--machine.recompute", "full"]
    cases = [(kind, [*words, "--machine.blocks", "[Layer]"]) for kind in ("clip", "supcon")]
    world = run(whole_batches.gradients, cases, ranks=2, config="fsdp2")
    assert all(reference < 1e-12 for _, reference, _ in world.ok()[0].values())


@pytest.mark.parametrize("block", [1, 40, 1 << 20])
def test_the_losses_are_those_of_the_papers_in_blocks_of_any_size(block, monkeypatch):
    from oneloop.tasks import row_blocks

    monkeypatch.setattr(row_blocks, "_SIMILARITIES", block)
    torch.manual_seed(0)
    inputs = [torch.randn(13, 5, dtype=torch.float64) for _ in range(2)]
    numbers = [torch.tensor(1.7, dtype=torch.float64), torch.tensor(-0.4, dtype=torch.float64)]
    label = torch.arange(13) % 4
    for kind in LOSSES:
        results = []
        for plain in (True, False):
            a, b, scale, bias = (value.clone().requires_grad_() for value in (*inputs, *numbers))
            if plain:
                loss = whole_batches.plain_loss(kind, a, b, scale, bias, label)
            else:
                parts = {"a": a, "b": b, "scale": scale, "bias": bias}
                loss = whole_batches.Contrast(kind).batch_loss(parts, {"label": label})[0]
            found = torch.autograd.grad(loss, [a, b, scale, bias], allow_unused=True)
            results.append([loss.detach(), *(value for value in found if value is not None)])
        assert len(results[0]) == len(results[1])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_equal_texts_are_no_negatives_of_each_other():
    from oneloop.tasks.contrastive import info_nce

    torch.manual_seed(0)
    queries, keys = torch.randn(4, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    own, others = torch.tensor([1, 2, 1, 3]), torch.tensor([1, 2, 1, 3, 2, 9])
    loss = info_nce(queries, keys, 2.0, ids=[(own, others)])
    expected = 0.0
    for i, left_out in enumerate(([2], [4], [0], [])):
        kept = [j for j in range(6) if j not in left_out]
        expected -= (2.0 * queries[i] @ keys[kept].T).log_softmax(0)[kept.index(i)]
    torch.testing.assert_close(loss, torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 50, 1 << 20])
def test_retrieval_counts_ranks_and_no_ties(block, monkeypatch):
    from oneloop.tasks import row_blocks
    from oneloop.tasks.retrieval_metrics import Retrieval

    monkeypatch.setattr(row_blocks, "_SIMILARITIES", block)
    torch.manual_seed(1)
    queries, documents, ids = torch.randn(37, 4), torch.randn(37, 4), torch.arange(37) // 2
    metrics = Retrieval()
    metrics.update(queries, documents, ids=[ids])
    ranks = {"": [], "reverse_": []}
    for i in range(37):
        for way, (one, other) in {
            "": (queries, documents),
            "reverse_": (documents, queries),
        }.items():
            wrong = [j for j in range(37) if ids[j] != ids[i]]
            ranks[way].append(1 + sum(bool(one[i] @ other[j] >= one[i] @ other[i]) for j in wrong))
    found = metrics.compute()
    for way, known in ranks.items():
        for k in (1, 5, 10):
            assert found[f"{way}recall@{k}"] == sum(rank <= k for rank in known) / 37
        assert found[f"{way}mrr"] == pytest.approx(sum(1 / rank for rank in known) / 37, rel=1e-12)
    # a collapsed model, and a broken one
    for equal in (torch.ones(37, 4), torch.full((37, 4), torch.nan)):
        metrics = Retrieval()
        metrics.update(equal, equal)
        assert metrics.compute()["recall@10"] == 0.0


WRONG = {
    "mean": ["batch_loss", "that is a mean", "return the SUM"],
    "order": [
        "embed returned 'a'",
        "depends on the other samples of the batch, or on the place in it",
    ],
    "others": ["embed returned 'a'", "depends on the other samples"],
    "constant": ["embed returned 'a'", "depends on the other samples"],
    "noise": ["embed returned 'a'", "has other values for the same sample"],
    "table": ["embed returned 'a'", "or on the place in it"],
    "scalar of batch": ["embed returned 'scale'", "is 0-dim, but depends on the batch"],
    "scalar of batch in training": ["embed returned 'scale'", "is 0-dim, but depends on the batch"],
    "others in training": ["embed returned 'a'", "depends on the other samples"],
    "changes the batch": ["embed changes 'x' of the batch in place"],
    "complex": ["embed returned 'a', which is complex"],
    "ragged": ["embed returned 'a' with rows of shape (5,) for 4 samples, and (2,) for one"],
    "parameter in the loss": [
        "batch_loss uses a parameter of the model; return it from embed as a 0-dim tensor"
    ],
    "column": [
        "batch_loss failed: KeyError: 'x'",
        "the result of embed has a, b, scale, bias; batch_columns names label",
    ],
    "no outputs": ["batch_loss returned a tensor 0-dim", "return (loss, outputs)"],
    "update": ["update failed: KeyError: 'x'"],
    "one row": ["embed returned 'scale' of shape (1,) for 4 samples"],
}


def faults(names: list[str]) -> dict[str, str]:
    from oneloop.basics.exit_codes import BadInput
    from oneloop.checks.preflight import preflight
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.recipe.parse import read

    there, found = start(), {}
    for name in names:
        recipe = read(
            [f"{whole_batches.__file__}:Contrast", "--duration", "2", "--task.fault", name]
        )
        try:
            job = build_job(recipe, ranks=1)
            preflight(job, there, there.prepare(job.model))
            found[name] = "accepted"
        except BadInput as error:
            found[name] = str(error)
    return found


def test_wrong_parts_and_losses_are_rejected_before_the_run():
    (found,) = run(faults, ["", *WRONG]).ok()
    assert found.pop("") == "accepted"
    for fault, words in WRONG.items():
        assert all(word in found[fault] for word in words), found[fault]


COMMON = [
    f"{whole_batches.__file__}:Contrast",
    "--batch.size",
    "32",
    "--ema.half_life",
    "64 samples",
    "--track",
    "none",
]
COMMON += [
    "--log.every",
    "1",
    "--eval.every",
    "4",
    "--optimizer.clip",
    "0.5",
    "--task.dropout",
    "0.2",
]


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ddp", marks=SLOW)])
def test_the_same_bits_with_a_grain_also_after_a_kill_on_another_layout(
    tmp_path, monkeypatch, layout
):
    """Weights, EMA weights, log and evaluation are equal; a 0-dim parameter keeps its shape in
    files."""
    words = [
        *COMMON,
        "--batch.grain",
        "4",
        "--duration",
        "2",
        "--eval.every",
        "2",
        "--save.every",
        "1",
        "--save.keep",
        "9",
    ]
    run(train, [*words, "--run.dir", "single"], folder=tmp_path).ok()
    shutil.copytree(tmp_path / "single", tmp_path / "killed")
    back_to(tmp_path / "killed", 1)
    world = run(train, [*words, "--run.dir", "killed"], ranks=2, config=layout, folder=tmp_path)
    assert world.codes == [0, 0], world.output
    monkeypatch.chdir(tmp_path)
    words = [
        "export",
        "killed",
        "--checkpoint",
        "2",
        "--weights",
        "ema",
        "--to",
        "exported",
        "--task",
        COMMON[0],
    ]
    assert main(words) == 0
    exported, ema = (
        load_file("exported/model.safetensors"),
        load_file("single/final/ema.safetensors"),
    )
    assert all(torch.equal(value, exported[name]) for name, value in ema.items())
    for name in ("model", "ema"):
        first, *others = (
            load_file(tmp_path / folder / f"final/{name}.safetensors") for folder in FOLDERS
        )
        assert first["scale"].shape == ()
        assert all(
            torch.equal(value, other[key]) for other in others for key, value in first.items()
        )
    first, *others = (exact_log(tmp_path / folder) for folder in FOLDERS)
    logged = {name for line in first for name in line}
    assert {
        "train/loss",
        "train/near",
        "train/scale",
        "eval/recall@5",
        "eval/reverse_mrr",
    } <= logged
    assert any(line.get("weights") == "ema" for line in first)
    assert all(line in other for other in others for line in first)
    assert not any("noise_scale" in name for name in logged)


FOLDERS = ("single", "killed")


def tied(config: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a 0-dim parameter that two modules share, and of one that a list
    holds."""
    from torch.distributed.fsdp import FSDPModule

    from oneloop.basics.tensors import one_element
    from oneloop.launch.processes import start

    class Inner(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            assert self.scale.ndim == 0
            return self.scale**2 * x

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(3.0))
            self.inner, self.linear = Inner(self.scale), torch.nn.Linear(1, 1, bias=False)
            self.powers = torch.nn.ParameterList([torch.tensor(0.5)])

        def forward(self, x):
            return self.inner(x) + self.scale * x + self.powers[0] * self.linear(x)

    there, model = start(), Outer()
    if config == "fsdp2":
        one_element(model)
    prepared = there.prepare(model)
    assert isinstance(prepared, FSDPModule) == (config == "fsdp2")
    prepared(torch.full((1, 1), 2.0)).sum().backward()
    grads = {name.removeprefix("module."): p.grad for name, p in prepared.named_parameters()}
    return {
        name: (g.full_tensor() if hasattr(g, "full_tensor") else g).reshape(-1)
        for name, g in grads.items()
    }


def test_tied_scalars_and_lists_of_scalars_are_sharded():
    whole, sharded = (
        run(tied, config, ranks=2, config=config).ok()[0] for config in ("ddp", "fsdp2")
    )
    assert whole["scale"] == 2 * 3.0 * 2.0 + 2.0
    assert whole.keys() == sharded.keys() and all(
        torch.equal(value, sharded[name]) for name, value in whole.items()
    )


def test_the_logged_loss_and_the_evaluation_are_those_of_the_whole(tmp_path):
    """The loss of the first step is that of one batch. An evaluation has windows of batch.size, and
    one pool."""
    words = [
        *COMMON[:-2],
        "--task.loss",
        "infonce",
        "--batch.micro",
        "4",
        "--duration",
        "1",
        "--eval.micro",
        "3",
    ]
    for config, ranks in (("single", 1), ("ddp", 2)):
        world = run(
            train, [*words, "--run.dir", config], ranks=ranks, config=config, folder=tmp_path
        )
        assert world.codes == [0] * ranks, world.output
    one, two = (timeless_log(tmp_path / config) for config in ("single", "ddp"))
    task = whole_batches.Contrast("infonce")
    model, dataset = task.model(), task.eval_sets()["validation"]
    weights = load_file(tmp_path / "single/final/model.safetensors")
    model.load_state_dict(weights)
    with torch.no_grad():
        a, b, scale, _ = model.eval()(dataset.x, dataset.y)
    total = sum(
        float(whole_batches.plain_loss("infonce", a[rows], b[rows], scale, scale, torch.zeros(0)))
        for rows in (slice(0, 32), slice(32, 41))
    )
    similarity = a @ b.T
    rank = 1 + (similarity > similarity.diagonal()[:, None]).sum(1)
    for found in (one, two):
        evaluated = next(line for line in found if "eval/loss" in line)
        assert evaluated["eval/loss"] == pytest.approx(total / 41, rel=1e-5)
        assert evaluated["eval/recall@5"] == pytest.approx(float((rank <= 5).float().mean()))
        assert evaluated["eval/mrr"] == pytest.approx(float((1 / rank).mean()), rel=1e-6)
    assert one[0]["train/loss"] == pytest.approx(two[0]["train/loss"], rel=1e-6)


def odd(words: list[str]) -> dict[str, object]:
    """Return the running statistics after one step, and the errors of a model with its own
    generator or scalar."""
    from oneloop.basics.exit_codes import BadInput
    from oneloop.checks.preflight import preflight
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.loop.gradients import Gradients
    from oneloop.measure.meter import Meter
    from oneloop.recipe.parse import read
    from oneloop.train import accumulate

    there, found = start(), {}
    for fault in ("norm", "private generator", "random scalar"):
        job = build_job(read([*words, "--task.fault", fault]), ranks=1)
        there.accelerator.gradient_accumulation_steps = job.layout.accumulate
        model = there.prepare(job.model)
        try:
            seen = preflight(job, there, model)
        except BadInput as error:
            found[fault] = str(error)
            continue
        made = Gradients(job, there, model, [*model.parameters()], seen)
        samples = [job.train_set[index] for index in range(32)]
        group = whole_batches.group_of(job, there, samples)
        accumulate(there, made, group, Meter(there.accelerator), position=0, measured=False)
        found[fault] = model.a.norm.running_mean, model.a.norm.num_batches_tracked, samples
    return found


def test_batch_statistics_are_updated_once_and_a_private_generator_is_found():
    words = [
        f"{whole_batches.__file__}:Contrast",
        "--duration",
        "2",
        "--batch.size",
        "32",
        "--batch.micro",
        "8",
    ]
    (found,) = run(odd, words).ok()
    mean, count, samples = found["norm"]
    expected = torch.zeros(8)
    for start in range(0, 32, 8):
        expected = 0.9 * expected + 0.1 * torch.stack(
            [x for x, _ in samples[start : start + 8]]
        ).mean(0)
    assert count == 4
    torch.testing.assert_close(mean, expected)
    assert (
        "embed returned 'scale', which is 0-dim and differs between micro-batches"
        in found["random scalar"]
    )
    assert (
        "embed returned 'a' with other values for the same micro-batch and random numbers"
        in found["private generator"]
    )


SHAPES = {  # name: (result of embed in the second micro-batch, part of the message)
    "another row": (
        {"a": torch.zeros(8, 3), "scale": torch.ones(())},
        "(a: rows of shape (2,) (torch.float32) -> rows of shape (3,) (torch.float32)); return",
    ),
    "another dtype": (
        {"a": torch.zeros(8, 2, dtype=torch.float64), "scale": torch.ones(())},
        "(a: rows of shape (2,) (torch.float32) -> rows of shape (2,) (torch.float64)); return",
    ),
    "rows in place of a scalar": (
        {"a": torch.zeros(8, 2), "scale": torch.ones(8)},
        "(scale: 0-dim (torch.float32) -> rows of shape () (torch.float32)); return",
    ),
    "fewer rows": (
        {"a": torch.zeros(7, 2), "scale": torch.ones(())},
        "'a' has the shape (7, 2) for 8 samples; give it one row per sample",
    ),
    "a new name": (
        {"a": torch.zeros(8, 2), "scale": torch.ones(()), "b": torch.zeros(8)},
        "(b: missing -> rows of shape () (torch.float32)); return the same names",
    ),
    "a missing name": (
        {"a": torch.zeros(8, 2)},
        "(scale: 0-dim (torch.float32) -> missing); return the same names",
    ),
}


def later_shapes(words: list[str]) -> dict[str, str]:
    """Return the errors of results of embed that change after the preflight check."""
    from oneloop.basics.exit_codes import Inexact
    from oneloop.job.build import build_job
    from oneloop.job.two_passes import TwoPasses
    from oneloop.launch.processes import start
    from oneloop.recipe.parse import read

    there, found = start(), {}
    for name, (changed, _) in SHAPES.items():
        job = build_job(read(words), ranks=1)
        results = iter([{"a": torch.zeros(8, 2), "scale": torch.ones(())}, changed])
        job.task.embed = lambda model, batch, results=results: next(results)
        passes = TwoPasses(job, there, there.prepare(job.model), lambda micro: None)
        try:
            passes.first([{"label": torch.zeros(8)}, {"label": torch.zeros(8)}])
        except Inexact as error:
            found[name] = str(error)
    return found


def test_rows_that_change_later_are_named():
    words = [f"{whole_batches.__file__}:Contrast", "--duration", "2"]
    (found,) = run(later_shapes, [*words, "--batch.size", "32", "--batch.micro", "8"]).ok()
    assert found.keys() == SHAPES.keys()
    for name, (_, words) in SHAPES.items():
        assert words in found[name], found[name]


def test_a_task_has_one_kind_of_loss():
    from oneloop.task_protocol.protocol import check

    class Both(whole_batches.Contrast):
        def loss(self, model, batch):
            return torch.zeros(()), {}

    class Half(whole_batches.Contrast):
        embed = None

    with pytest.raises(ValueError, match="has both loss and batch_loss; remove one of them"):
        check(Both())
    with pytest.raises(ValueError, match="Half is not a task: it lacks embed"):
        check(Half())


def test_a_scaled_loss_gives_scaled_gradients():
    """fp16: the scaler multiplies the loss, and with it the gradients of the first pass."""
    from oneloop.job.two_passes import _Continued

    part = torch.tensor([1.0, 2.0], requires_grad=True)
    value = _Continued.apply(torch.tensor(5.0), [torch.tensor([0.5, -1.0])], part)
    (value * 1024).backward()
    assert value == 5.0 and part.grad.tolist() == [512.0, -1024.0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["regional", "whole"])
def test_compiled_passes_draw_the_same_numbers(tmp_path, how):
    """A step compares both passes, and would end the run; each has its own graph, with and without
    gradients."""
    words = [
        *COMMON,
        "--batch.micro",
        "8",
        "--duration",
        "20",
        "--machine.compile",
        how,
        "--machine.blocks",
        "[Layer]",
    ]
    world = run(train, [*words, "--run.dir", "run"], folder=tmp_path, timeout=500.0)
    assert world.codes == [0], world.output
    losses = [line["train/loss"] for line in timeless_log(tmp_path / "run") if "train/loss" in line]
    assert len(losses) == 20 and losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_kills_on_changing_layouts_leave_no_trace(tmp_path):
    words = [
        *COMMON,
        "--batch.grain",
        "4",
        "--duration",
        "200",
        "--save.every",
        "5",
        "--machine.workers",
        "0",
    ]
    run(train, [*words, "--run.dir", "whole"], folder=tmp_path, timeout=300.0).ok()
    deaths = [(1, "single", 30), (2, "ddp", 70), (2, "fsdp2", 120), (1, "single", 160)]
    killed = same_bits.history(tmp_path / "killed", words, deaths, (2, "fsdp2"), random.Random(3))
    assert killed >= 3
    for name in ("model", "ema"):
        whole, again = (
            load_file(tmp_path / place / f"final/{name}.safetensors")
            for place in ("whole", "killed/run")
        )
        assert all(torch.equal(value, again[key]) for key, value in whole.items())


ODD = '''
import torch
from torch import nn
from torch.nn import functional as F


class Rows(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "n": torch.tensor(i)}


class Odd:
    """Columns and parts of dtypes that gloo or NCCL cannot send."""

    batch_columns = ("short", "flag", "byte", "turn", "unsigned", "eighth")

    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def train_set(self):
        return Rows(96, 1)

    def eval_sets(self):
        return {"validation": Rows(17, 2)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def collate(self, samples):
        n = torch.stack([one["n"] for one in samples])
        return {
            "x": torch.stack([one["x"] for one in samples]),
            "short": (n % 3).to(torch.int16),
            "flag": n % 2 == 0,
            "byte": (n % 7).to(torch.uint8),
            "turn": torch.polar(torch.ones(len(n)), n.float()),
            "unsigned": (n % 5).to(torch.uint16),
            "eighth": (n % 4).float().to(torch.float8_e4m3fn),
        }

    def embed(self, model, batch):
        e = F.normalize(model(batch["x"]), dim=1)
        parts = {"e": e, "half": e.detach().half(), "brain": e.detach().bfloat16()}
        return parts | {"class": batch["short"] * 2, "scale": torch.tensor(4, dtype=torch.int16)}

    def batch_loss(self, parts, columns):
        e = parts["e"]
        logits = parts["scale"] * e @ (parts["half"].float() + parts["brain"].float()).T
        logits = logits + 0.1 * (columns["turn"][:, None] * columns["turn"].conj()).real
        target = parts["class"].long() + columns["byte"].long() + columns["unsigned"].long()
        each = columns["flag"].float() + columns["eighth"].float()
        return (each * F.cross_entropy(logits, target % len(e), reduction="none")).sum(), {}

    def metrics(self):
        from oneloop.tasks.retrieval_metrics import Retrieval

        return Retrieval()

    def update(self, metrics, batch, outputs):
        assert batch["short"].dtype == torch.int16 and batch["eighth"].element_size() == 1
        metrics.update(outputs["e"], outputs["half"].float(), ids=[batch["short"]])


class Wide(Odd):
    """The rows of a column are as long as the longest of the micro-batch."""

    batch_columns = (*Odd.batch_columns, "pad")

    def collate(self, samples):
        # In training all rows have one length; in evaluation rank 0 has other ones than rank 1.
        batch = super().collate(samples)
        first = bool((batch["x"][0] == Rows(17, 2).x).all(1)[:12].any())
        return {**batch, "pad": torch.ones(len(samples), 3 if first else 5)}
'''


def odd_rows(folder: Path, name: str, *words: str, ranks: int, config: str):
    (folder / "odd_rows.py").write_text(ODD)
    given = [f"{folder / 'odd_rows.py'}:{name}", "--batch.size", "16", "--duration", "4"]
    given += ["--eval.every", "2", "--eval.micro", "4", "--track", "none", "--machine.workers", "0"]
    return run(
        train,
        [*given, "--run.dir", f"{config}{ranks}", *words],
        ranks=ranks,
        config=config,
        folder=folder,
    )


@pytest.mark.parametrize("config", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_rows_of_any_dtype_are_gathered(tmp_path, config):
    odd_rows(tmp_path, "Odd", ranks=1, config="single").ok()
    odd_rows(tmp_path, "Odd", ranks=2, config=config).ok()
    found = []
    for name in ("single1", f"{config}2"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        evaluations = [json.loads(line) for line in lines if "eval/loss" in line]
        found.append((evaluations, load_file(tmp_path / name / "final" / "model.safetensors")))
    (one, weights), (two, others) = found
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-5, atol=1e-6)
    assert len(one) == len(two) > 0
    for line, other in zip(one, two, strict=True):
        for name in ("eval/loss", "eval/mrr", "eval/recall@1"):
            assert line[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.parametrize("config", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_rows_of_several_lengths_in_an_evaluation_are_reported(tmp_path, config):
    world = odd_rows(tmp_path, "Wide", ranks=2, config=config)
    assert world.codes == [1, 1], world.output
    expected = (
        "(pad: rows of shape (3,) (torch.float32) -> rows of shape (5,) (torch.float32)); return "
        "the same names"
    )
    assert world.output.count(expected) >= 2  # each rank reports it; the supervisor prints one
