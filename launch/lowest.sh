#!/usr/bin/env bash
# Test the lower version limits of pyproject.toml: install the lowest allowed versions into a separate environment
# (.venv-lowest, or the folder $1), train each packaged recipe for a few steps under each strategy, and plan two.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${1:-.venv-lowest} steps=3
uv=$(command -v uv || echo "${VIRTUAL_ENV:-.venv}/bin/uv")
[ -x "$place/bin/python" ] || "$uv" venv --quiet --python "${PYTHON:-python3}" "$place"
"$uv" pip install --quiet --python "$place/bin/python" --resolution lowest-direct -e ".[vision,text]"
place=$(cd "$place" && pwd)
"$uv" pip list --quiet --python "$place/bin/python" 2>/dev/null | grep -E "^(torch|torchvision|accelerate|transformers|datasets|pyarrow|jsonargparse|torchmetrics|filelock|numpy) "
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} ONELOOP_CACHE="$scratch/cache" TRANSFORMERS_VERBOSITY=error
"$place/bin/python" - << 'END'
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

digits = load_digits()
for number in range(200):
    folder = Path("images", str(digits.target[number]))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((digits.images[number] * 15.9).astype("uint8")).save(folder / f"{number}.png")
END
for recipe in digits gpt llama bert sft preference distil numbers snippets images; do
  case $recipe in
    gpt | llama | bert | snippets) own=(--task.layers 1 --task.heads 2 --task.width 32) ;;  # small: the last evaluation reads the whole validation split
    images) own=(--task.data images) ;;
    preference) own=(--init.from runs/sft-single) ;;
    distil) own=(--task.teacher runs/sft-single/final) ;;
    numbers) own=(--task.layers 1 --eval.generate 16) ;;
    *) own=() ;;
  esac
  for strategy in single ddp fsdp2; do
    "$place/bin/oneloop" launch --config_file "$strategy" "$recipe" ${own[@]+"${own[@]}"} --batch.size 16 --duration "$steps" \
      --run.dir "runs/$recipe-$strategy" > output.txt 2>&1 || { cat output.txt >&2; exit 1; }
    echo "$recipe under $strategy: $(tail -n 1 output.txt)"
  done
done
"$place/bin/oneloop" verify runs/digits-ddp > /dev/null
"$place/bin/oneloop" report runs/digits-ddp > /dev/null
"$place/bin/oneloop" evaluate runs/digits-ddp > /dev/null
"$place/bin/oneloop" predict runs/digits-ddp --to predictions.parquet > /dev/null
"$place/bin/oneloop" export runs/gpt-single --to out > /dev/null
for recipe in gpt llama; do
  "$place/bin/oneloop" plan "$recipe" --mixed_precision bf16 --machine.recompute full --no_changes > /dev/null
done
echo "the lowest versions train all recipes"
