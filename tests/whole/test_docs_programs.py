"""The programs in the docs work as printed: the single components, and both sides of each migration
page."""

from __future__ import annotations

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from own_files import rows
from pages import blocks, program
from slow_cases import with_slow
from small_models import bert, llama
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers("oneloop.train")

PARTS = blocks("how-to/single-modules.md", "python")


def on_two(folder: Path, name: str, *names: str):
    (folder / name).write_text(PARTS[name])
    return run(program, name, *names, ranks=2, folder=folder)


def test_all_programs_of_the_parts_are_run():
    assert PARTS.keys() == {"checkpoints.py", "guard.py", "evaluation.py"}


def test_average_and_checkpoints_are_saved_and_resumed(tmp_path):
    """A run that is stopped at step 20 and resumed equals a run without a stop."""
    first, second = (
        on_two(tmp_path, "checkpoints.py", "averaged"),
        on_two(tmp_path, "checkpoints.py", "averaged"),
    )
    first.ok()
    (stopped,), _ = second.ok()
    assert "resuming from" not in first.output and "step 40" in second.output
    whole = tmp_path / "whole"
    whole.mkdir()
    text = PARTS["checkpoints.py"].replace("stop = 20 if count.step == 0 else 40", "stop = 40")
    (whole / "checkpoints.py").write_text(text)
    (at_once,), _ = run(program, "checkpoints.py", "averaged", ranks=2, folder=whole).ok()
    assert stopped.tolist() == at_once.tolist()


def test_guard(tmp_path):
    (left_out,), other = on_two(tmp_path, "guard.py", "left_out").ok()
    assert left_out == [4] and other == (left_out,)


def test_evaluation(tmp_path):
    (found,), other = on_two(tmp_path, "evaluation.py", "found").ok()
    assert found == {"loss": 11.0, "largest": 25.0} and other == (found,)


def _connected(cpu: bool) -> int:
    from accelerate import Accelerator
    from torch import distributed

    accelerator = Accelerator(cpu=cpu)
    # rank 0 hosts the store: keep it until all ranks are connected
    if distributed.is_initialized():
        distributed.barrier()
    return accelerator.num_processes


def test_what_a_plain_script_needs_without_a_gpu(tmp_path):
    """Accelerate behaves as the docs describe. If accelerate fixes this, update the page."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("needs a machine without a GPU")
    assert run(_connected, True, ranks=2).ok() == [2, 2]
    assert run(_connected, False, ranks=2).ok() == [1, 1]


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_two_losses_one_of_them_warmed_up(tmp_path, config, ranks):
    name = "autoencoder.py"
    (tmp_path / name).write_text(blocks("tutorials/own-loss.md", "python")[name])
    page = (ROOT / "docs" / "tutorials" / "own-loss.md").read_text()
    typed = next(
        line for line in page.splitlines() if line.startswith("oneloop") and f"{name}:" in line
    )
    words = [*typed.split()[4:], "--run.dir", "run", "--track", "none", "--log.every", "1"]
    run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (
        ended["best"]["metric"] == "eval/error"
        and ended["eval/error"] < 2.5
        and ended["eval/size"] > 0
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    betas = [line["train/beta"] for line in lines if "train/beta" in line]
    total = ended["step"]
    assert betas == pytest.approx(
        [0.1 * min(1.0, step / total / 0.3) for step in range(total)], rel=1e-5
    )
    shown = json.loads((tmp_path / "run" / "examples.json").read_text())["samples"]
    assert all(
        list(one["parts"]) == ["image", "prediction"]
        and all(part.startswith("data:image/png") for part in one["parts"].values())
        for one in shown
    )


MOVING = {
    "how-to/from-composer.md": ("single", 1, ["--init.from", "start.safetensors"]),
    "how-to/from-pytorch.md": ("single", 1, ["--init.from", "start.safetensors"]),
    "how-to/from-accelerate.md": ("ddp", 2, ["--init.from", "start.safetensors"]),
    "how-to/from-trainer.md": ("single", 1, ["--task.model", "start"]),
}


def reviews(folder: Path) -> None:
    """Write the files that the page about Trainer uses: a small BERT and reviews."""
    bert(folder / "bert", positions=64)
    (folder / "reviews").mkdir()
    made = [{"body": row["text"], "stars": row["label"]} for row in rows(240)]
    for part, own in (("train", made[:200]), ("validation", made[200:])):
        (folder / "reviews" / f"{part}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in own)
        )


@pytest.mark.parametrize("page", with_slow(MOVING, ["how-to/from-trainer.md"]))
def test_both_sides_lose_the_same(tmp_path, page):
    """A library that is no longer developed cannot be installed here: then only the task is run."""
    config, ranks, words = MOVING[page]
    both = page != "how-to/from-composer.md" or find_spec("composer") is not None
    for kind in ("python", "yaml"):
        for name, text in blocks(page, kind).items():
            (tmp_path / name).write_text(text)
    if page == "how-to/from-trainer.md":
        reviews(tmp_path)
    theirs = None
    if both:
        (theirs,), *_ = run(
            program, "before.py", "losses", ranks=ranks, config=config, folder=tmp_path
        ).ok()
    else:
        words = []
    common = ["after.yaml", *words, "--log.every", "1", "--track", "none", "--run.dir", "check"]
    run(train, common, ranks=ranks, config=config, folder=tmp_path).ok()
    lines = [
        json.loads(line) for line in (tmp_path / "check" / "metrics.jsonl").read_text().splitlines()
    ]
    ours = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(ours) == 40 and ours[-1] < 0.9 * ours[0], (ours[0], ours[-1])
    if theirs is None:
        return
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{page}: largest difference {worst:.1e}, losses {ours[0]:.4f} to {ours[-1]:.4f}")
    assert worst < 1e-4


@pytest.mark.parametrize("page", MOVING)
def test_without_the_comparison_the_old_side_runs_too(page):
    """The lines between BEGIN and END are the only additions to the old program."""
    before = blocks(page, "python")["before.py"]
    plain = re.sub(r"# BEGIN.*?# END\n", "", before, flags=re.S)
    assert "oneloop" not in plain and "oneloop" in before
    compile(plain, page, "exec")


def test_the_recipe_for_torchtunes_users_has_the_values_of_the_config():
    page = "how-to/from-torchtune.md"
    config = yaml.safe_load(blocks(page, "yaml")["before.yaml"])
    recipe = yaml.safe_load(blocks(page, "yaml")["after.yaml"])
    assert recipe["task"]["model"] == config["checkpointer"]["checkpoint_dir"]
    assert recipe["task"]["length"] == config["tokenizer"]["max_seq_len"]
    assert recipe["batch"]["micro"] == config["batch_size"]
    assert recipe["batch"]["size"] == config["batch_size"] * config["gradient_accumulation_steps"]
    assert recipe["optimizer"]["lr"] == float(config["optimizer"]["lr"])
    assert recipe["schedule"]["warmup"] == config["lr_scheduler"]["num_warmup_steps"]
    for ours, theirs in (("rank", "lora_rank"), ("alpha", "lora_alpha")):
        assert recipe["task"]["lora"][ours] == config["model"][theirs]


@pytest.mark.slow
def test_the_recipe_for_torchtunes_users_trains(tmp_path):
    page = "how-to/from-torchtune.md"
    recipe = yaml.safe_load(blocks(page, "yaml")["after.yaml"])
    chats = llama(tmp_path / recipe["task"]["model"])
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "after.yaml").write_text(blocks(page, "yaml")["after.yaml"])
    words = ["after.yaml", "--duration", "8", "--schedule.warmup", "0", "--optimizer.lr", "1e-2"]
    words += ["--log.every", "1", "--eval.samples", "0", "--track", "none"]
    world = run(train, words, folder=tmp_path)
    world.ok()
    assert "LoRA of rank 8" in world.output
    lines = (tmp_path / "runs" / "chats" / "metrics.jsonl").read_text().splitlines()
    losses = [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.05, losses


KEYS = (ROOT / "docs" / "reference" / "keys.md").read_text()


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("from-*.md")), ids=str)
def test_every_key_in_a_table_of_equivalents_exists(page):
    groups = {line.split(".")[0] for line in re.findall(r"^\| `(\w+\.\w+)", KEYS, re.M)}
    for row in re.findall(r"^\|.*\|(.*)\|$", page.read_text(), re.M):
        for words in re.findall("`([^`]+)`", row):
            key = re.match(r"(?:--)?((\w+)(?:\.\w+)+)", words)
            if key and f"{key[2]}.name torch." in row:  # an argument of this class
                continue
            if key and key[2] in groups and key[1] not in ("task.lora", "oneloop.evaluate"):
                assert f"| `{key[1]}`" in KEYS, f"{page.name}: {words}"


@pytest.mark.slow
def test_a_task_generates_while_it_trains(tmp_path):
    ((name, text),) = blocks("how-to/generate-while-training.md", "python").items()
    (tmp_path / name).write_text(text)
    words = ["numbers", "--task", "writer.py:Writer", "--eval.generate", "16", "--duration", "4"]
    words += ["--task.width", "16", "--task.layers", "1", "--eval.every", "2", "--run.dir", "run"]
    run(train, words, ranks=2, folder=tmp_path).ok()
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    found = [line["eval/character_errors"] for line in lines if "eval/loss" in line]
    assert len(found) == 2 and all(0 < value < 100 for value in found)


GANS = blocks("how-to/gans.md", "python")
MUST_REACH = {  # command line, best evaluation, and what the page says about it
    "by_turns": ("eval/distance", lambda value: value < 5, "fall below 5"),
    "together": ("eval/readable", lambda value: value > 0.9, "must reach 0.9"),
}


def sampled() -> torch.Tensor:
    """Return the images that the page's program generates in the current folder."""
    sys.path.insert(0, "")
    return program("sample.py", "images")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUST_REACH)
def test_a_gan_reaches_what_the_page_says(tmp_path, name):
    """The commands of the page, on one process; then the program that samples."""
    page = (ROOT / "docs" / "how-to" / "gans.md").read_text()
    for file, text in {**GANS, **blocks("how-to/gans.md", "yaml")}.items():
        (tmp_path / file).write_text(text)
        assert not file.startswith(name) or len(text.splitlines()) <= 90, file
    typed = next(line for line in page.splitlines() if re.match(f"oneloop launch .* {name}.", line))
    words = typed[typed.index(f"{name}.") :].split()
    run(train, [*words, "--track", "none"], folder=tmp_path).ok()

    metric, good, said = MUST_REACH[name]
    ended = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
    assert good(ended[metric]) and said in page, ended
    assert ended["best"]["metric"] == metric
    samples = json.loads((tmp_path / "runs" / name / "examples.json").read_text())["samples"]
    assert len(samples) == 8 and all("image" in sample["parts"] for sample in samples)

    if name == "by_turns":
        (images,) = run(sampled, folder=tmp_path).ok()
        assert images.shape == (10, 1, 8, 8) and images.std(0).mean() > 0.3


TABLE = """
import torch
from torch import nn


class Factors(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.users = nn.Embedding(1000, 8, sparse=sparse)
        self.items = nn.Embedding(500, 8, sparse=sparse)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1)


class Ratings:
    collate = staticmethod(torch.utils.data.default_collate)

    def model(self):
        return Factors()

    def train_set(self):
        draws = torch.Generator().manual_seed(0)
        users = torch.randint(1000, (512,), generator=draws)
        items = torch.randint(500, (512,), generator=draws)
        ratings = torch.randn(512, generator=draws)
        rows = zip(users, items, ratings)
        return [{"user": user, "item": item, "rating": rating} for user, item, rating in rows]

    def eval_sets(self):
        return {"validation": self.train_set()[:32]}

    def weight(self, batch):
        return torch.tensor(float(len(batch["rating"])))

    def loss(self, model, batch):
        return (model(batch["user"], batch["item"]) - batch["rating"]).square().sum(), {}
"""


def sparse_loop(folder: Path, make):
    """Return the weights of a plain loop with sparse gradients."""
    from oneloop.basics.seeds import key
    from oneloop.data.order import Order

    made = runpy.run_path(str(folder / "table.py"))
    torch.manual_seed(key(0))
    model = made["Factors"](sparse=True)
    optimizer = make(model.parameters(), lr=0.1)
    task = made["Ratings"]()
    samples = task.train_set()
    indices = Order(512, seed=0)[0 : 20 * 32][1].tolist()
    for step in range(20):
        batch = task.collate([samples[index] for index in indices[step * 32 : (step + 1) * 32]])
        optimizer.zero_grad()
        (task.loss(model, batch)[0] / 32).backward()
        assert model.users.weight.grad.is_sparse
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_large_tables_train_as_with_sparse_gradients(tmp_path, optimizer, config, ranks):
    """What the page about optimizers says about large embedding tables."""
    (tmp_path / "table.py").write_text(TABLE)
    words = ["table.py:Ratings", "--duration", "20", "--batch.size", "32", "--track", "none"]
    words += ["--optimizer.lr", "0.1", "--optimizer.clip", "0", "--run.dir", "run"]
    if optimizer == "SGD":
        words += ["--optimizer.name", "sgd", "--optimizer.momentum", "0"]
    else:
        words += ["--optimizer.name", f"torch.optim.{optimizer}"]
    run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    expected = sparse_loop(tmp_path, getattr(torch.optim, optimizer))
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def test_sparse_gradients_name_what_to_do(tmp_path):
    (tmp_path / "table.py").write_text(TABLE.replace("sparse=False", "sparse=True"))
    world = run(train, ["table.py:Ratings", "--duration", "1"], folder=tmp_path)
    assert world.codes == [2] and not (tmp_path / "runs").exists()
    assert "set sparse=False" in world.output and "sgd with momentum 0" in world.output
    assert "## Large embedding tables" in (ROOT / "docs/reference/optimizers.md").read_text()
