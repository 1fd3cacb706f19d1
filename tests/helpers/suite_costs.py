"""What the suite costs: seconds of each test file, and the processes that its tests start.

``conftest.py`` loads this plugin. It compares the processes with the ceilings in ``costs.json``,
and fails a suite that starts more. The seconds there give the order of files: the longest begin
first. ``pytest --write-costs`` replaces the entries of the test files that ran.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
COSTS = TESTS / "costs.json"

# Kinds of processes that tests start, each with a ceiling per file.
KINDS = {
    "worlds": "runs whose processes are forked from the warm server",
    "ranks": "processes of these runs",
    "interpreters": "programs that begin as a new Python interpreter",
}
STARTED: Counter[str] = Counter()
"""processes that this process has started, by kind"""
SPENT = {"worlds": 0.0}
"""CPU seconds of the worlds that this process has started"""

SLOWEST = 10  # files that the summary lists


def _count_interpreters(event: str, arguments: tuple[Any, ...]) -> None:
    """Count a program if it is Python, or a script of this environment."""
    if event != "subprocess.Popen":
        return
    program = str(arguments[0])
    if "world_server.py" in str(arguments[1]):  # it is not one of the test's
        return
    if Path(program).name.startswith("python") or program.startswith(sys.prefix + os.sep):
        STARTED["interpreters"] += 1


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its children that have ended, and of worlds."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total + SPENT["worlds"]


class Recorder:
    """Records the costs of each test, in the process that runs it, in the report of its end."""

    def __init__(self) -> None:
        sys.addaudithook(_count_interpreters)
        self._before = self._now()

    def _now(self) -> Counter[str]:
        spent = Counter(STARTED)
        spent["seconds"] = time.monotonic()  # type: ignore[assignment]
        spent["cpu"] = cpu_seconds()  # type: ignore[assignment]
        return spent

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            now = self._now()
            spent = {name: now[name] - self._before[name] for name in now}
            self._before = now
            report.user_properties.append(("costs", spent))
        return report


class Costs:
    """Adds up the costs of all tests by file, and compares them with the ceilings.

    Args:
        config: pytest's.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._write = config.getoption("--write-costs")
        self._default = config.option.markexpr == "not slow"
        self._by_file: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, spent in report.user_properties:
            if name == "costs":
                file = report.nodeid.partition("::")[0]
                self._by_file.setdefault(file, Counter()).update(spent)

    def above_ceilings(self) -> list[str]:
        """Return a sentence for each file that starts more processes than its ceiling."""
        known = read_costs()
        above = []
        for file, spent in self._by_file.items():
            for kind, meaning in KINDS.items():
                ceiling = known.get(file, {}).get(kind, 0)
                if spent[kind] > ceiling:
                    above.append(
                        f"{file} starts {spent[kind]} {kind} ({meaning}); its ceiling is {ceiling}"
                    )
        return above

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._write:
            known = read_costs()
            for file, spent in self._by_file.items():
                entry = {"seconds": round(spent["seconds"])}
                known[file] = entry | {kind: spent[kind] for kind in KINDS if spent[kind]}
            lines = [f"{json.dumps(file)}: {json.dumps(known[file])}" for file in sorted(known)]
            COSTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        elif self._default and self.above_ceilings() and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total: Counter[str] = Counter()
        for spent in self._by_file.values():
            total.update(spent)
        started = ", ".join(f"{total[kind]} {kind}" for kind in KINDS)
        terminalreporter.write_line(f"costs: {total['cpu']:.0f} CPU seconds; {started}")
        by_cpu = sorted(self._by_file.items(), key=lambda item: -item[1]["cpu"])
        for file, spent in by_cpu[:SLOWEST]:
            line = f"{spent['cpu']:7.1f} CPU seconds, {spent['seconds']:6.1f} s: {file}"
            terminalreporter.write_line(line)
        if self._default and not self._write:
            for sentence in self.above_ceilings():
                terminalreporter.write_line(f"FAILED: {sentence}", red=True)


def read_costs() -> dict[str, dict[str, int]]:
    """Return the committed costs of each file."""
    costs: dict[str, dict[str, int]] = json.loads(COSTS.read_text(encoding="utf-8"))
    return costs


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by file: the longest files first, so that none of them ends the suite alone."""
    known = read_costs()
    seconds = {file: entry["seconds"] for file, entry in known.items()}
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))
