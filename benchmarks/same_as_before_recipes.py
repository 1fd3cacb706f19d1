"""Compare two checkouts bit by bit on small forms of all packaged recipes: weights, EMA weights,
optimizer and metrics.

    git worktree add ../before COMMIT
    PYTHONPATH=tests/helpers python benchmarks/same_as_before_recipes.py ../before .

Each recipe trains on one process, DDP and FSDP2. Times, speeds and memory are not compared. The
exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from same_as_before import STRATEGIES, left, reported

STEPS = 8
COMMON = [
    "--duration",
    str(STEPS),
    "--log.every",
    "2",
    "--eval.every",
    "4",
    "--save.every",
    "4",
    "--save.keep",
    "99",
    "--ema.half_life",
    "8 samples",
    "--track",
    "none",
]


def take(checkout: Path, cases: Path, to: Path) -> None:
    """Train every case with the code of ``checkout``, and write the results of each."""
    sys.path.insert(0, str(checkout / "tests" / "helpers"))
    import oneloop
    import worlds

    assert str(checkout) in oneloop.__file__
    found = {}
    for name, words in json.loads(cases.read_text()).items():
        for strategy, ranks in STRATEGIES.items():
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                argv = [*words, *COMMON, "--run.dir", str(folder / "run")]
                world = worlds.run(worlds.train, argv, ranks=ranks, config=strategy, timeout=600)
                if not (folder / "run" / "summary.json").exists():
                    raise RuntimeError(f"{name}, {strategy}: {world.output}")
                found[f"{name}, {strategy}"] = left(folder, 0, world.codes)
            print(f"{name}, {strategy}: codes {world.codes}", file=sys.stderr, flush=True)
    to.write_text(json.dumps(found))


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("checkouts", nargs="+", type=Path)
    asked.add_argument("--take", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.take:
        take(*given.checkouts)
        return 0
    from fake_cases import RECIPES, words

    results = []
    with tempfile.TemporaryDirectory() as scratch:
        # Write the data of all recipes once.
        folder = Path(scratch)
        cases = folder / "cases.json"
        chosen = [*RECIPES, "lora", "grain", "muon"]
        cases.write_text(json.dumps({name: words(folder, name) for name in chosen}))

        # Train with both checkouts, each in a process of its own.
        for number, checkout in enumerate(given.checkouts):
            to = folder / f"{number}.json"
            source = str(checkout.resolve() / "src")
            environment = {**os.environ, "PYTHONPATH": source}
            command = [sys.executable, __file__, "--take", str(checkout.resolve())]
            subprocess.run([*command, str(cases), str(to)], check=True, env=environment)
            results.append(json.loads(to.read_text()))
    return reported(results, Path(__file__).name, STEPS)


if __name__ == "__main__":
    sys.exit(main())
