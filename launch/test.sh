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
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
code=0
"$python" -m pytest -n 2 -o cache_dir="$cache" "$@" || code=$?

# Many tests start processes that wait in real time, and a busy machine can be too slow for them. One or two tests that
# failed are therefore run again, alone. What passes now is reported as unstable.
[ "$code" = 1 ] || exit "$code"  # 1: tests failed; others: interrupted, or an error of pytest
unstable=$(grep '": true' "$cache/v/cache/lastfailed")
[ "$(echo "$unstable" | wc -l)" -le 2 ] || exit 1
echo "running the failed tests again, alone"
"$python" -m pytest --last-failed -o cache_dir="$cache" "$@"
echo "unstable: these tests failed at first, and passed alone; find out why"
echo "$unstable"
