"""User mistakes are reported before anything is written: one message, exit code 2, and a way to
correct them."""

from __future__ import annotations

from pathlib import Path

import pytest

from silent_cases import ALL, Case, files, words
from slow_cases import with_slow
from worlds import here, run

pytestmark = pytest.mark.covers(
    "oneloop.job.adapt_model",
    "oneloop.job.build",
    "oneloop.job.check_evaluation",
    "oneloop.job.model",
    "oneloop.job.preflight",
    "oneloop.job.task",
    "oneloop.job.trial_samples",
    "oneloop.job.unfit_models",
    "oneloop.loop.start_lines",
    "oneloop.optim.optimizers",
    "oneloop.recipe.expected",
    "oneloop.run.compatibility",
    "oneloop.task_protocol.protocol_checks",
)


def laid(folder: Path, case: Case) -> set[Path]:
    for name, content in files(case).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return set(folder.rglob("*"))


@pytest.mark.parametrize("name", with_slow(ALL, ["what one rank alone finds, under FSDP2"]))
def test_it_is_reported_and_nothing_is_written(tmp_path, name):
    case = ALL[name]
    before = laid(tmp_path, case)
    world = run(here, words(case), ranks=case.ranks, config=case.config, folder=tmp_path)
    # the other rank waits until the launcher ends it
    alone = "FSDP2" in name and "one rank alone" in name
    assert set(world.codes) == {case.code} or (alone and world.codes[1] == case.code), world.output
    errors = [line for line in world.output.splitlines() if line.startswith("oneloop: ")]
    for part in case.expected_text:
        assert part in ("\n".join(errors) if case.code else world.output), world.output
    if case.code:
        assert len(errors) == 1 and ("Traceback" not in world.output or alone), world.output
        left = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
        assert left == before, f"left behind: {left - before}"
    else:
        assert (tmp_path / "run" / "final" / "model.safetensors").exists()
