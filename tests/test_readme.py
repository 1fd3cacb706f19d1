"""What the README shows is what is there."""

from __future__ import annotations

import json
import re
import shlex
import textwrap

from worlds import ROOT, run, train

README = (ROOT / "README.md").read_text()


def test_the_quoted_loop_is_the_loop():
    quoted = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "clock.over" in block)
    source = (ROOT / "src/oneloop/train.py").read_text()
    start, end = source.index("    def settle() ->"), source.index("    # The end. ")
    settle, loop = source[start : source.index("    if job.policy.rewinds")], source[:end]
    loop = loop[loop.rindex("        for group in clock.over") :]
    assert quoted.strip() == f"{textwrap.dedent(settle).strip()}\n\n\n{textwrap.dedent(loop).strip()}"


def test_the_task_of_ones_own_trains(tmp_path):
    code = next(block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "my_task.py" in block)
    (tmp_path / "my_task.py").write_text(code)
    typed = next(line for line in README.splitlines() if "my_task.Sines" in line)
    run(_here, shlex.split(typed)[3:], folder=tmp_path).ok()
    ended = json.loads((tmp_path / "runs" / "sines" / "summary.json").read_text())
    assert ended["step"] == 300 and ended["eval/loss"] < 0.1


def _here(words: list[str]) -> None:
    import sys

    sys.path.insert(0, "")
    train(words)


def test_every_file_named_in_the_tree_exists():
    tree = re.search(r"## The files\n\n```\n(.*?)```", README, re.S)[1]
    here = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith("   "):
            continue  # goes on from the line above
        if not line.startswith(" "):
            here = name
        path = ROOT / here / name if line.startswith(" ") else ROOT / name
        assert path.exists(), path
