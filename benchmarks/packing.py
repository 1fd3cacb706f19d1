"""Measure trained tokens per second of the same documents: packed, padded in length buckets, and
padded in any order.

    python benchmarks/packing.py

Documents have log-normal lengths (median 120 tokens, sigma 0.8, cut at the sample length); the
model is a small Llama. Each round trains on the same documents with each variant, forward and
backward. Rounds alternate, and the first variant runs twice (control). On a GPU in half precision,
packed rows use torch's variable-length kernel. The script prints the largest difference of a
token's loss from that with the float32 mask.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date

import numpy as np
import torch
from torch import Tensor, nn

from oneloop.data.order import Order, order_of
from oneloop.tasks.language.language_model import LanguageModel, ModelSettings
from oneloop.tasks.language.models import Shape
from oneloop.tasks.language.sequences import Samples, collated, cut_texts
from oneloop.tasks.rows.cached_arrays import Ragged


class Random(LanguageModel):
    """A Llama from scratch on documents of random tokens."""

    def __init__(self, shape: Shape, entries: int, *, packed: bool) -> None:
        super().__init__(ModelSettings(), packed=packed)
        self.shape, self.length, self._entries = shape, shape.length, entries

    @property
    def entries(self) -> int:
        return self._entries

    def bare_model(self) -> nn.Module:
        torch.manual_seed(0)
        return super().bare_model()


def documents(count: int, length: int, entries: int, *, room: int) -> Samples:
    """Return documents of random tokens with log-normal lengths, packed if there is room."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(120), 0.8, count).astype(np.int64), 2, length + 1)
    return cut_texts(
        Ragged(draw.integers(0, entries, lengths.sum()).astype(np.int32), np.cumsum(lengths)),
        length,
        "cut",
        room=room,
    )


def batches(way: str, rows: Samples, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Yield all documents once, in batches of about ``tokens`` input tokens."""
    each = max(1, int(tokens / rows.room or rows.lengths.mean()))
    order = order_of(rows, seed=0, batch=each) if way == "in buckets" else Order(len(rows), seed=0)
    indices = order[0 : len(rows)][1].tolist()
    for start in range(0, len(indices), each):
        several = [rows[index] for index in indices[start : start + each]]
        yield collated(several, width=rows.room, most=rows.most)


def trained(task: Random, model: nn.Module, loaded: list[dict[str, Tensor]], half: bool) -> float:
    """Return the seconds of forward and backward."""
    device = next(model.parameters()).device.type
    began = time.perf_counter()
    for batch in loaded:
        with torch.autocast(device, torch.bfloat16, enabled=half):
            total, _ = task.loss(model, batch)
        total.backward()
        model.zero_grad(set_to_none=True)
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def difference(task: Random, model: nn.Module, loaded: list[dict[str, Tensor]]) -> float:
    """Return the largest difference of a token's loss between bf16 and float32."""
    model.eval()
    worst = 0.0
    with torch.no_grad():
        for batch in loaded[:4]:
            exact = task.loss(model, batch)[1]["loss"]
            with torch.autocast("cuda", torch.bfloat16):
                worst = max(worst, float((task.loss(model, batch)[1]["loss"] - exact).abs().max()))
    model.train()
    return worst


def main() -> None:
    asked = argparse.ArgumentParser()
    for key, default in {
        "layers": 4,
        "width": 256,
        "heads": 4,
        "length": 512,
        "entries": 2048,
    }.items():
        asked.add_argument(f"--{key}", type=int, default=default)
    asked.add_argument("--documents", type=int, default=200)
    asked.add_argument("--tokens", type=int, default=4096, help="of input in a micro-batch, about")
    asked.add_argument("--rounds", type=int, default=6)
    given = asked.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    half = device.type == "cuda"
    shape = Shape("llama", given.layers, given.heads, given.width, given.length)
    ways: dict[str, tuple[Random, nn.Module, list[dict[str, Tensor]]]] = {}
    for way in ("packed", "in buckets", "as they come", "packed (control)"):
        packed = way.startswith("packed")
        room = given.length if packed else 0
        made = documents(given.documents, given.length, given.entries, room=room)
        task = Random(shape, given.entries, packed=packed)
        model = task.model().to(device)
        loaded = [
            {name: x.to(device) for name, x in one.items()}
            for one in batches(way, made, given.tokens)
        ]
        ways[way] = (task, model, loaded)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(given.rounds + 1):
        for way, (task, model, loaded) in ways.items():
            took = trained(task, model, loaded, half)
            if turn:
                found[way].append(int(made.lengths.sum()) / took)
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    threads = torch.get_num_threads()
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, {device}, {threads} "
        "threads\n"
        f"# {len(made):,} documents of {made.lengths.mean():.0f} tokens on average, "
        f"{made.lengths.sum():,} in all;"
        f" a Llama of {sum(p.numel() for p in ways['packed'][1].parameters()):,} parameters; "
        f"{given.rounds} rounds"
    )
    base = found["packed"]
    for way, rates in found.items():
        ratio = statistics.median(a / b for a, b in zip(rates, base, strict=True))
        loaded = ways[way][2]
        read = sum(batch["input"].numel() for batch in loaded)
        print(
            f"{way:17} {statistics.median(rates):9,.0f} tokens/s ({min(rates):,.0f} to "
            f"{max(rates):,.0f})  {ratio:.2f}x"
            f"  {len(loaded)} micro-batches, {100 * (1 - made.lengths.sum() / read):4.1f} % padding"
        )
    if half:
        print(
            "a token's loss in bf16 by the variable-length kernel, from float32: "
            f"{difference(*ways['packed']):.2e}"
        )


if __name__ == "__main__":
    main()
