#!/usr/bin/env bash
# Install the requirements, check format, types and spelling, then run the tests. Arguments go to pytest:
#   bash launch/test.sh -k order        bash launch/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh test
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m mypy
"$python" -m codespell_lib src tests docs benchmarks launch *.md
case " $* " in
  *" slow "*) exec "$python" -m pytest "$@" ;;  # no parallel tests: kills and compilers need all cores
esac
exec "$python" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
