"""The ledger of a run with a reference or a teacher: no byte of a second model."""

from __future__ import annotations

import pytest

import preference_rows
from planning import few_chats, one_step
from small_models import llama
from worlds import run

pytestmark = pytest.mark.covers("oneloop.tools.plan.ledger")

SHAPE = ["--task.length", "64", "--task.pack", "padded", "--batch.size", "2"]


@pytest.mark.parametrize(
    ("config", "ranks"), [("single", 1), pytest.param("fsdp2", 2, marks=pytest.mark.slow)]
)
def test_the_weights_in_memory_are_those_of_the_policy_or_the_student(tmp_path, config, ranks):
    llama(tmp_path / "model")
    words = ["sft", *SHAPE, "--task.model", str(tmp_path / "model")]
    chats = few_chats(tmp_path)
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:40]))
    pairs = preference_rows.write(tmp_path / "pairs.jsonl", preference_rows.rows(64))
    tasks = {
        "sft": chats,
        "distil": [*chats, "--task", "distil", "--task.teacher", str(tmp_path / "model")],
        "preference": ["--task", "preference", "--task.overlong", "drop", "--task.data", pairs],
    }
    held = {}
    for name, more in tasks.items():
        (found,) = run(one_step, [*words, *more], ranks, config=config).ok()
        held[name] = found["kept"]
    assert held["sft"]["parameters"] > 0
    for name in ("distil", "preference"):
        for kind in ("parameters", "optimizer", "buffers"):
            assert held[name].get(kind) == held["sft"].get(kind), (name, kind)
