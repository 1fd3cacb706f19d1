"""Promise 8: bad input gives exit code 2 and one message with the key and the fix; no files are
written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worlds import CONFIGS, ROOT, Ended, each_forked, run, train

pytestmark = pytest.mark.covers(
    "oneloop.__main__",
    "oneloop.launch.accelerate_launch",
    "oneloop.launch.processes",
    "oneloop.launch.command",
    "oneloop.launch.launched",
    "oneloop.recipe.parse",
    "oneloop.recipe.schema",
    "oneloop.train",
)

TEXT = str(ROOT / "docs" / "reference" / "data.md")

EMPTY = """
from oneloop.tasks.image_classification import ImageClassification
class Empty(ImageClassification):
    def eval_sets(self):
        return {"validation": []}
class NotATask:
    name = "nothing that a task needs"
"""

# kind: (command-line words, parts of the message)
COMPILED = ["--machine.compile", "regional", "--machine.compile_mode", "max-autotune"]
BAD = {
    "unknown key": (["digits", "--batch.siez", "3"], ["batch.siez", "did you mean 'batch.size'"]),
    "misspelt recipe": (["digit"], ["'digit'", "did you mean 'digits'"]),
    "wrong type": (["digits", "--batch.size", "many"], ["batch.size", "int", "many"]),
    "impossible split": (
        ["digits", "--batch.size", "100", "--batch.micro", "16"],
        ["batch.size 100", "micro 16", "nearest: 20"],
    ),
    "missing file": (["missing/recipe.yaml"], ["missing/recipe.yaml", "No such file"]),
    "missing weights": (
        ["digits", "--init.from", "nowhere"],
        ["init.from", "nowhere", "looked for"],
    ),
    "a key that is a number": (["number.yaml", "--optimizer", "sgd"], ["unknown key '1'"]),
    "an unknown group with nothing in it": (["empty.yaml"], ["unknown key 'foo'"]),
    "keys in what has none": (["nested.yaml"], ["seed"]),
    "broken YAML": (["broken.yaml"], ["broken.yaml", "not valid YAML", "line 2"]),
    "a class that does not exist": (
        ["digits", "--task", "mine.Missing"],
        ["mine.Missing", "has no 'Missing'"],
    ),
    "a module that does not exist": (
        ["digits", "--task", "nowhere.Task"],
        ["nowhere.Task", "not found"],
    ),
    "a class that is no task": (
        ["digits", "--task", "mine.NotATask"],
        ["NotATask", "lacks model, train_set"],
    ),
    "a negative duration": (["digits", "--duration", "-5"], ["duration", "-5", "never negative"]),
    "an eval set that is empty": (["digits", "--task", "mine.Empty"], ["validation set is empty"]),
    "an unwritable run folder": (
        ["digits", "--run.dir", "/proc/oneloop/run"],
        ["run.dir", "/proc/oneloop/run"],
    ),
    "a tracker that is not installed": (
        ["digits", "--track", "wandb"],
        ["track 'wandb'", "pip install wandb"],
    ),
    "a tracker that is none": (
        ["digits", "--track", "tensorbored"],
        ["tensorbored", "tensorboard"],
    ),
    "no recipe": ([], ["no recipe given", "digits"]),
    "two recipes": (["digits", "gpt"], ["two recipes"]),
    "a group as a key": (["digits", "--batch", "3"], ["batch is a group", "batch.size"]),
    "a key without a value": (["digits", "--batch.size"], ["batch.size needs a value"]),
    "an unknown metric": (["digits", "--eval.best", "eval/acc"], ["eval.best", "eval/accuracy"]),
    "a warm-up longer than the run": (
        ["digits", "--duration", "5", "--schedule.warmup", "6"],
        ["schedule.warmup"],
    ),
    "a duration of none": (["digits", "--duration", "0"], ["duration 0", "the minimum is 1"]),
    "tokens of images": (["digits", "--duration", "5M tokens"], ["duration", "tokens", "samples"]),
    "an unknown optimizer": (
        ["digits", "--optimizer.name", "adamv"],
        ["optimizer.name", "did you mean 'adamw'"],
    ),
    "an option of another optimizer": (
        ["digits", "--optimizer.momentum", "0.9"],
        ["optimizer.momentum"],
    ),
    "an unknown model": (["digits", "--task.model", "resnet19"], ["task.model", "resnet18"]),
    "an unknown data set": (["digits", "--task.data", "diggits"], ["task.data", "diggits"]),
    "a learning rate below zero": (
        ["digits", "--optimizer.lr", "-1"],
        ["optimizer.lr", "at least 0"],
    ),
    "a micro-batch thatis not a number": (
        ["digits", "--batch.micro", "most"],
        ["batch.micro", "most", "auto"],
    ),
    "two averages that exclude each other": (
        ["digits", "--ema.half_life", "2ep", "--ema.decay", "0.9"],
        ["ema.decay 0.9 cannot be combined with ema.half_life 2ep"],
    ),
    "an average wider than any": (
        ["digits", "--ema.power", "[0.4]"],
        ["ema.power 0.4", "below 0.289"],
    ),
    "the same average twice": (["digits", "--ema.half_life", "[2ep,2ep]"], ["duplicate EMAs in"]),
    "the metric of an average that is not kept": (
        ["digits", "--eval.best", "ema/eval/accuracy"],
        ["eval.best", "eval/accuracy"],
    ),
    "a way to recompute that is none": (
        ["digits", "--machine.recompute", "most"],
        ["recompute 'most'", "every:K"],
    ),
    "recompute without blocks": (
        ["digits", "--machine.recompute", "full"],
        ["CNN has no repeated blocks", "machine.blocks"],
    ),
    "a budget without a compiler": (
        ["gpt", "--task.data", TEXT, "--machine.recompute", "budget:0.5"],
        ["recompute budget", "machine.compile"],
    ),
    "compile without blocks": (
        ["digits", "--machine.compile", "regional"],
        ["CNN has no repeated blocks", "whole"],
    ),
    "a block that is none": (
        ["gpt", "--task.data", TEXT, "--machine.blocks", "[GPT3Block]"],
        ["not in", "GPT2Block"],
    ),
    "offload on a CPU": (
        ["gpt", "--task.data", TEXT, "--machine.recompute", "full", "--machine.offload"],
        ["machine.offload", "on cpu, activations are in host memory"],
    ),
    "channels last without a convolution": (
        ["gpt", "--task.data", TEXT, "--machine.channels_last", "true"],
        ["channels_last", "requires a 2-d convolution"],
    ),
    "a policy that is none": (
        ["digits", "--guard.nonfinite", "ignore"],
        ["guard.nonfinite", "ignore", "rewind"],
    ),
    "a K that is none": (
        ["gpt", "--task.data", TEXT, "--machine.recompute", "every:inf"],
        ["recompute 'every:inf'"],
    ),
    "what is wrong beside a search": (
        ["digits", "--batch.micro", "auto", "--eval.best", "eval/acc"],
        ["eval.best"],
    ),
    "a step left out with BatchNorm": (
        ["digits", "--task.model", "resnet18", "--guard.nonfinite", "skip"],
        ["BatchNorm", "rewind"],
    ),
    "CUDA graphs with accumulation": (
        [
            "gpt",
            "--task.data",
            TEXT,
            "--machine.compile",
            "whole",
            "--machine.compile_mode",
            "reduce-overhead",
            "--batch.micro",
            "4",
        ],
        ["8 micro-batches", "CUDA graphs"],
    ),
    "a decay of all": (["digits", "--ema.decay", "1"], ["ema.decay must be from 0 to 0.99"]),
    "a batch of none": (["digits", "--batch.size", "0"], ["batch.size", "at least 1"]),
}


def write_files(folder: Path) -> None:
    (folder / "mine.py").write_text(EMPTY)
    (folder / "broken.yaml").write_text("batch:\n  size: [3\n")
    (folder / "number.yaml").write_text("1: 2\n")
    (folder / "empty.yaml").write_text("foo: {}\n")
    (folder / "nested.yaml").write_text("seed: {a: 1}\n")


@pytest.fixture
def here(tmp_path) -> Path:
    write_files(tmp_path)
    return tmp_path


def check(
    codes: list[int | None], output: str, expected_text: list[str], here: Path, before: set[Path]
) -> None:
    check_message(codes, output, expected_text)
    left = {path for path in here.rglob("*") if "__pycache__" not in path.parts}
    assert left == before, f"left behind: {left - before}"


def check_message(codes: list[int | None], output: str, expected_text: list[str]) -> None:
    assert set(codes) == {2}, output
    messages = [line for line in output.splitlines() if line.startswith("oneloop: ")]
    assert len(messages) == 1, output
    for words in expected_text:
        assert words in messages[0], f"{words!r} not in {messages[0]!r}"
    assert "Traceback" not in output, output


def ended_in(folder: Path, kinds: list[str]) -> dict[str, Ended]:
    """Run the commands of these kinds of bad input, one after another, and return how they end."""
    write_files(folder)
    commands = [(folder, BAD[kind][0]) for kind in kinds]
    (found,) = run(each_forked, commands, timeout=280).ok()
    return dict(zip(kinds, found, strict=True))


def check_ended(ended: Ended, kind: str) -> None:
    check_message([ended.code], ended.output, BAD[kind][1])
    assert ended.changed == set()


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    return ended_in(tmp_path_factory.mktemp("bad"), list(BAD))


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_message_and_exit_code_2(ended, kind):
    check_ended(ended[kind], kind)


@pytest.mark.slow
def test_bad_input_does_not_depend_on_the_commands_before(tmp_path):
    backwards = ended_in(tmp_path, list(reversed(BAD)))
    for kind in BAD:
        check_ended(backwards[kind], kind)


@pytest.mark.parametrize(
    ("words", "expected_text", "config", "options"),
    [
        (
            ["digits", "--batch.size", "1"],
            ["batch.size 1", "2 ranks", "nearest size: 2"],
            "ddp",
            [],
        ),
        pytest.param(
            ["digits", "--run.dir", "/proc/oneloop/run"],
            ["run.dir"],
            "ddp",
            [],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["digits", "--optimizer.name", "torch.optim.Adafactor"],
            ["Adafactor", "under FSDP2 each rank sees its shard only"],
            "fsdp2",
            [],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["digits", "--machine.channels_last", "true"],
            ["channels_last", "FSDP2", "ddp.yaml"],
            "fsdp2",
            [],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["digits"],
            ["fp16", "CPU", "bf16"],
            "ddp",
            ["--mixed_precision", "fp16"],
            marks=pytest.mark.slow,
        ),
        (
            ["gpt", "--task.data", TEXT, *COMPILED],
            ["max-autotune does not work with FSDP2", "no-cudagraphs"],
            "fsdp2",
            [],
        ),
    ],
)
def test_all_ranks_end_together(here, words, expected_text, config, options):
    before = set(here.rglob("*"))
    world = run(train, words, ranks=2, config=config, options=options, folder=here)
    check(world.codes, world.output, expected_text, here, before)


def test_fp8_where_there_is_none(here):
    before = set(here.rglob("*"))
    world = run(train, ["digits"], variables={"ACCELERATE_MIXED_PRECISION": "fp8"}, folder=here)
    check(world.codes, world.output, ["fp8", "cpu", "bf16"], here, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words", "expected_text"),
    [
        ([sys.executable, "-m", "oneloop.train"], ["digits", "--batch.siez", "3"], ["batch.siez"]),
        (
            [
                sys.executable,
                "-m",
                "oneloop",
                "launch",
                "--config_file",
                str(CONFIGS / "single.yaml"),
                "--mixed_precision",
                "fp16",
            ],
            ["digits"],
            ["fp16", "CPU"],
        ),
        (
            [sys.executable, "-m", "oneloop", "launch", "--config_file", str(CONFIGS / "ddp.yaml")],
            ["digits", "--batch.size", "1"],
            ["2 ranks", "nearest size: 2"],
        ),
        (
            [sys.executable, "-m", "oneloop", "launch", "--mixed_precision", "fp8"],
            ["digits"],
            ["fp8", "bf16"],
        ),
        (
            [sys.executable, "-m", "oneloop", "launch", "--config_file", "nowhere.yaml"],
            ["digits"],
            ["nowhere.yaml"],
        ),
    ],
)
def test_the_commands_as_typed(here, command, words, expected_text):
    before = set(here.rglob("*"))
    ended = subprocess.run(
        [*command, *words], cwd=here, capture_output=True, text=True, timeout=120, check=False
    )
    check([ended.returncode], ended.stdout + ended.stderr, expected_text, here, before)
