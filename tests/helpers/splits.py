"""Real runs of a small task on any parallel layout, and the result of a plain PyTorch loop on the
same samples."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from reference import PlainMuon, cosine_with_warmup, plain_loop
from tiny import Ragged, Sequences, drawn
from worlds import run, train

BATCH, CLIP, LR, DECAY = 16, 0.4, 0.01, 0.1  # about half of the steps are clipped


def words(
    folder: Path, *, ranks: int, accumulate: int, steps: int, dtype: str, optimizer: str
) -> list[str]:
    (folder / "recipe.yaml").write_text("task: tiny.Ragged\n")
    return [
        str(folder / "recipe.yaml"),
        "--duration",
        str(steps),
        "--batch.size",
        str(BATCH),
        "--log.every",
        "1",
        "--batch.micro",
        str(BATCH // ranks // accumulate),
        "--optimizer.name",
        optimizer,
        "--optimizer.lr",
        str(LR),
        "--optimizer.weight_decay",
        str(DECAY),
        "--optimizer.clip",
        str(CLIP),
        "--schedule.name",
        "cosine",
        "--schedule.warmup",
        "5",
        "--machine.dtype",
        dtype,
        "--eval.every",
        "0",
        "--track",
        "none",
        "--machine.workers",
        "0",
        "--run.dir",
        str(folder / "run"),
    ]


def trained(
    folder: Path,
    *,
    ranks: int,
    accumulate: int,
    strategy: str,
    steps: int = 40,
    dtype: str = "float32",
    optimizer: str = "adamw",
    function=train,
    extra: tuple[str, ...] = (),
):
    """Return weights and losses of a real run, and the sample ids of each step."""
    folder.mkdir()
    world = run(
        function,
        [
            *words(
                folder,
                ranks=ranks,
                accumulate=accumulate,
                steps=steps,
                dtype=dtype,
                optimizer=optimizer,
            ),
            # a repeated micro-batch would be recorded, too
            "--machine.check_every",
            "0",
            *extra,
        ],
        ranks=ranks,
        config=strategy,
        variables={"TINY_FOLDER": str(folder)},
    )
    world.ok()
    weights = load_file(folder / "run" / "final" / "model.safetensors")
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    share = BATCH // ranks
    by_rank = [drawn(folder, rank, micro=BATCH // ranks // accumulate) for rank in range(ranks)]
    ids = [
        [i for one in by_rank for i in one[step * share : (step + 1) * share]]
        for step in range(steps)
    ]
    return weights, losses, ids


def expected(ids: list[list[int]], *, dtype: torch.dtype, optimizer: str):
    """Return weights and losses of the plain loop on the same samples, from the same initial
    weights."""
    from oneloop.basics.seeds import key

    torch.manual_seed(key(0))
    model = Ragged().model().to(dtype)
    samples = Sequences(37, seed=1).samples
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    rates = [cosine_with_warmup(step, len(ids), 5, LR) for step in range(len(ids))]
    kinds = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=LR),
        "sgd": lambda: torch.optim.SGD(groups, lr=LR, momentum=0.9),
        "torch.optim.Adafactor": lambda: torch.optim.Adafactor(groups, lr=LR),
    }
    if optimizer == "muon":
        return both_optimizers(model, samples, ids, rates)
    losses = plain_loop(
        model,
        kinds[optimizer](),
        ([samples[i] for i in step] for step in ids),
        rate=rates.__getitem__,
        clip=CLIP,
    )
    return {name: p.detach() for name, p in model.state_dict().items()}, losses


def both_optimizers(model, samples, ids, rates):
    """Use Muon for the inner matrix, and AdamW for embedding, head and vectors."""
    inner = [model.inner.weight]
    rest = [p for p in model.parameters() if p is not inner[0]]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
    )
    muon = PlainMuon(inner, lr=LR, weight_decay=DECAY)

    class Both:
        param_groups = adamw.param_groups + muon.param_groups

        def zero_grad(self):
            model.zero_grad()

        def step(self):
            adamw.step()
            muon.step()

    losses = plain_loop(
        model,
        Both(),
        ([samples[i] for i in step] for step in ids),
        rate=rates.__getitem__,
        clip=CLIP,
    )
    return {name: p.detach() for name, p in model.state_dict().items()}, losses


def distance(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the relative L2 distance of two sets of weights."""
    assert found.keys() == reference.keys()
    apart = sum(
        (found[name].double() - reference[name].double()).square().sum() for name in reference
    )
    return float((apart / sum(one.double().square().sum() for one in reference.values())).sqrt())


def furthest(found: list[float], reference: list[float]) -> float:
    assert len(found) == len(reference)
    return max(abs(a - b) / b for a, b in zip(found, reference, strict=True))
