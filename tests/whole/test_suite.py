"""The suite itself: which tests a change selects, its ceilings, and the table of claims."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest

import suite_costs
from changed_files import ROOT, covered, selected
from suite_costs import Costs
from worlds import free_port

pytestmark = pytest.mark.covers()  # no module, but what runs the tests

ALL = {str(file.relative_to(ROOT)) for file in ROOT.glob("tests/*/test_*.py")}


def test_a_change_selects_the_tests_of_the_module_and_of_what_imports_it():
    found = selected(["src/oneloop/optim/clip.py"])
    assert "tests/optim/test_clip.py" in found
    assert "oneloop.optim.bad_step_guard" in covered(ROOT / "tests/optim/test_bad_step_guard.py")
    assert "tests/optim/test_bad_step_guard.py" in found  # its module imports clip.py
    assert "tests/data/test_order.py" not in found
    assert len(found) < len(ALL) / 5


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("tests/tools/test_plan.py", "tests/tools/test_plan.py"),
        ("tests/helpers/splits.py", "tests/loop/test_same_weights.py"),
        ("src/oneloop/tasks/recipes/digits.yaml", "tests/tasks/test_recipes.py"),
        ("docs/how-to/your-loop.md", "tests/whole/test_your_loop.py"),
        ("launch/kubernetes.yaml", "tests/launch/test_manifests.py"),
    ],
)
def test_a_changed_file_of_another_kind_selects_the_tests_that_name_it(changed, test):
    found = selected([changed])
    assert test in found
    assert found < ALL


@pytest.mark.parametrize("changed", ["src/oneloop/basics/files.py", "tests/conftest.py"])
def test_what_all_tests_use_selects_all(changed):
    assert selected([changed]) == ALL


def test_each_file_has_a_ceiling_and_none_starts_more(monkeypatch):
    ceilings = {"tests/a/test_a.py": {"seconds": 1, "worlds": 2, "ranks": 3}}
    monkeypatch.setattr(suite_costs, "read_costs", lambda: ceilings)
    config = SimpleNamespace(
        getoption=lambda name: False, option=SimpleNamespace(markexpr="not slow")
    )
    costs = Costs(config)
    for worlds in (1, 1):
        spent = Counter(worlds=worlds, ranks=worlds, seconds=1, cpu=1)
        costs.pytest_runtest_logreport(
            SimpleNamespace(nodeid="tests/a/test_a.py::test", user_properties=[("costs", spent)])
        )
    assert costs.above_ceilings() == []

    # One interpreter is one too many for this file, and one world for a new file.
    for file, kind in (("test_a.py", "interpreters"), ("test_b.py", "worlds")):
        report = SimpleNamespace(
            nodeid=f"tests/a/{file}::test", user_properties=[("costs", Counter({kind: 1}))]
        )
        costs.pytest_runtest_logreport(report)
    above = costs.above_ceilings()
    assert len(above) == 2
    assert above[0].startswith("tests/a/test_a.py starts 1 interpreters")
    assert above[1].startswith("tests/a/test_b.py starts 1 worlds")


def test_each_worker_has_its_own_ports(monkeypatch):
    ports = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        ports.append({free_port() for _ in range(20)})
    assert len(ports[0]) == len(ports[1]) == 20
    assert max(ports[0]) < min(ports[1])


def test_the_table_of_claims_names_tests_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| Claim |")[2].partition("\n\n")[0]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", table)
    assert len(named) > 50
    for file, test in named:
        (path,) = ROOT.glob(f"tests/*/{file}")
        assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file} has no {test}"
