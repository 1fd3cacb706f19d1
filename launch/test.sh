#!/usr/bin/env bash
# Checks the code's form and types, then runs the tests, setting up what they need first. Arguments go to pytest:
#   bash launch/test.sh -k order        bash launch/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh test
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
"$python" -m mypy
case " $* " in
  *" slow "*) exec "$python" -m pytest "$@" ;;  # kills and compilers want the machine for themselves
  *) exec "$python" -m pytest -n 2 "$@" ;;
esac
