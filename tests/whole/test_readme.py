"""README, docs and CONTRIBUTING show what exists, and their programs run unchanged."""

from __future__ import annotations

import html
import json
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

import code_measures
from oneloop.launch.command import NODE_OPTIONS, launch_options, split
from pages import blocks, program
from slow_cases import with_slow
from worlds import ROOT, free_port, run, train

pytestmark = pytest.mark.covers(
    "oneloop.cli",
    "oneloop.launch.command",
    "oneloop.tools.nodes",
)

README = (ROOT / "README.md").read_text()
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
PAGES = {path: path.read_text() for path in FILES}


def programs(text: str) -> dict[str, str]:
    return dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.S))


def records(ending: str) -> list[str]:
    """Return the texts of the records of this kind, the newest last: a name begins with a date."""
    files = (ROOT / "benchmarks").glob(f"????-??-??-{ending}")
    return [file.read_text() for file in sorted(files)]


def on_a_gpu(name: str) -> dict[str, float]:
    """Return the numbers of the last line of part speed with this name that passed."""
    lines = [line for record in records("gpu.json") for line in json.loads(record)["lines"]]
    found = [line for line in lines if line["part"] == "speed" and line["name"] == name]
    if name == "checkpoint_stall":  # the line has failed if it timed the small save only
        found = [line for line in found if "small_stall_ms" in line.get("numbers", {})]
    else:
        found = [line for line in found if line["outcome"] == "pass"]
    return found[-1]["numbers"]


def lines_of_the_loop() -> str:
    source = (ROOT / "src/oneloop/train.py").read_text()
    docstrings = code_measures.docstring_lines(source)
    return f"{len(source.splitlines()) - len(docstrings)} lines without docstrings"


def tokens_per_second() -> str:
    gpt2, llama, lora = (
        f"{on_a_gpu(name)['tokens_per_second'] / 1e3:.0f},000"
        for name in ("gpt2", "llama-1b", "lora-8b")
    )
    return (
        f"GPT-2 (124 M) trains with {gpt2} tokens/s, a Llama of 1 B with {llama}, "
        f"and LoRA on 8 B with {lora}."
    )


def ratios() -> str:
    gpt2, llama = (on_a_gpu(name)["ratio_to_by_hand"] for name in ("gpt2", "llama-1b"))
    lora = on_a_gpu("lora-8b")
    low, high = lora["ratio_to_by_hand"], lora["ratio_max"]  # different rows: a range
    return f"This is {gpt2:.3f}, {llama:.3f}, and {low:.2f} to {high:.2f} times the rate of a plain"


def milliseconds_of_a_save() -> str:
    stall = on_a_gpu("checkpoint_stall")["small_stall_ms"]
    return f"A save of 1.5 GB stops training for {stall:.0f} ms."


def microseconds_of_a_step() -> str:
    row = r"^oneloop +median +([\d.]+) .* over accelerate by hand +\+([\d.]+)"
    first = re.search(row, records("step-cost.txt")[-1], re.M)  # that of the first command
    step, more = (round(float(number)) for number in first.groups())
    return f"takes {step} us, {more} us more than in a hand-written Accelerate loop."


@pytest.mark.parametrize(
    "sentence",
    [
        lines_of_the_loop,
        tokens_per_second,
        ratios,
        milliseconds_of_a_save,
        microseconds_of_a_step,
    ],
)
def test_the_numbers_of_the_readme_are_those_of_the_source_and_the_newest_records(sentence):
    assert sentence() in " ".join(README.split())


TYPED = [
    line.partition("   #")[0].strip()
    for line in README.splitlines()
    if "sines.py:Sines --duration" in line
]


@pytest.mark.parametrize("typed", with_slow(TYPED, TYPED[1:]))
def test_the_task_of_the_readme_trains(tmp_path, typed):
    (tmp_path / "sines.py").write_text(programs(README)["sines.py"])
    options, words, _ = launch_options(shlex.split(typed)[2:])
    config = options[1].rpartition("/")[2].removesuffix(".yaml")
    run(train, words, ranks=2 if config == "ddp" else 1, config=config, folder=tmp_path).ok()
    ended = json.loads(
        (
            tmp_path / "runs" / ("sines-on-two" if config == "ddp" else "sines") / "summary.json"
        ).read_text()
    )
    assert ended["step"] == 313 and ended["eval/loss"] < 0.01


def test_the_call_of_the_readme(tmp_path):
    (tmp_path / "call.py").write_text(programs(README)["call.py"])
    ((summary,),) = run(program, "call.py", "summary", folder=tmp_path).ok()
    assert summary["exit_code"] == 0 and (tmp_path / "runs" / "called" / "report.html").exists()


CALLS = blocks("how-to/from-python.md", "python")


def test_the_programs_about_python(tmp_path):
    assert CALLS.keys() == {"calls.py", "classes.py", "two_processes.py"}
    calls = {
        # a small model is enough
        name: text.replace('fit("digits", ', 'fit("digits", task={"width": 8}, ')
        for name, text in CALLS.items()
    }
    assert sum(calls[name] != CALLS[name] for name in calls) == 2
    for name, text in calls.items():
        (tmp_path / name).write_text(text)
    ((summary,),) = run(program, "calls.py", "summary", folder=tmp_path).ok()
    assert summary["exit_reason"] == "done"
    port = str(free_port())  # two tests may run at a time
    text = calls["two_processes.py"].replace(
        "num_processes=2", f"num_processes=2, use_port={port!r}"
    )
    (tmp_path / "two_processes.py").write_text(text)
    for name, run_folder in (("classes.py", "runs/line"), ("two_processes.py", "runs/on-two")):
        run(program, name, folder=tmp_path).ok()
        assert json.loads((tmp_path / run_folder / "summary.json").read_text())["exit_code"] == 0
    assert json.loads((tmp_path / "runs/on-two/environment.json").read_text())["processes"] == 2
    assert "classes.py:Line" in (tmp_path / "runs" / "line" / "recipe.yaml").read_text()


def test_every_command_that_is_typed_somewhere_is_known():
    """Check `oneloop …` lines of all pages: the command, and for a launch its options and recipe
    keys."""
    from oneloop.cli import COMMANDS

    for page, text in PAGES.items():
        inside = "\n".join(
            re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
            + re.findall(r"^    (.*)$", text, re.M)
        )
        for line in re.findall(r"^oneloop (.*)$", inside, re.M):
            command, *words = shlex.split(line.partition("   #")[0])
            assert command in COMMANDS, f"{page.name}: oneloop {line}"
            if command == "launch" and not any(word in line for word in ("mine.yaml", "…")):
                options, rest, _ = launch_options(split(words, NODE_OPTIONS)[1])
                assert options[0] == "--config_file" and rest, f"{page.name}: oneloop {line}"


def test_every_link_leads_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_file_named_in_the_tree_exists():
    tree = re.search(r"## The files\n\n```\n(.*?)```", PAGES[ROOT / "CONTRIBUTING.md"], re.S)[1]
    here = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith("   "):
            continue  # continues the line above
        if not line.startswith(" "):
            here = name
        path = ROOT / here / name if line.startswith(" ") else ROOT / name
        assert path.exists(), path


def test_the_site_builds_strictly_and_has_every_page(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--quiet",
            "--strict",
            "--site-dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        place = tmp_path / (name.parent if name.name == "index" else name) / "index.html"
        assert place.exists(), page
    loop = html.unescape(
        re.sub("<[^>]+>", "", (tmp_path / "explanation" / "loop" / "index.html").read_text())
    )
    source = (ROOT / "src/oneloop/train.py").read_text().split("# --8<-- [")
    assert source[1].startswith("start:loop]") and source[2].startswith("end:loop]")
    included = textwrap.dedent(source[1].partition("\n")[2].rpartition("\n")[0])
    assert all(line in loop for line in included.splitlines())
    reference = (tmp_path / "reference" / "ema" / "index.html").read_text()
    assert (
        "half_life" in reference and "Give exactly one of half_life, decay and power" in reference
    )
    linked = {
        (page.parent / target).resolve()
        for page, text in PAGES.items()
        for target in re.findall(r"\]\(([^)#\s]+\.md)", text)
    }
    for page in (ROOT / "docs").rglob("*.md"):
        assert page in linked or page == ROOT / "docs" / "index.md", f"no page links to {page.name}"
