"""Measure host memory while several processes load a 1 GB model under FSDP2: mapped, from scratch,
in turn.

    python benchmarks/host_memory.py [--ranks 4]

For each variant: the peak anonymous memory of each process above its memory after the imports
(sampled every 2 ms), summed over processes, in copies of the model; and the peak of the total of
all processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "machine"), str(TESTS / "helpers")]


def main() -> None:
    import transformers

    import test_host_memory as of
    from worlds import run

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        model = transformers.BertForSequenceClassification(of.bert(5))
        copy = sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20
        model.save_pretrained(folder)
        del model
        print(
            f"{ranks} processes, FSDP2 on a CPU, BERT of 2048 x 5 layers: a copy of "
            f"{copy:,.0f} MB in float32"
        )
        how = {"ranks": ranks, "config": "fsdp2", "timeout": 900}
        for name, seen in (
            ("from safetensors", run(of.pretrained, folder, **how).ok()),
            ("from scratch", run(of.from_scratch, False, 5, True, **how).ok()),
            ("from scratch, in turn", run(of.from_scratch, True, 5, True, **how).ok()),
        ):
            several = [samples for samples, _ in seen]
            peaks, kept = [of.most(samples) for samples in several], [after for _, after in seen]
            print(f"{name:22} most of each {listed(peaks)} MB, kept {listed(kept)};", end=" ")
            print(f"sum of the most {sum(peaks) / copy:.2f} copies,", end=" ")
            print(f"most at one time {of.at_once(several) / copy:.2f}", flush=True)


def listed(values: list[float]) -> str:
    return ", ".join(f"{value:,.0f}" for value in values)


if __name__ == "__main__":
    main()
