"""Every pair of techniques on one process, DDP and FSDP2: techniques that do not change the result train the same
weights, or the pair is rejected with a reason. ``python tests/test_pairs.py`` writes the table to the docs."""

from __future__ import annotations

import re
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import pytest
from safetensors.torch import load_file

from adapters import SPLITS, a_base, furthest, of_words

PAGE = Path(__file__).parent.parent / "docs" / "pairs.md"
LEARNED = {
    "packing": ["--task.pack", "packed"],
    "LoRA": ["--task.lora.rank", "4"],
    "EMA": ["--ema.half_life", "16"],
    "muon": ["--optimizer.name", "muon"],
}
COMPUTED = {
    "recompute": ["--machine.recompute", "full"],
    "compile": ["--machine.compile", "regional"],
    "fused loss": ["--task.fused_loss", "true"],
}
"""these change nothing of the result"""
TECHNIQUES = COMPUTED | LEARNED
PAIRS = list(combinations(TECHNIQUES, 2))
NAMES = {"single": "one process", "ddp": "DDP", "fsdp2": "FSDP2"}


def words_of(techniques, base: Path) -> list[str]:
    words = ["--task.model", str(base), "--duration", "3", "--save.every", "0"]
    # AdamW, which muon uses for embeddings, amplifies tiny gradients.
    words += (
        ["--optimizer.lr", "0.0001"] if "muon" in techniques else ["--optimizer.name", "sgd", "--optimizer.lr", "0.05"]
    )
    return [*words, *(word for name in techniques for word in TECHNIQUES[name])]


def weights(folder: Path) -> dict:
    files = sorted((folder / "run" / "final").glob("*.safetensors"))
    return {f"{file.stem}: {name}": tensor for file in files for name, tensor in load_file(file).items()}


def outcome(folder: Path, pair, base: Path) -> list[str]:
    """Return for each layout "works", or why it is rejected."""
    outcomes = []
    plain = [name for name in pair if name in LEARNED]
    (folder / "plain").mkdir(parents=True)
    of_words(folder / "plain", *words_of(plain, base)).ok()
    expected = weights(folder / "plain")
    for config, ranks in SPLITS:
        (folder / config).mkdir()
        world = of_words(folder / config, *words_of(pair, base), config=config, ranks=ranks, timeout=250)
        if set(world.codes) == {2}:
            [why] = set(re.findall(r"^oneloop(?:\.train)?: (.*)", world.output, re.M))
            outcomes.append(f"rejected: {why.replace(str(base), 'BASE')}")
            continue
        world.ok()
        worst = furthest(weights(folder / config), expected)
        print(f"{' + '.join(pair)}, {config}: {worst:.1e}")
        assert worst < 1e-5, (pair, config, worst)
        outcomes.append("works")
    return outcomes


def row(pair, outcomes: list[str]) -> str:
    return f"| {pair[0]} and {pair[1]} | {' | '.join(outcomes)} |"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return a_base(tmp_path_factory.mktemp("base") / "small")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pair", PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_the_page_tells_what_a_pair_does(base, tmp_path, pair):
    assert row(pair, outcome(tmp_path, pair, base)) in PAGE.read_text()


def test_the_page_has_every_pair():
    text = PAGE.read_text()
    assert [line.split(" | ")[0] for line in text.splitlines() if " and " in line and line.startswith("| ")] == [
        f"| {one} and {other}" for one, other in PAIRS
    ]


def write() -> None:
    """Write the current results into the page."""
    with tempfile.TemporaryDirectory() as scratch:
        base = a_base(Path(scratch) / "base")
        rows = [row(pair, outcome(Path(scratch) / "-".join(pair), pair, base)) for pair in PAIRS]
    head = f"| | {' | '.join(NAMES[config] for config, _ in SPLITS)} |\n|---|---|---|---|\n"
    before = PAGE.read_text().partition("| | one process")[0]
    PAGE.write_text(before + head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    sys.exit(write())
