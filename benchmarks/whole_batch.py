"""Losses over the whole batch: memory, time, and the gradient on two processes: ``python
benchmarks/whole_batch.py``.

- memory: peak of a step's tensors for batch.size 64 to 8,192 with micro-batches of 64, and of the
  same step in one forward; 64-dimensional embeddings of a small network. The inputs and embeddings
  grow with the batch by design.
- time: a step of the recipe ``docstrings`` with two passes, against one with a single forward per
  micro-batch (whose loss is over the micro-batch only). Medians of pairs in one alternating run.
- two: the gradient of 32 pairs (float64, no dropout) against that of one process, for the losses of
  sentence-transformers and for oneloop.

Needs two cores and sentence-transformers; takes five minutes.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from oneloop.tasks.contrastive import info_nce  # noqa: E402
from oneloop.tasks.text_pairs import TextPairs  # noqa: E402

PAIRS = 32


class Small:
    """InfoNCE of a small network over the whole batch."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def train_set(self) -> Any:
        return torch.randn(16384, 64, generator=torch.Generator().manual_seed(0))

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        return {"x": torch.stack(samples)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["x"])))

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": F.normalize(model(batch["x"]), dim=1), "y": F.normalize(batch["x"], dim=1)}

    def batch_loss(
        self, parts: dict[str, Tensor], columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return info_nce(parts["x"], parts["y"], 10.0), {}


class OneLoss:
    """Hides batch_loss of a base class: the task has a loss for each micro-batch."""

    additive = False

    def __getattribute__(self, name: str) -> Any:
        if name == "batch_loss":
            raise AttributeError(name)
        return super().__getattribute__(name)


class OneForward(OneLoss, Small):
    """The same loss in one forward of the whole batch, with all similarities at once."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x = F.normalize(model(batch["x"]), dim=1)
        similarity = 10 * x @ F.normalize(batch["x"], dim=1).T
        return F.cross_entropy(similarity, torch.arange(len(x)), reduction="sum"), {}


class SingleForward(OneLoss, TextPairs):
    """The packaged pairs with a loss over each micro-batch: one forward."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        parts = self.embed(model, batch)
        a, b = (F.normalize(value, dim=-1) for value in (parts["anchor"], parts["candidate"][:, 0]))
        return info_nce(a, b, self.scale), {name: part.detach() for name, part in parts.items()}


def job_of(words: list[str]) -> tuple[Any, Any]:
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.recipe.parse import read

    run = start()
    return build_job(read(words), ranks=run.ranks, sharded=run.sharded), run


def memory() -> Iterator[str]:
    from oneloop.tools.plan.step_costs import StepCosts

    yield "batch.size   two passes: peak   inputs + embeddings   the rest   one forward: peak"
    for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        peaks = []
        for kind, micro in (("Small", 64), ("OneForward", size)):
            words = [
                f"{__file__}:{kind}",
                "--batch.size",
                str(size),
                "--batch.micro",
                str(micro),
                "--duration",
                "2",
            ]
            costs = StepCosts(*job_of(words)).step()
            peaks.append(costs.peak)
        # The inputs, the first pass's embeddings by micro-batch, those of the whole batch, and
        # their gradients.
        grown = size * 64 * 4 * (1 + 2 + 2 + 2)
        rest = (peaks[0] - grown) / 2**20
        line = (
            f"{peaks[0] / 2**20:13.2f} MiB {grown / 2**20:17.2f} MiB {rest:8.2f} MiB "
            f"{peaks[1] / 2**20:15.2f} MiB"
        )
        yield f"{size:>10,}   {line}"


def timed(rounds: int) -> Iterator[str]:
    from oneloop.checks.preflight import preflight
    from oneloop.loop.gradients import Gradients
    from oneloop.measure.meter import Meter
    from oneloop.train import accumulate
    from whole_batches import group_of

    yield "batch.size  dropout   two passes   one forward   ratio (least, most)   control"
    shape = ["--task.layers", "1", "--task.width", "128", "--task.length", "64"]  # of the recipe
    for dropout, size in product(("0.0", "0.2"), (64, 128, 256, 512)):
        steps, common = [], ["docstrings", *shape, "--task.dropout", dropout, "--duration", "2"]
        for more in (
            [],
            ["--task", f"{__file__}:SingleForward"],
            ["--task", f"{__file__}:SingleForward"],
        ):
            job, run = job_of([*common, *more, "--batch.size", str(size), "--batch.micro", "32"])
            model = run.prepare(job.model)
            parameters = [*model.parameters()]
            made = Gradients(job, run, model, parameters, preflight(job, run, model))
            samples = [job.train_set[index] for index in range(size)]

            def step(
                job: Any = job, run: Any = run, made: Any = made, samples: Any = samples
            ) -> float:
                run.accelerator.gradient_accumulation_steps = job.layout.accumulate
                group, meter = group_of(job, run, samples), Meter(run.accelerator)
                began = time.perf_counter()
                accumulate(run, made, group, meter, position=0, measured=False)
                return time.perf_counter() - began

            step()
            steps.append(step)
        times = [[step() for step in steps] for _ in range(rounds)]
        ratios, controls = (
            [two / one for two, one, _ in times],
            [again / one for _, one, again in times],
        )
        two, one = (median(row[at] for row in times) for at in (0, 1))
        spread = f"x {median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f})"
        yield (
            f"{size:>10,} {dropout:>8} {two:>10.3f} s {one:>11.3f} s   {spread}   x "
            f"{median(controls):.3f}"
        )


def base(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    task = TextPairs(layers=1, width=32, length=24, vocab=600)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    task.reader.tokenizer.save_pretrained(folder)
    BertModel(BertConfig(vocab_size=len(task.reader.tokenizer), **shape)).save_pretrained(folder)
    texts = [
        [task.reader.decode(text, 1, -1) for text, _ in task.train_set()[index]]
        for index in range(PAIRS)
    ]
    (folder / "pairs.txt").write_text("\n".join("\t".join(pair) for pair in texts))
    return folder


def theirs(folder: Path, kind: str, micro: int, **options: Any) -> dict[str, Tensor]:
    """Return the gradient of a loss of sentence-transformers as its trainer computes it: each
    process has its share of the pairs in micro-batches, whose losses are averaged, and DDP averages
    the gradients."""
    import torch.distributed as dist
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    texts = [line.split("\t") for line in (folder / "pairs.txt").read_text().splitlines()]
    mine = texts[rank * PAIRS // ranks : (rank + 1) * PAIRS // ranks]
    model = SentenceTransformer(str(folder), device="cpu").double().eval()
    loss = getattr(losses, kind)(model, **options)
    parts = [mine[start : start + micro] for start in range(0, len(mine), micro)]
    for part in parts:
        (
            loss([model.preprocess([*column]) for column in zip(*part)], torch.zeros(len(part)))
            / len(parts)
        ).backward()
    found = {name: p.grad for name, p in model[0].model.named_parameters() if p.grad is not None}
    for gradient in found.values():
        if ranks > 1:
            dist.all_reduce(gradient)
            gradient /= ranks
    return found


def on_two(folder: str, cases: list[Any]) -> list[dict[str, Tensor]]:
    from accelerate import PartialState

    PartialState(cpu=True)
    torch.set_num_threads(1)
    return [theirs(Path(folder), *case[:2], **case[2]) for case in cases]


def ours(folder: str, micro: int) -> dict[str, Tensor]:
    from oneloop.checks.preflight import preflight
    from oneloop.loop.gradients import Gradients
    from oneloop.measure.meter import Meter
    from oneloop.train import accumulate
    from whole_batches import group_of

    words = [
        "docstrings",
        "--task.model",
        folder,
        "--task.length",
        "24",
        "--machine.dtype",
        "float64",
        "--duration",
        "2",
    ]
    job, run = job_of([*words, "--batch.size", str(PAIRS), "--batch.micro", str(micro)])
    run.accelerator.gradient_accumulation_steps = job.layout.accumulate
    model = run.prepare(job.model.eval(), blocks=job.built.blocks)
    parameters = [p for p in model.parameters() if p.requires_grad]
    made = Gradients(job, run, model, parameters, preflight(job, run, model))
    samples = []
    for line in (Path(folder) / "pairs.txt").read_text().splitlines():
        row = dict(zip(("anchor", "positive"), line.split("\t"), strict=True))
        samples.append(job.task.encoded(job.task.reader, job.task.columns, int, row))
    accumulate(
        run,
        made,
        group_of(job, run, samples),
        Meter(run.accelerator),
        position=0,
        measured=False,
    )
    names = [
        name.removeprefix("module.") for name, p in model.named_parameters() if p.requires_grad
    ]
    return {
        n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for n, p in zip(names, parameters)
    }


def two() -> Iterator[str]:
    from worlds import run

    plain, cached = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
    gathers, small = {"gather_across_devices": True}, {"mini_batch_size": 8}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(base(Path(scratch)))
        reference = theirs(Path(folder), plain, PAIRS)
        size = max(float(value.abs().max()) for value in reference.values())

        def line(name: str, found: dict[str, Tensor]) -> str:
            apart = max(float((found[key] - value).abs().max()) for key, value in reference.items())
            return f"{name:<82} {apart / size:.1e}"

        yield f"{'gradient of 32 pairs, relative difference from one process and one forward':<82}"
        yield line(
            f"{cached}, one process, mini-batches of 8",
            theirs(Path(folder), cached, PAIRS, **small),
        )
        yield line(f"{plain}, one process, accumulation 4 x 8", theirs(Path(folder), plain, 8))
        cases = {
            f"{plain}, 2 x 16": (plain, 16, {}),
            f"{cached}, 2 x 16": (cached, 16, small),
            f"{plain}, 2 x 16, gather_across_devices": (plain, 16, gathers),
            f"{cached}, 2 x 16, gather_across_devices": (cached, 16, {**small, **gathers}),
            f"{plain}, 2 x 2 x 8, gather_across_devices, accumulation": (plain, 8, gathers),
        }
        world = run(on_two, folder, [*cases.values()], ranks=2, config="ddp")
        for name, found in zip(cases, world.ok()[0], strict=True):
            yield line(name, found)
        for config, ranks, micro in (
            ("single", 1, 32),
            ("single", 1, 8),
            ("ddp", 2, 8),
            ("fsdp2", 2, 8),
        ):
            (found, *_) = run(ours, folder, micro, ranks=ranks, config=config).ok()
            yield line(f"oneloop, {config}, {ranks} x {PAIRS // ranks // micro} x {micro}", found)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--parts", default="memory,time,two")
    options.add_argument("--rounds", type=int, default=6)
    given = options.parse_args()
    import sentence_transformers

    torch.set_num_threads(1)
    versions = (
        f"torch {torch.__version__}, sentence-transformers {sentence_transformers.__version__}"
    )
    print(
        f"{date.today()}  python benchmarks/whole_batch.py --parts {given.parts} --rounds "
        f"{given.rounds}"
    )
    print(
        f"{platform.machine()}, 2 cores (one thread), Python {platform.python_version()}, "
        f"{versions}"
    )
    parts = {"memory": memory, "time": lambda: timed(given.rounds), "two": two}
    for name in given.parts.split(","):
        print(f"\n{name}")
        for row in parts[name]():
            print(row, flush=True)


if __name__ == "__main__":
    main()
