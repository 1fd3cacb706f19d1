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
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
"$python" -m mypy > "$cache/types" 2>&1 &
checking=$!

# Each worker gets whole files, the longest first. Slow tests run alone: kills and compilers need all cores.
parallel=(-n auto --dist loadfile --no-loadscope-reorder)
case " $* " in
  *" slow "*) parallel=(-n 0) ;;
esac
code=0
"$python" -m pytest "${parallel[@]}" -o cache_dir="$cache/tests" "$@" || code=$?
types=0
wait "$checking" || types=1
cat "$cache/types"

# Some tests still wait in real time, and a busy machine can be too slow for them. One or two tests that failed run again,
# alone, and what passes then is reported as unstable.
failed=$cache/tests/v/cache/lastfailed
if [ "$code" = 1 ] && [ -f "$failed" ] && [ "$(grep -c '": true' "$failed")" -le 2 ]; then
  unstable=$(cat "$failed")
  echo "running the failed tests again, alone"
  code=0
  "$python" -m pytest --last-failed -o cache_dir="$cache/tests" "$@" || code=$?
  if [ "$code" = 0 ]; then
    echo "unstable: these tests failed at first, and passed alone; find out why"
    echo "$unstable"
  fi
fi
[ "$types" = 0 ] || code=1
exit "$code"
