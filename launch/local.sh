#!/usr/bin/env bash
# Install the requirements, then train the packaged digits recipe on this machine. Arguments go to the recipe:
#   bash launch/local.sh --batch.size 128
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh recipes
exec "$python" -m oneloop launch --config_file accelerate_configs/single.yaml digits "$@"
