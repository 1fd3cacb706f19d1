"""User mistakes are reported before anything is written: one message, exit code 2, and a way to
correct them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from oneloop.basics.exit_codes import BadInput
from oneloop.task_protocol.user_code import theirs
from silent_cases import ALL, Case, files, words
from slow_cases import with_slow
from worlds import Ended, each_forked, here, run

pytestmark = pytest.mark.covers(
    "oneloop.task_protocol.contract",
    "oneloop.checks.questions",
    "oneloop.checks.metrics",
    "oneloop.checks.preflight",
    "oneloop.checks.samples",
    "oneloop.job.build",
    "oneloop.job.model",
    "oneloop.job.task",
    "oneloop.job.unfit_models",
    "oneloop.loop.start_lines",
    "oneloop.optim.optimizers",
    "oneloop.run.compatibility",
    "oneloop.task_protocol.user_code",
)


def laid(folder: Path, case: Case) -> set[Path]:
    for name, content in files(case).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return set(folder.rglob("*"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, tuple[Path, Ended]]:
    """Run each case of one process in a folder of its own, all of them in one world."""
    cases = {name: case for name, case in ALL.items() if case.ranks == 1}
    folders = [tmp_path_factory.mktemp("case") for _ in cases]
    for folder, case in zip(folders, cases.values(), strict=True):
        laid(folder, case)
    commands = [(folder, words(case)) for folder, case in zip(folders, cases.values(), strict=True)]
    (found,) = run(each_forked, commands, timeout=580).ok()
    pairs = zip(folders, found, strict=True)
    return dict(zip(cases, pairs, strict=True))


@pytest.mark.timeout(600)  # the first case of one process waits for all of them
@pytest.mark.parametrize("name", with_slow(ALL, ["what one rank alone finds, under FSDP2"]))
def test_it_is_reported_and_nothing_is_written(request, tmp_path, name):
    case = ALL[name]
    if case.ranks == 1:
        folder, own = request.getfixturevalue("ended")[name]
        codes, output, changed = [own.code], own.output, own.changed
    else:
        folder = tmp_path
        before = laid(folder, case)
        world = run(here, words(case), ranks=case.ranks, config=case.config, folder=folder)
        codes, output = world.codes, world.output
        changed = before ^ {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    # The other rank waits until the launcher ends it.
    alone = "FSDP2" in name and "one rank alone" in name
    assert set(codes) == {case.code} or (alone and codes[1] == case.code), output
    errors = [line for line in output.splitlines() if line.startswith("oneloop: ")]
    for part in case.expected_text:
        assert part in ("\n".join(errors) if case.code else output), output
    if case.code:
        assert len(errors) == 1 and ("Traceback" not in output or alone), output
        assert changed == set(), f"left behind or gone: {changed}"
    else:
        assert (folder / "run" / "final" / "model.safetensors").exists()


def test_an_error_names_the_innermost_line_of_the_users_code(tmp_path, monkeypatch):
    (tmp_path / "layers_of_mine.py").write_text("def widths():\n    raise KeyError('width')\n")
    (tmp_path / "task_of_mine.py").write_text(
        "import layers_of_mine\nclass Task:\n    def model(self):\n"
        "        return layers_of_mine.widths()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = import_module("task_of_mine").Task()
    with pytest.raises(BadInput, match=r"KeyError: 'width' \(.*layers_of_mine.py:2\)"):
        theirs(task, "model", task.model)
