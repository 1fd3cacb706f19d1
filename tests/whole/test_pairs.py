"""Every pair of techniques under one process, DDP and FSDP2: the same weights as without what only
changes how they are computed. docs/explanation/techniques.md states it."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
from safetensors.torch import load_file

from adapters import SPLITS, a_base, furthest, of_words

pytestmark = pytest.mark.covers(
    "oneloop.ema",
    "oneloop.machine.compile",
    "oneloop.machine.recompute",
    "oneloop.optim.muon",
    "oneloop.tasks.language.chunked_loss",
    "oneloop.tasks.language.lora",
    "oneloop.tasks.language.sequences",
    "oneloop.train",
)

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


def words_of(techniques, base: Path) -> list[str]:
    words = ["--task.model", str(base), "--duration", "3", "--save.every", "0"]
    # AdamW, which muon uses for embeddings, amplifies tiny gradients.
    words += (
        ["--optimizer.lr", "0.0001"]
        if "muon" in techniques
        else ["--optimizer.name", "sgd", "--optimizer.lr", "0.05"]
    )
    return [*words, *(word for name in techniques for word in TECHNIQUES[name])]


def weights(folder: Path) -> dict:
    files = sorted((folder / "run" / "final").glob("*.safetensors"))
    return {
        f"{file.stem}: {name}": tensor for file in files for name, tensor in load_file(file).items()
    }


def outcome(folder: Path, pair, base: Path) -> list[str]:
    """Return for each layout "works", or why it is rejected."""
    said = []
    plain = [name for name in pair if name in LEARNED]
    (folder / "plain").mkdir(parents=True)
    of_words(folder / "plain", *words_of(plain, base)).ok()
    wanted = weights(folder / "plain")
    for config, ranks in SPLITS:
        (folder / config).mkdir()
        world = of_words(
            folder / config, *words_of(pair, base), config=config, ranks=ranks, timeout=250
        )
        if set(world.codes) == {2}:
            [why] = set(re.findall(r"^oneloop(?:\.train)?: (.*)", world.output, re.M))
            said.append(f"rejected: {why.replace(str(base), 'BASE')}")
            continue
        world.ok()
        worst = furthest(weights(folder / config), wanted)
        print(f"{' + '.join(pair)}, {config}: {worst:.1e}")
        assert worst < 1e-5, (pair, config, worst)
        said.append("works")
    return said


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return a_base(tmp_path_factory.mktemp("base") / "small")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pair", PAIRS, ids=[" ".join(pair) for pair in PAIRS])
def test_a_pair_works_as_the_page_states(base, tmp_path, pair):
    assert outcome(tmp_path, pair, base) == ["works"] * len(SPLITS)
