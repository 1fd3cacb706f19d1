#!/usr/bin/env bash
# Trains the packaged digits recipe on this machine, setting up what it needs first. Arguments go to the recipe:
#   bash launch/local.sh --batch.size 128
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh recipes
exec "$python" -m oneloop.cli launch --config_file accelerate_configs/single.yaml digits "$@"
