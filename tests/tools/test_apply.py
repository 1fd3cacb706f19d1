"""``oneloop evaluate`` reproduces a run's metrics; ``oneloop predict`` writes one row per sample,
in order."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from pyarrow import parquet

from oneloop.checkpoint.store import vouch
from oneloop.cli import main
from oneloop.tools.after_training import evaluate_and_predict as prediction
from own_files import images, rows, write
from silent_cases import unfinished
from slow_cases import with_slow
from worlds import CONFIGS, Ended, after, each_forked, run, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.store",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.images",
    "oneloop.tools.after_training.command",
    "oneloop.tools.after_training.evaluate_and_predict",
    "oneloop.tools.after_training.trained_model",
)

SMALL = ["--task.layers", "1", "--task.heads", "2", "--task.width", "16"]
COMMON = [
    "--duration",
    "6",
    "--batch.size",
    "8",
    "--eval.every",
    "0",
    "--track",
    "none",
    "--ema.half_life",
    "16",
]
LAYOUTS = [("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp2", 2)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Train a BatchNorm model on a folder of images."""
    where = tmp_path_factory.mktemp("pictures")
    images(where / "data", "folders", each=20)
    words = [
        "digits",
        "--task.data",
        "data",
        "--task.model",
        "timm:test_resnet",
        "--task.image_size",
        "32",
        *COMMON,
    ]
    run(train, [*words, "--run.dir", "run"], folder=where).ok()
    return where


@pytest.mark.parametrize(("config", "ranks"), with_slow(LAYOUTS, [("ddp", 2), ("ddp", 3)]))
def test_the_metrics_are_those_of_the_run(pictures, config, ranks):
    printed = json.loads((pictures / "run" / "summary.json").read_text())
    for weights, names in (("raw", ""), ("ema", "ema/")):
        world = after(
            pictures, "evaluate", "run", "--weights", weights, "--json", config=config, ranks=ranks
        )
        world.ok()
        metrics = json.loads(
            next(line for line in world.output.splitlines() if line.startswith("{"))
        )
        assert metrics.pop("weights").startswith("final of run")
        assert set(metrics) >= {"eval/loss", "eval/accuracy", "test/loss"}
        for name, value in metrics.items():
            assert value == pytest.approx(printed[f"{names}{name}"], abs=1e-5), name


def test_other_data_and_other_weights(pictures):
    world = after(pictures, "evaluate", "run", "--data", "data", "--checkpoint", "newest", "--json")
    world.ok()
    metrics = json.loads(next(line for line in world.output.splitlines() if line.startswith("{")))
    assert metrics["weights"] == "step-00000006 of run" and set(metrics) >= {
        "data/loss",
        "data/accuracy",
    }
    assert "loss" in after(pictures, "evaluate", "run", "--checkpoint", "best").output


@pytest.mark.slow
def test_a_row_for_each_image_in_order_whatever_the_ranks(pictures, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted((pictures / "data").rglob("*.png"))[::3]):
        shutil.copy(file, flat / f"{number:03d}{file.suffix}")
    before = {file: file.read_bytes() for file in (pictures / "run").rglob("*") if file.is_file()}
    made = {}
    for config, ranks in LAYOUTS:
        for ending in ("parquet", "jsonl", "csv") if ranks != 2 else ("parquet",):
            to = tmp_path / f"{config}-{ranks}.{ending}"
            words = ["predict", "run", "--data", str(flat), "--to", str(to), "--micro", "4"]
            after(pictures, *words, config=config, ranks=ranks).ok()
            assert made.setdefault(ending, to.read_bytes()) == to.read_bytes()
    assert {
        file: file.read_bytes() for file in (pictures / "run").rglob("*") if file.is_file()
    } == before
    predictions = parquet.read_table(tmp_path / "single-1.parquet").to_pylist()
    files = sorted(flat.iterdir())
    assert [row["row"] for row in predictions] == list(range(len(files)))
    assert [row["file"] for row in predictions] == [str(file) for file in files]

    import timm

    model = timm.create_model(
        "test_resnet",
        num_classes=3,
        checkpoint_path=str(pictures / "run" / "final" / "model.safetensors"),
    )
    from oneloop.tasks.image_classification import ImageClassification

    task = ImageClassification(str(pictures / "data"), "timm:test_resnet", image_size=32)
    samples = task.samples_of(str(flat), labelled=False)
    with torch.no_grad():
        confidence, found = (
            model.eval()(torch.stack([samples[i][0] for i in range(len(samples))]))
            .softmax(-1)
            .max(-1)
        )
    assert [row["prediction"] for row in predictions] == [task.classes[number] for number in found]
    assert [row["confidence"] for row in predictions] == pytest.approx(
        confidence.tolist(), abs=1e-5
    )


TASKS = {
    "text_classification": (
        "csv",
        [],
        lambda row: row["prediction"] and 0 < row["confidence"] <= 1,
    ),
    "text_regression": (
        "jsonl",
        ["--task.label", "number"],
        lambda row: isinstance(row["prediction"], float),
    ),
    "token_classification": ("parquet", [], lambda row: isinstance(row["prediction"], list)),
    "causal_lm": (
        "text",
        ["--task.block", "8"],
        lambda row: row["loss"] > 0 and row["tokens"] >= 1,
    ),
    "masked_lm": (
        "jsonl",
        ["--task.block", "8", "--task.vocab", "270", "--task.pack", "padded"],
        lambda row: row["loss"] > 0 and row["tokens"] >= 1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_task_states_something_of_every_row(tmp_path, task):
    kind, more, right = TASKS[task]
    write(tmp_path / "data", kind, rows(60))
    words = [
        "digits",
        "--task",
        task,
        *SMALL,
        *more,
        "--task.data",
        "data",
        *COMMON,
        "--run.dir",
        "run",
    ]
    run(train, words, folder=tmp_path).ok()
    made = []
    for ranks in (1, 3):
        after(
            tmp_path, "predict", "run", "--data", "data", "--to", f"{ranks}.jsonl", ranks=ranks
        ).ok()
        made.append((tmp_path / f"{ranks}.jsonl").read_text())
    output = [json.loads(line) for line in made[0].splitlines()]
    assert (
        made[0] == made[1]
        and [row["row"] for row in output] == list(range(len(output)))
        and all(map(right, output))
    )
    assert len(output) == 60 or task == "causal_lm"
    after(tmp_path, "evaluate", "run", "--data", "data").ok()


def test_a_task_of_ones_own_states_its_outputs(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Normed\n")
    words = [
        "r.yaml",
        "--duration",
        "4",
        "--batch.size",
        "16",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    run(train, words, folder=tmp_path).ok()
    world = after(tmp_path, "predict", "run", "--to", "said.jsonl", ranks=2, config="ddp")
    world.ok()
    assert "task.name tiny.Normed of run/recipe.yaml is imported from" in world.output
    predictions = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [row["row"] for row in predictions] == list(range(len(predictions))) and set(
        predictions[0]
    ) > {"row"}


def test_an_error_of_samples_of_names_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tiny import Normed\n\n\nclass Mine(Normed):\n    def samples_of(self, data, *, "
        "labelled):\n"
        "        return [open(data).read().split(',')[9]]\n"
    )
    words = [
        "mine.py:Mine",
        "--duration",
        "4",
        "--batch.size",
        "16",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    run(train, words, folder=tmp_path).ok()
    (tmp_path / "new.csv").write_text("1,2")
    world = after(tmp_path, "evaluate", "run", "--data", "new.csv")
    assert world.codes == [2] and "Traceback" not in world.output
    assert (
        "--data new.csv: " in world.output
        and "IndexError" in world.output
        and "mine.py:6" in world.output
    )


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_columns_without_a_value_in_some_rows_are_written(tmp_path, ending):
    """One is missing in the first micro-batch, one in the last; one that is empty is left out."""
    columns = [
        {"row": [0, 1], "target": [None, None], "first": [1, 2]},
        {"row": [2], "target": [None], "late": ["x"]},
    ]
    file = tmp_path / f"made.{ending}"
    assert prediction.write(file, columns, accelerator=Accelerator(cpu=True)) == 3
    if ending == "parquet":
        made = parquet.read_table(file).to_pylist()
    elif ending == "jsonl":
        made = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        made = [*csv.DictReader(file.open())]
    nothing = "" if ending == "csv" else None
    assert all(row.keys() == {"row", "first", "late"} for row in made)
    assert [row["late"] for row in made] == [nothing, nothing, "x"]
    assert [str(row["first"]) for row in made] == ["1", "2", str(nothing)]


BAD = {
    "no run": (["evaluate", "nowhere"], "nowhere holds no run (no recipe.yaml)"),
    "no such weights": (["evaluate", "run", "--weights", "mean"], "has no EMA"),
    "no such checkpoint": (
        ["evaluate", "run", "--checkpoint", "4"],
        "--checkpoint 4 not found; available steps: ",
    ),
    "no such average": (
        ["evaluate", "run", "--checkpoint", "6", "--weights", "mean"],
        "has no EMA 'mean'",
    ),
    "no such data": (
        ["evaluate", "run", "--data", "nothing"],
        "--data nothing: 'nothing' is not a file or folder",
    ),
    "labels of others": (["evaluate", "run", "--data", "others"], "were never trained on"),
    "no file": (["predict", "run"], "needs a file to write to: --to"),
    "another ending": (
        ["predict", "run", "--to", "said.xlsx"],
        "must end with one of .parquet, .jsonl, .csv",
    ),
    "a file that is there": (
        ["predict", "run", "--to", "there.csv"],
        "exists; remove it, or name another file",
    ),
    "no folder": (["predict", "run", "--to", "no/said.csv"], "the folder no does not exist"),
    "lists in csv": (
        ["predict", "run", "--to", "said.csv", "--raw"],
        "logits hold a list for each sample",
    ),
    "no number": (
        ["predict", "run", "--to", "said.csv", "--micro", "0"],
        "--micro: must be a positive integer, got 0",
    ),
    "neither a number nor all": (
        ["evaluate", "run", "--generate", "some"],
        "--generate: must be a positive integer, got some; or write all",
    ),
    "an unknown option": (["evaluate", "run", "--to", "x"], "unrecognized arguments: --to x"),
}


@pytest.fixture(scope="module")
def ended(pictures, tmp_path_factory) -> dict[str, Ended]:
    """Run all wrong commands, each in a folder and a process of its own."""
    commands = []
    for name, (words, _) in BAD.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        for place in ("run", "data"):
            (folder / place).symlink_to(pictures / place)
        (folder / "others" / "zebra").mkdir(parents=True)
        shutil.copy(next((pictures / "data").rglob("*.png")), folder / "others" / "zebra")
        (folder / "there.csv").touch()
        commands.append((folder, words))
    (found,) = run(each_forked, commands).ok()
    return dict(zip(BAD, found, strict=True))


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_reported(ended, name):
    _, expected_text = BAD[name]
    assert ended[name].code == 2, ended[name].output
    assert expected_text in ended[name].output, ended[name].output
    assert not ended[name].changed


def test_a_damaged_run_is_rejected(pictures, tmp_path):
    shutil.copytree(pictures / "run", tmp_path / "run")
    shutil.copytree(pictures / "data", tmp_path / "data")
    file = tmp_path / "run" / "final" / "model.safetensors"
    spoiled = bytearray(file.read_bytes())
    spoiled[-1] ^= 1
    file.write_bytes(spoiled)
    world = after(tmp_path, "evaluate", "run")
    assert world.codes == [2] and "final is damaged: model.safetensors" in world.output
    unfinished(tmp_path / "run", 6)
    assert "step-00000006 of run" in after(tmp_path, "evaluate", "run").output


@pytest.mark.slow
def test_through_the_launcher_as_typed(pictures, tmp_path, capfd):
    before = Path.cwd()
    os.chdir(pictures)
    try:
        config = str(CONFIGS / "ddp.yaml")
        words = [
            "launch",
            "--config_file",
            config,
            "--num_processes",
            "2",
            "predict",
            "run",
            "--to",
        ]
        assert main([*words, str(tmp_path / "said.csv")]) == 0
        assert "rows of final of run are in" in capfd.readouterr().out
    finally:
        os.chdir(before)


def odd(to: str) -> int:
    """Write columns whose types change between rows, an empty column, and paths."""
    from oneloop.launch.processes import start
    from oneloop.tools.after_training.evaluate_and_predict import write

    world = start()
    each = 9 // world.ranks
    own_rows = (
        {
            "row": [x],
            "maybe": [None if x < 4 else f"{x}"],
            "empty": [None],
            "file": [Path("images", f"{x}.png")],
            "many": [[0.5] * (x % 3)],
        }
        for x in range(world.rank * each, (world.rank + 1) * each)
    )
    return write(Path(to), own_rows, accelerator=world.accelerator)


@pytest.mark.parametrize("ranks", [1, 3])
def test_types_are_those_of_all_rows_and_empty_columns_are_left_out(tmp_path, ranks):
    run(odd, str(tmp_path / "said.parquet"), ranks=ranks).ok()
    rows = parquet.read_table(tmp_path / "said.parquet").to_pylist()
    assert all([*row] == ["row", "maybe", "file", "many"] for row in rows)
    assert [row["file"] for row in rows] == [f"images/{x}.png" for x in range(9)]
    assert [row["maybe"] for row in rows] == [None if x < 4 else str(x) for x in range(9)]
    assert [row["many"] for row in rows] == [[0.5] * (x % 3) for x in range(9)]


def test_an_image_that_cannot_be_read_ends_all_ranks_with_its_name(pictures, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted((pictures / "data").rglob("*.png"))[:8]):
        shutil.copy(file, flat / f"{number}.png")
    (flat / "7.png").write_bytes(b"no image")
    words = [
        "predict",
        "run",
        "--data",
        str(flat),
        "--to",
        str(tmp_path / "said.csv"),
        "--micro",
        "2",
    ]
    world = after(pictures, *words, ranks=2, config="ddp")
    assert world.codes == [2, 2] and "7.png cannot be read as an image" in world.output
    assert "Traceback" not in world.output and sorted(path.name for path in tmp_path.iterdir()) == [
        "flat"
    ]


def test_other_data_than_it_was_trained_with_is_rejected(pictures, tmp_path):
    for place in ("run", "data"):
        shutil.copytree(pictures / place, tmp_path / place)
    (tmp_path / "data" / "alpha").rename(tmp_path / "data" / "zeta")
    words = ["predict", "run", "--to", "said.csv"]
    world = after(tmp_path, *words)
    assert world.codes == [2] and "run was trained with other data" in world.output, world.output
    assert not (tmp_path / "said.csv").exists()
    after(tmp_path, *words, "--accept_changes").ok()
    (tmp_path / "said.csv").unlink()
    (tmp_path / "run" / "environment.json").unlink()
    world = after(tmp_path, *words, ranks=2, config="ddp")
    world.ok()
    assert world.output.count("does not name its data, which is not compared") == 1


def test_a_run_that_went_on_is_not_taken_for_its_older_end(pictures, tmp_path):
    for place in ("run", "data"):
        shutil.copytree(pictures / place, tmp_path / place)
    manifest = json.loads((tmp_path / "run" / "final" / "MANIFEST.json").read_text())
    assert manifest["about"]["end"] == 6
    assert "final of run" in after(tmp_path, "evaluate", "run").output
    vouch(tmp_path / "run" / "final", {"weights": "last", "step": 3, "end": 3}, manifest["files"])
    assert "step-00000006 of run" in after(tmp_path, "evaluate", "run").output


def test_the_rank_correlation_is_that_of_the_run(tmp_path):
    """The answers of an untrained model hardly vary: a different micro-batch size would change
    their order."""
    write(tmp_path / "data", "jsonl", rows(120))
    words = [
        "digits",
        "--task",
        "text_regression",
        *SMALL,
        "--task.label",
        "number",
        "--task.data",
        "data",
        *COMMON,
    ]
    run(
        train,
        [*words, "--optimizer.lr", "1e-6", "--task.held_out", "0.3", "--run.dir", "run"],
        folder=tmp_path,
    ).ok()
    printed = json.loads((tmp_path / "run" / "summary.json").read_text())
    world = after(tmp_path, "evaluate", "run", "--json")
    world.ok()
    metrics = json.loads(next(line for line in world.output.splitlines() if line.startswith("{")))
    for name in ("eval/spearman", "eval/pearson"):
        assert metrics[name] == printed[name], name


@pytest.mark.parametrize(
    "name",
    [
        "images",
        "text_classification",
        pytest.param("text_regression", marks=pytest.mark.slow),
        pytest.param("token_classification", marks=pytest.mark.slow),
    ],
)
def test_predictions_do_not_need_the_training_data(pictures, tmp_path, name):
    """Only the recorded classes: the file is the same as with the training data."""
    if name == "images":
        folder, new = pictures, "flat"
        shutil.copytree(pictures / "data", folder / "flat", dirs_exist_ok=True)
    else:
        folder, new = tmp_path, "new"
        write(tmp_path / "data", "jsonl", rows(48))
        write(tmp_path / "new", "jsonl", rows(9, first=48))
        columns = {"text_regression": ["--task.label", "number"]}.get(name, [])
        words = [
            "snippets",
            "--task",
            name,
            "--task.data",
            "data",
            *columns,
            *SMALL,
            *COMMON,
            "--run.dir",
            "run",
        ]
        run(train, words, folder=tmp_path).ok()
    made = []
    for hidden in (False, True):
        if hidden:
            (folder / "data").rename(folder / "elsewhere")
        to = tmp_path / f"{hidden}.jsonl"
        world = after(folder, "predict", "run", "--data", new, "--to", str(to), "--micro", "4")
        made.append(to.read_bytes() if not any(world.codes) else world.output)
        if hidden:
            other = "text_regression" if name != "text_regression" else "text_classification"
            world = after(
                folder,
                "predict",
                "run",
                "--data",
                new,
                "--to",
                str(tmp_path / "no.jsonl"),
                "--task",
                other,
            )
            # another task does not use the recorded classes
            assert world.codes == [2], world.output
            world = after(folder, "evaluate", "run", "--data", new)
            (folder / "elsewhere").rename(folder / "data")
            # class weights and the validation split need the data
            assert world.codes == [2], world.output
    assert made[0] == made[1] and b'"prediction"' in made[0]
