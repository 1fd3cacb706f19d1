"""Problems with a first custom task: a loss that changes during the run, masks, the best
weights."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from oneloop import cli
from oneloop.basics.exit_codes import BadInput
from oneloop.show.terminal import metric
from oneloop.tools.report.examples import plain
from silent_cases import unfinished
from worlds import after, run, train

pytestmark = pytest.mark.covers(
    "oneloop.api",
    "oneloop.cli",
    "oneloop.job.build",
    "oneloop.loop.upkeep",
    "oneloop.recipe.class_paths",
    "oneloop.run.compatibility",
    "oneloop.tools.report.examples",
    "oneloop.show.terminal",
    "oneloop.tools.after_training.evaluate_and_predict",
)

TASK = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Annealed:
    """Its second loss is warmed up over the first half of the run."""

    progress = None

    def model(self):
        return Net()

    def train_set(self):
        return torch.utils.data.TensorDataset(torch.linspace(-1, 1, 256).reshape(64, 4))

    def eval_sets(self):
        return {"validation": self.train_set(), "test": self.train_set()}

    def collate(self, samples):
        return {"x": torch.stack([x for x, in samples]), "name": [str(len(samples)) for _ in samples]}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        said = model(batch["x"])
        share = min(1.0, 2 * self.progress.share)
        each = (said - batch["x"]).square().sum(1) + share * said.abs().sum(1)
        return each.sum(), {"loss": each.detach(), "said": said.detach(), "beta": torch.tensor(share)}

    def samples_of(self, data, *, labelled):
        return self.train_set()

    def predicted(self, batch, outputs):
        return {"said": outputs["said"], "largest": outputs["said"].amax(1), "name": batch["name"]}


class Constant(Annealed):
    def loss(self, model, batch):
        wanted = batch["x"] if model.training else -batch["x"]  # the more it learns, the worse
        each = (model(batch["x"]) - wanted).square().sum(1)
        return each.sum(), {"loss": each.detach()}

    def show(self, sample, outputs):
        return {"text": "shown"}


class Inside(Annealed):
    def loss(self, model, batch):
        said = model.decoder(model.encoder(batch["x"]))
        return (said - batch["x"]).square().sum(), {}


class Generating(Annealed):
    def generate(self, model, batch):
        return {"drawn": model.decoder(torch.ones(len(batch["x"]), 2))}

    def show(self, sample, outputs):
        return {"text": str(outputs["drawn"].shape) if "drawn" in outputs else "none"}


class Failing(Annealed):
    def generate(self, model, batch):
        try:
            model(torch.ones(2, 9))  # FSDP2 has gathered the weights when this fails
        except RuntimeError:
            raise KeyError("no such thing") from None

    def show(self, sample, outputs):
        return {"text": "shown"}


class Columns(Annealed):
    def predicted(self, batch, outputs):
        return {"one": outputs["said"].sum()}
'''  # noqa: E501
COMMON = [
    "--batch.size",
    "16",
    "--duration",
    "20",
    "--track",
    "none",
    "--log.every",
    "1",
    "--optimizer.lr",
    "0.02",
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path


def lines(run_folder) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


LAYOUTS = [
    ("single", 1, []),
    ("single", 1, ["--batch.micro", "4"]),
    ("ddp", 2, ["--batch.micro", "2"]),
    ("fsdp2", 2, []),
]
ONE_AND_TWO = [LAYOUTS[0], LAYOUTS[2]]


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(ONE_AND_TWO, id="one and two"),
        pytest.param(LAYOUTS, id="all", marks=pytest.mark.slow),
    ],
)
def test_a_loss_that_changes_along_the_run_is_the_same_for_any_split(folder, layouts):
    found = []
    for number, (config, ranks, words) in enumerate(layouts):
        words = ["mine.py:Annealed", *COMMON, *words, "--run.dir", f"run-{number}"]
        run(train, words, ranks=ranks, config=config, folder=folder).ok()
        trained = [line for line in lines(folder / f"run-{number}") if "train/beta" in line]
        assert [line["train/beta"] for line in trained] == pytest.approx(
            [min(1.0, 0.1 * step) for step in range(20)]
        )
        found.append([line["train/loss"] for line in trained])
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found[1:])
    ended = json.loads((folder / "run-0" / "summary.json").read_text())
    evaluated = after(folder, "evaluate", "run-0", "--json")
    evaluated.ok()
    metrics = json.loads(
        next(line for line in evaluated.output.splitlines() if line.startswith("{"))
    )
    # at the end of the run, beta is 1
    assert metrics["eval/loss"] == pytest.approx(ended["eval/loss"], rel=1e-5)


def test_it_continues_where_it_was_and_not_on_a_longer_run(folder):
    words = [
        "mine.py:Annealed",
        *COMMON,
        "--save.every",
        "5",
        "--save.keep",
        "9",
        "--run.dir",
        "run",
    ]
    run(train, words, folder=folder).ok()
    whole = load_file(folder / "run" / "final" / "model.safetensors")
    unfinished(folder / "run", 10)
    run(train, words, folder=folder).ok()
    parts = load_file(folder / "run" / "final" / "model.safetensors")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    longer = ["mine.py:Annealed", *COMMON, "--duration", "40", "--run.dir", "run"]
    rejected = run(train, longer, folder=folder)
    assert rejected.codes == [2] and "along which the loss changes: 20 -> 40" in rejected.output


def test_a_model_that_is_not_called_is_reported_where_it_is_wrapped(folder):
    run(train, ["mine.py:Inside", *COMMON, "--run.dir", "one"], folder=folder).ok()
    rejected = run(
        train, ["mine.py:Inside", *COMMON, "--run.dir", "two"], ranks=2, config="ddp", folder=folder
    )
    assert rejected.codes == [2, 2] and "has no 'decoder': call model(...)" in rejected.output
    assert not (folder / "two").exists()


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_what_generates(folder, config, ranks):
    how = {"ranks": ranks, "config": config, "folder": folder}
    if config != "fsdp2":  # which gathers weights only in the forward of the whole model
        run(train, ["mine.py:Generating", *COMMON, "--run.dir", "drawn"], **how).ok()
        shown = json.loads((folder / "drawn" / "examples.json").read_text())["samples"]
        assert {one["text"] for one in shown if not one["worst"]} == {"torch.Size([4])"}
    world = run(train, ["mine.py:Failing", *COMMON, "--run.dir", "failing"], **how)
    world.ok()
    assert (
        world.output.count(
            "a sample cannot be shown (Failing.generate: KeyError: 'no such thing'); training "
            "continues"
        )
        == 1
    )


def test_columns_may_be_tensors_and_texts(folder):
    run(train, ["mine.py:Annealed", *COMMON, "--run.dir", "run"], folder=folder).ok()
    after(
        folder, "predict", "run", "--data", "any", "--to", "said.jsonl", ranks=2, config="ddp"
    ).ok()
    rows = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(64)) and all(
        len(row["said"]) == 4 for row in rows
    )
    assert all(row["largest"] == max(row["said"]) and isinstance(row["name"], str) for row in rows)
    rejected = after(
        folder, "predict", "run", "--data", "any", "--to", "no.jsonl", "--task", "mine.py:Columns"
    )
    assert (
        rejected.codes == [2]
        and "Columns.predicted returned a float as 'one' for 16 samples" in rejected.output
    )


def test_the_metrics_are_those_of_the_weights_in_final(folder):
    """With save.final best, the last lines, the summary, the examples and export belong to the
    weights in final/."""
    words = [
        "mine.py:Constant",
        *COMMON,
        "--eval.every",
        "5",
        "--save.final",
        "best",
        "--save.every",
        "0",
    ]
    world = run(train, [*words, "--run.dir", "run"], folder=folder)
    world.ok()
    ended = json.loads((folder / "run" / "summary.json").read_text())
    best = ended["best"]["step"]
    assert (
        best < 20
        and ended["final"]["step"] == best
        and ended["eval/loss"] == pytest.approx(ended["best"]["value"])
    )
    assert f"final/ holds the best weights, of step {best}" in world.output
    written = lines(folder / "run")
    assert [line["step"] for line in written if "eval/loss" in line] == [5, 10, 15, 20]
    assert [line["step"] for line in written if "test/loss" in line] == [best]
    assert json.loads((folder / "run" / "examples.json").read_text())["step"] == best
    assert run(cli.main, ["export", "run", "--to", "out"], folder=folder).ok() == [0]
    final = load_file(folder / "run" / "final" / "model.safetensors")
    out = load_file(folder / "out" / "model.safetensors")
    assert all(torch.equal(final[name], out[name]) for name in final)
    assert run(
        cli.main, ["export", "run", "--to", "new", "--checkpoint", "newest"], folder=folder
    ).ok() == [0]
    assert not torch.equal(
        load_file(folder / "new" / "model.safetensors")["encoder.weight"], final["encoder.weight"]
    )


def test_masks_are_pictures():
    mask = torch.zeros(8, 8, dtype=torch.uint8)
    mask[2:5, 2:5] = 2
    shown = plain({"image": torch.rand(3, 8, 8), "target": mask, "prediction": mask.numpy() * 0})
    assert list(shown) == ["parts"] and list(shown["parts"]) == ["image", "target", "prediction"]
    black = plain({"target": torch.zeros(8, 8, dtype=torch.int64)})["parts"]["target"]
    assert shown["parts"]["prediction"] == black != shown["parts"]["target"]
    assert plain({"prediction": torch.tensor(3)}) == {"parts": {}, "prediction": "3"}


def test_large_metrics():
    assert [metric(value) for value in (0.5, -12345.6, 9999.0, 1e15)] == [
        "0.5000",
        "-12,346",
        "9999.0000",
        f"{1e15:.4f}",
    ]


@pytest.mark.parametrize(
    ("config", "ranks"), [("single", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)]
)
def test_a_damaged_best_checkpoint_is_reported_and_not_taken(folder, config, ranks):
    words = [
        "mine.py:Constant",
        *COMMON,
        "--eval.every",
        "5",
        "--save.final",
        "best",
        "--save.every",
        "5",
    ]
    words += ["--save.keep", "9", "--run.dir", "run"]
    how = {"ranks": ranks, "config": config, "folder": folder}
    run(train, words, **how).ok()
    best = json.loads((folder / "run" / "summary.json").read_text())["best"]["step"]
    assert best == 5
    unfinished(folder / "run", 10)
    part = folder / "run" / "checkpoints" / "step-00000005" / "rank-00000.safetensors"
    spoiled = bytearray(part.read_bytes())
    spoiled[-2] ^= 4
    part.write_bytes(spoiled)
    world = run(train, words, **how)
    world.ok()
    assert "THE BEST CHECKPOINT" in world.output and "final/ gets the last weights" in world.output
    ended = json.loads((folder / "run" / "summary.json").read_text())
    assert ended["final"] == {"weights": "last", "step": 20, "end": 20}


def test_a_best_of_another_folder_is_reported(folder):
    words = [
        "mine.py:Constant",
        *COMMON,
        "--eval.every",
        "5",
        "--save.final",
        "best",
        "--save.keep",
        "9",
    ]
    run(train, [*words, "--save.every", "5", "--run.dir", "one"], folder=folder).ok()
    resume = ["--run.dir", "two", "--run.resume", "one/checkpoints/step-00000010"]
    world = run(train, [*words, *resume], folder=folder)
    world.ok()
    assert "CANNOT BE USED: it does not exist" in world.output
    assert json.loads((folder / "two" / "summary.json").read_text())["final"]["weights"] == "last"


def test_another_file_of_the_same_name_is_reported(folder):
    run(train, ["mine.py:Annealed", *COMMON, "--run.dir", str(folder / "run")], folder=folder).ok()
    (folder / "there").mkdir()
    (folder / "there" / "mine.py").write_text(TASK + "# another\n")
    words = ["mine.py:Annealed", *COMMON, "--run.dir", str(folder / "run")]
    finished = run(train, words, folder=folder / "there")
    finished.ok()
    assert "the source of its task has changed since" in finished.output
    (folder / "there" / "mine.py").write_text(TASK)  # an identical copy
    run(train, words, folder=folder / "there").ok()


WRONG = {
    "progress that cannot be set": (
        "    progress = property(lambda self: None)\n",
        "its progress cannot be set",
    ),
    "a file that ends the interpreter": (
        "    pass\n\nraise SystemExit(0)\n",
        "calls sys.exit when it is imported",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(folder, case):
    members, expected_text = WRONG[case]
    (folder / "wrong.py").write_text(f"import mine\n\nclass Wrong(mine.Annealed):\n{members}")
    rejected = run(train, ["wrong.py:Wrong", *COMMON, "--run.dir", "run"], folder=folder)
    assert (
        rejected.codes == [2] and expected_text in rejected.output and not (folder / "run").exists()
    )


def _again_in_a_notebook() -> None:
    """A changed class is not mistaken for the class whose run has ended."""
    import linecache

    from oneloop import fit

    module = sys.modules["__main__"]

    def cell(number: int, width: int) -> None:
        text = TASK.replace(
            "nn.Linear(4, 2), nn.Linear(2, 4)", f"nn.Linear(4, {width}), nn.Linear({width}, 4)"
        )
        name = f"/tmp/cell-{number}.py"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), vars(module))

    how = {"duration": 3, "track": "none", "run": {"dir": "run"}, "watch": {"output": "quiet"}}
    if hasattr(module, "__file__"):
        del module.__file__  # as in a notebook
    cell(1, 2)
    first = fit(module.Annealed, **how)
    assert fit(module.Annealed, **how) == first  # nothing to do
    vars(module)["Annealed"].loss, before = module.Inside.loss, module.Annealed.loss
    with pytest.raises(
        BadInput,
        match="the source of its task has changed since: choose another run.dir",
    ):
        fit(module.Annealed, **how)
    module.Annealed.loss = before
    with pytest.raises(BadInput, match="batch.micro auto needs a second process"):
        fit(module.Annealed, **{**how, "run": {"dir": "auto"}}, batch={"micro": "auto"})
    with pytest.raises(
        BadInput, match="fit takes a recipe or the class of a task, got <.*pass its arguments"
    ):
        fit(module.Annealed())
    with pytest.raises(BadInput) as rejected:
        fit(module.Annealed, task={"width": "wide"})
    # no chained traceback
    assert rejected.value.__cause__ is None and rejected.value.__suppress_context__


def test_a_class_of_a_notebook_that_was_changed(tmp_path):
    run(_again_in_a_notebook, folder=tmp_path).ok()


@pytest.mark.slow
def test_a_script_without_a_guard_is_not_trained_by_evaluate(folder):
    """evaluate imports the class from the script, which would call fit again."""
    script = (
        TASK + "\n\nfrom oneloop import fit\n\nfit(Annealed, duration=3, track='none', run={'dir': "
        "'run'})\n"
    )
    (folder / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rejected = after(folder, "evaluate", "run")
    assert (
        rejected.codes == [2] and 'put the call under if __name__ == "__main__":' in rejected.output
    )
    repeat = (folder / "run" / "report.html").read_text()
    assert (
        "oneloop launch --config_file single" in repeat
        and "script.py:Annealed --duration 3" in repeat
    )


def test_a_changed_file_is_reported_when_its_run_has_ended(folder):
    words = ["mine.py:Annealed", *COMMON, "--run.dir", "run"]
    run(train, words, folder=folder).ok()
    (folder / "mine.py").write_text(TASK + "# more\n")
    again = run(train, words, folder=folder)
    again.ok()
    assert (
        "nothing to do; the source of its task" in again.output
        and "has changed since" in again.output
    )


def test_predictions_as_csv_keep_texts(folder):
    run(train, ["mine.py:Annealed", *COMMON, "--run.dir", "run"], folder=folder).ok()
    rejected = after(folder, "predict", "run", "--data", "any", "--to", "said.csv")
    assert rejected.codes == [2] and "said hold a list for each sample" in rejected.output
    (folder / "flat.py").write_text(
        "import mine\n\nclass Flat(mine.Annealed):\n    def predicted(self, batch, outputs):\n"
        "        return {'name': batch['name'], 'first': outputs['said'][:, 0]}\n"
    )
    after(
        folder, "predict", "run", "--data", "any", "--to", "said.csv", "--task", "flat.py:Flat"
    ).ok()
    rows = list(csv.DictReader((folder / "said.csv").open()))
    assert len(rows) == 64 and {row["name"] for row in rows} == {"16"}
