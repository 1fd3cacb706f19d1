"""The workflow of the hosted tests is valid. The scripts that it runs work with the bash 3.2 and
the BSD tools of macOS."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from worlds import ROOT

pytestmark = pytest.mark.covers()

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
NOT_ON_MACOS = {  # of bash 4 and later, and of GNU tools
    "associative arrays": r"\b(declare|local|typeset)\s+-[A-Za-z]*[Ang]",
    "changes of case": r"\$\{\w+(\[[^\]]*\])?(,,?|\^\^?)",
    "reading into arrays": r"\b(mapfile|readarray)\b",
    "short redirections": r"&>>|\|&",
    "case fall-through": r";;?&",
    "negative indices": r"\$\{\w+\[-\d",
    "time formats of printf": r"printf .*%\(",
    "variables that may be set": r"\[\[? -v ",
    "an array that may be empty": r'\b(\w+)=\(\)[\s\S]*(?<!\+)"\$\{\1\[@\]\}"',
    "commands": r"(^|[\s(|;&])(nproc|timeout|sha\d+sum|md5sum|tac|shuf|setsid|numfmt|free)\s",
    "options of sed": r"\bsed\s+(-\w+\s+)*(-i|--|-\w*r)",
    "options of others": r"\b(readlink|stat)\s+-[fc]|\bdate\s+(-d|--)|\bgrep\s+-\w*P|\bcp\s+--"
    r"|\bxargs\s+(-r|-d)|\bhead\s+-n\s*-|\bmktemp\s+--|\bsort\s+-\w*V|\bfind\s+-|-printf\b",
}


def wrong(script: str) -> list[str]:
    """Return the kinds of constructs in a script that macOS lacks."""
    lines = [line.split("# ")[0] for line in script.splitlines() if not line.startswith("#")]
    text = "\n".join(lines)
    return [kind for kind, form in NOT_ON_MACOS.items() if re.search(form, text, re.M)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_use_what_macos_has(script: Path):
    assert wrong(script.read_text()) == []
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


@pytest.mark.parametrize(
    "line",
    [
        "declare -A seen",
        'name="${1,,}"',
        "mapfile -t lines < file",
        "make &>> log",
        'own=()\npython train.py "${own[@]}"',
        "jobs=$(nproc )",
        "timeout 5 make",
        "sed -i s/a/b/ file",
        'cd "$(readlink -f "$0")"',
        "date -d yesterday",
        "grep -oP 'a+' file",
    ],
)
def test_what_macos_lacks_is_found(line):
    assert len(wrong(f"set -e\n{line}\n")) == 1


def test_the_workflow_tests_each_system_with_the_oldest_and_the_newest_python():
    (job,) = WORKFLOW["jobs"].values()
    systems = job["strategy"]["matrix"]["system"]
    assert [re.sub(r"-\d[\d.]*", "", system) for system in systems] == [
        "ubuntu",
        "ubuntu-arm",
        "macos",
    ]
    classifiers = (ROOT / "pyproject.toml").read_text()
    assert ":: MacOS" in classifiers and ":: POSIX :: Linux" in classifiers
    oldest, newest = job["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={oldest}"' in classifiers
    assert int(newest.removeprefix("3.")) > int(oldest.removeprefix("3."))
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert WORKFLOW["concurrency"]["group"] and job["timeout-minutes"] <= 120

    # Actions of one commit, the same script as everywhere, and what follows it.
    *actions, script, after = job["steps"]
    for step in actions:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
    assert script["run"] == "bash launch/test.sh"
    assert after["if"] == "always()"  # it must not change the result
