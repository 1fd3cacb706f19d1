#!/usr/bin/env bash
# Install the requirements, check format, types and spelling, and run the tests. Arguments go to pytest:
#   bash launch/test.sh -k order        bash launch/test.sh -m slow        bash launch/test.sh --changed
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh test
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m codespell_lib src tests docs benchmarks launch *.md

# The types are checked while the tests run.
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$python" -m mypy > "$report" 2>&1 &
checking=$!

# Each worker gets whole files, the longest first. Slow tests run alone: kills and compilers need all cores. No test runs
# twice: one that fails now and then has a cause.
parallel=(-n auto --dist loadfile --no-loadscope-reorder)
case " $* " in
  *" slow "*) parallel=(-n 0) ;;
esac
code=0
"$python" -m pytest "${parallel[@]}" "$@" || code=$?
wait "$checking" || code=1
cat "$report"
exit "$code"
