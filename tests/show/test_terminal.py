"""Terminal output: plain lines off a terminal, bars on a terminal, nothing on other ranks; charts
in the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from oneloop.basics.progress import tracked
from oneloop.cli import main
from oneloop.show.terminal import Display
from oneloop.tools.compare.compare_runs import view
from oneloop.tools.compare.watch import watch
from oneloop.tools.report.advice import results
from oneloop.tools.run_reader import distinct, read_record
from oneloop.tools.terminal_charts import plotted
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.progress",
    "oneloop.tools.report.advice",
    "oneloop.show.terminal",
    "oneloop.tools.run_reader",
    "oneloop.tools.terminal_charts",
    "oneloop.tools.compare.command",
    "oneloop.tools.compare.watch",
)

FIGURES = {"train/loss": 1.5, "train/samples_per_second": 1234.0}
SUMMARY = {
    "samples": 6400,
    "seconds": 10.0,
    "best": {"metric": "eval/loss", "value": 0.24, "step": 90},
    "final": {"weights": "last", "step": 100},
}


def shown(*, terminal: bool, on: bool = True, **how: str) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, quiet=not on)
    with Display(shown=on, console=console, **how) as display:
        step = 40
        display.begin(lambda: step, total=100)
        display.metrics(50, FIGURES)
        assert list(tracked(range(3), "evaluating", total=3)) == [0, 1, 2]
        display.results(50, {"eval/loss": 0.25})
        display.lines(["a line that quiet leaves out"])
        display.say("a line that stays [not markup]")
        step = 100  # the bar reads it when it is drawn for the last time
        display.metrics(100, FIGURES)
    return text.getvalue()


def test_metrics_that_a_task_names_are_shown_as_far_as_they_fit():
    figures = FIGURES | {"train/reconstruction": 0.25, "train/beta": 0.5}
    named = ("train/reconstruction", "train/beta")
    text = io.StringIO()
    with Display(console=Console(file=text, force_terminal=False, width=40)) as display:
        display.begin(lambda: 1, total=9)
        display.metrics(1, figures, named=named)
        display.results(7, {f"eval/metric_{n}": 0.5 for n in range(6)}, "ema")
    # one line each in a file
    lines = text.getvalue().splitlines()
    assert "loss 1.5000  1,234 samples/s  reconstruction 0.2500  beta 0.5000  " in lines[0]
    assert lines[1].startswith("step 7  eval/metric_0 0.5000  ") and lines[1].endswith("  (ema)")
    for width, shown_names in (
        (80, ["loss"]),
        (100, ["loss", "reconstruction"]),
        (130, ["loss", "reconstruction", "beta"]),
    ):
        text = io.StringIO()
        with Display(console=Console(file=text, force_terminal=True, width=width)) as display:
            display.begin(lambda: 3, total=9)
            display.metrics(3, figures, named=named)
        (last, *_) = re.findall(
            r"[^\r\n\x1b]*samples/s[^\r\n\x1b]*",
            re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()),
        )
        names = ("loss", "reconstruction", "beta")
        assert [name for name in names if f"{name} 0." in last or f"{name} 1." in last] == (
            shown_names
        ), last
        assert "1,234 samples/s" in last


@pytest.mark.parametrize(
    ("low", "high", "last"),
    [(0.01, 0.0123, 800), (-3.0, 700.0, 20_000), (2.0, 2.0, 1), (1e-9, 3e-9, 7)],
)
def test_labels_of_a_chart_are_round_and_the_curve_is_inside(low, high, last):
    lines = plotted([((0, last), (low, high), None)], width=60, height=8)
    labels = [float(line.partition("|")[0].replace(",", "")) for line in lines[:-2]]
    steps = [int(label.replace(",", "")) for label in lines[-1].partition("|")[2].split()]
    assert min(labels) <= low and max(labels) >= high and max(steps) >= last - 1
    for one, other in (labels[-2:], steps[1::-1]):
        mantissa = float(f"{abs(one - other):.2e}".partition("e")[0])
        assert mantissa in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


def test_plain_lines_off_a_terminal():
    lines = shown(terminal=False).splitlines()
    assert lines[0].startswith("step 50/100  loss 1.5000  1,234 samples/s") and lines[0].endswith(
        "s left"
    )
    assert lines[1:4] == [
        "step 50  eval/loss 0.2500",
        "a line that quiet leaves out",
        "a line that stays [not markup]",
    ]
    assert lines[4].startswith("step 100/100")


def test_the_lines_at_the_end():
    lines = list(results(SUMMARY))
    assert lines == [
        "6,400 samples in 10.0 s, 640 samples/s on average",
        "best eval/loss: 0.2400 at step 90",
        "final/ holds the last weights, of step 100",
    ]
    early = SUMMARY | {"best": {"metric": "eval/loss", "value": 0.24, "step": 80}}
    assert list(results(early))[-1] == (
        "final/ holds the last weights, of step 100; --save.final best keeps those of the best "
        "evaluation"
    )


def test_bars_on_a_terminal():
    text = shown(terminal=True)
    assert "100/100" in text and "━" in text and "eval/loss 0.2500" in text
    assert "evaluating" in text and "0/3" in text


def test_nothing_on_other_ranks():
    assert shown(terminal=True, on=False) == ""


def test_quiet_leaves_what_must_be_printed():
    assert [
        line
        for line in shown(terminal=True, output="quiet").splitlines()
        if "eval/loss" not in line
    ] == ["a line that stays [not markup]"]


def test_json_lines():
    lines = [json.loads(line) for line in shown(terminal=True, output="json").splitlines()]
    assert lines[0] == {"step": 50, **FIGURES} and lines[1] == {
        "step": 50,
        "eval/loss": 0.25,
        "weights": "raw",
    }
    assert {"message": "a line that stays [not markup]"} in lines


def test_json_is_json_whatever_the_metrics_are():
    text = io.StringIO()
    display = Display(output="json", console=Console(file=text))
    display.say("a :x: b")
    display.results(1, {"eval/loss": float("nan")})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.getvalue().splitlines()]
    assert lines == [{"message": "a :x: b"}, {"step": 1, "eval/loss": "nan", "weights": "raw"}]


def on_a_terminal(words: list[str]) -> str:
    """Return the output of ``python -m oneloop.train`` to a terminal."""
    master, slave = os.openpty()
    os.dup2(slave, 1)
    os.environ["TERM"] = "xterm-256color"
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                written.append(os.read(master, 65536))
            except OSError:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with pytest.raises(SystemExit):
        train(words)
    sys.stdout.flush()
    kept = os.open(os.devnull, os.O_WRONLY)
    os.dup2(kept, 1)
    os.close(slave)  # closes the write end, so that the reader ends
    reader.join(10)
    return b"".join(written).decode(errors="replace")


@pytest.mark.slow
def test_a_run_on_a_terminal_shows_all_that_takes_time(tmp_path):
    words = [
        "gpt",
        "--task.data",
        str(ROOT / "src/oneloop"),
        "--task.tokenizer",
        "bpe",
        "--task.vocab",
        "300",
        "--task.layers",
        "1",
        "--task.width",
        "16",
        "--task.heads",
        "2",
        "--task.block",
        "32",
        "--duration",
        "6",
        "--batch.size",
        "8",
        "--batch.micro",
        "auto",
        "--log.every",
        "2",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    found = run(
        on_a_terminal, words, folder=tmp_path, variables={"XDG_CACHE_HOME": str(tmp_path / "cache")}
    ).ok()[0]
    for what in (
        "training the tokenizer",
        "tokenizing train",
        "trying micro-batch 8",
        "step",
        "evaluating",
        "saving step 6",
    ):
        assert what in found, what
    assert "6/6" in found and "best eval/loss" in found and "done; results in run" in found
    assert found.rindex("\x1b[?25h") > found.rindex("\x1b[?25l"), (
        "the cursor is hidden and not shown again"
    )


# --- oneloop watch
# --------------------------------------------------------------------------------------------------


def written(folder: Path, steps: range, loss: float = 4.0) -> Path:
    """Write metrics of a run whose loss falls with the steps."""
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "train/loss": loss / step,
                        "share/data": 0.25,
                        "share/compute": 0.75,
                    }
                )
                + "\n"
            )
            if step % 5 == 0:
                file.write(
                    json.dumps(
                        {
                            "step": step,
                            "eval/loss": 1.0,
                            "eval/accuracy": step / 100,
                            "weights": "raw",
                        }
                    )
                    + "\n"
                )
    return folder


def drawn(*folders: Path, width: int = 120, metrics: tuple[str, ...] = ()) -> str:
    text = io.StringIO()
    watch(folders, metrics=metrics, console=Console(file=text, width=width))
    return text.getvalue()


def test_a_run_is_drawn_from_its_metrics_alone(tmp_path):
    text = drawn(written(tmp_path / "digits", range(1, 21)))
    assert (
        "train/loss" in text
        and "eval/accuracy" in text
        and "0.2000" not in text.split("eval/accuracy")[0]
    )
    assert "75 % compute, 25 % data" in text and any("⠀" < letter <= "⣿" for letter in text)
    assert "no metrics" in drawn(tmp_path / "digits", metrics=("nothing/here",))


def test_odd_names_and_narrow_terminals(tmp_path):
    folder = written(tmp_path / "lr[bold]x", range(1, 9))
    for width in (12, 20, 40, 300):
        assert "lr[bold]x" in drawn(folder, width=width) or width < 40
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "metrics.jsonl").write_text('{"step": 6, "event": "save"}\n')
    assert "no metrics yet" in drawn(begun)
    with (folder / "metrics.jsonl").open("a") as file:
        for number in range(9):
            file.write(json.dumps({"step": 9, "eval/loss": 1.0, "weights": f"ema-{number}"}) + "\n")
    assert all(f"ema-{number}" in drawn(folder, width=300) for number in range(9))


def test_several_runs_are_laid_over_one_another(tmp_path, monkeypatch):
    both = [written(tmp_path / "one", range(1, 9)), written(tmp_path / "two", range(1, 12), 40.0)]
    (tmp_path / "two" / "summary.json").write_text('{"exit_reason": "done"}')
    text = drawn(*both, width=130)
    assert text.count("train/loss") == 2  # the head of a row, and of one chart
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    assert ["train/loss", "0.5", "3.6364"] in rows
    assert any(row[0] == "state" and row[2] == "done" for row in rows)

    # One chart has both curves, in the colours of their names.
    colours = io.StringIO()
    console = Console(file=colours, width=130, force_terminal=True, color_system="standard")
    with monkeypatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")  # plotille asks whether stdout is a terminal
        watch(both, metrics=("train/loss",), once=True, console=console)
    for number, name in ((94, "one"), (93, "two")):
        assert f"\x1b[{number}m━ {name}" in colours.getvalue()
        assert colours.getvalue().count(f"\x1b[{number}m") > 5
    narrow = drawn(*both, width=70).splitlines()
    assert max(map(len, narrow)) <= 70 and any("0.5" in line for line in narrow)
    assert "eval/accuracy" in drawn(*both, metrics=("eval/accuracy",))


def test_several_runs_fit_into_a_terminal_of_24_lines(tmp_path):
    runs = [read_record(written(tmp_path / f"run-{n}", range(1, 9))) for n in range(5)]
    text = io.StringIO()
    Console(file=text, width=80).print(view(runs, (), width=80, height=24))
    lines = text.getvalue().splitlines()
    assert len(lines) <= 24 and "| 0" in lines[-1] and "run-4" in text.getvalue()


def test_runs_of_one_name_are_numbered(tmp_path):
    folders = []
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        folders.append(written(tmp_path / parent / "run", range(1, 9)))
    assert [run.name for run in distinct(list(map(read_record, folders)))] == ["run [1]", "run [2]"]
    text = drawn(*folders)
    assert "run [1]" in text and "run [2]" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_it_waits_for_a_run_that_has_not_begun(tmp_path, terminal):
    folder = tmp_path / "later"
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, height=40)

    def begin() -> None:
        written(folder, range(1, 6))
        (folder / "summary.json").write_text('{"exit_reason": "done", "exit_code": 0}')

    threading.Timer(0.5, begin).start()
    other = written(tmp_path / "other", range(1, 5))
    (other / "summary.json").write_text('{"exit_reason": "done", "exit_code": 0}')
    watch([folder, other], every=0.05, console=console)
    waited, _, rest = text.getvalue().partition(f"{folder} does not exist yet")
    assert rest and "waiting: " in waited and "0.8" not in waited  # its last loss
    last = rest.rpartition("does not exist yet")[2].splitlines()
    rows = [[cell.strip() for cell in line.split("│")] for line in last]
    assert ["state", "done", "done"] in rows and ["train/loss", "0.8", "1"] in rows


def test_a_run_that_is_cut_back_is_read_again(tmp_path):
    folder = written(tmp_path / "run", range(1, 11))
    written(tmp_path / "run", range(11, 13))
    assert read_record(folder).curve("train/loss")[0] == list(range(1, 13))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "train/lo')
    assert read_record(folder).last == 12  # half a line is left for the next read
    (folder / "metrics.jsonl").unlink()
    written(folder, range(1, 40), loss=8.0)
    steps, losses = read_record(folder).curve("train/loss")
    assert losses[0] == 8.0 and steps == list(range(1, 40))


def test_it_follows_a_run_until_its_end(tmp_path):
    folder = written(tmp_path / "run", range(1, 5))
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, height=40)

    def go_on() -> None:
        written(folder, range(5, 31))
        (folder / "summary.json").write_text(
            '{"exit_reason": "stopped by SIGINT", "exit_code": 75}'
        )
        time.sleep(0.5)
        (folder / "summary.json").unlink()  # the same command again
        written(folder, range(31, 41))
        time.sleep(0.5)
        (folder / "summary.json").write_text('{"exit_reason": "done", "exit_code": 0}')

    later = threading.Timer(0.5, go_on)
    later.start()
    watch([folder], every=0.1, console=console)
    assert "last line 0 s ago" in text.getvalue()
    steps = {}
    for screen in text.getvalue().split("state ")[1:]:
        state, step = (line.partition("│")[2].strip() for line in screen.splitlines()[:2])
        steps[state] = step
    assert steps["stopped by SIGINT"] == "30" and steps["done"] == "40"


@pytest.mark.parametrize("metrics", [1, 12])
def test_it_fits_into_a_terminal_of_24_lines(tmp_path, metrics):
    folder = written(tmp_path / "run", range(1, 31))
    with (folder / "metrics.jsonl").open("a") as file:
        line = {"step": 30, "weights": "raw"} | {
            f"eval/metric_{number}": 0.5 for number in range(metrics)
        }
        file.write(json.dumps(line) + "\n")
    text = io.StringIO()
    Console(file=text, width=80).print(view([read_record(folder)], (), width=80, height=24))
    lines = text.getvalue().splitlines()
    assert len(lines) <= 24 and "| 0" in lines[-1], text.getvalue()
    assert any("━ train/loss" in line for line in lines)  # the legend


def test_what_cannot_be_watched_is_reported(tmp_path, capsys):
    (tmp_path / "file").touch()
    for words, expected_text in (
        ([str(tmp_path / "nix"), "--once"], "holds no run"),
        ([str(tmp_path / "file")], "is a file; give the folder of a run"),
        ([], "arguments are required: RUN"),
        ([str(tmp_path), "--every", "0"], "--every: must be a positive number, got 0"),
        ([str(tmp_path), "--onc"], "unrecognized arguments: --onc"),
    ):
        assert main(["watch", *words]) == 2
        assert expected_text in capsys.readouterr().err
    written(tmp_path / "run", range(1, 3))
    assert main(["watch", str(tmp_path / "run"), "--once", "--metrics", "train/loss"]) == 0
    assert "train/loss" in capsys.readouterr().out
