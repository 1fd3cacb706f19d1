"""Check that `batch.grain` is bit-identical on a GPU, and print a table.

    PYTHONPATH=src python benchmarks/same_bits_gpu.py

1. The packaged recipes from the command line, twice on one GPU: `oneloop verify --same` finds no
   difference.
2. Eight leaves per step on one process, against two processes with four leaves each on the same
   GPU. Forward, backward, counter, exact norm, clipping and foreach AdamW run on the device. The
   sums of the two processes meet in the tree through host memory (gloo, because NCCL allows one
   process per GPU). The hashes of each step are compared. (This check also runs without a GPU:
   `--leaves`.)
3. The cost of `batch.grain` on that GPU: step time and peak memory with it and without it,
   alternating.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.seeds import reseed
from oneloop.basics.tensors import optimizer_tensors
from oneloop.machine.reduction import Tree
from oneloop.measure.fingerprint import fingerprint
from oneloop.optim.adamw import AdamW
from oneloop.optim.clip import clip_, global_norm

LEAVES, GRAIN, STEPS, LENGTH, WORDS = 8, 4, 40, 64, 512
QUICK = [
    "--track",
    "none",
    "--eval.every",
    "0",
    "--save.every",
    "0",
    "--log.every",
    "10",
    "--watch.quiet",
    "true",
]
RECIPES = {
    "digits": (8, ["digits", "--task.dropout", "0.1", "--duration", "100"]),
    "gpt": (4, ["gpt", "--task.dropout", "0.1", "--duration", "60", "--eval.micro", "null"]),
    "llama": (2, ["llama", "--duration", "60", "--eval.micro", "null"]),
}


def model() -> nn.Module:
    """Return a model with attention, dropout, norms and a tied embedding, like a language model."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
    return nn.ModuleDict(
        {
            "table": nn.Embedding(WORDS, 128),
            "body": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
        }
    )


def loss(parts: nn.Module, words: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1] - 1, device=words.device)
    hidden = parts["body"](parts["table"](words[:, :-1]), mask=mask)  # type: ignore[index]
    logits = hidden @ parts["table"].weight.T  # type: ignore[index,union-attr]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), words[:, 1:].flatten(), reduction="sum"
    )


def steps(rank: int, ranks: int, port: int, half: bool, out: str, count: int) -> None:
    """Train, and write the hashes of each step."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    parts = model().to(device)
    trained, own = list(parts.parameters()), LEAVES // ranks
    optimizer = AdamW(trained, lr=1e-3, weight_decay=0.1)
    optimizer.elementwise = True
    tree, bits = Tree(parts, trained, ranks=1, accumulate=own), []
    for step in range(count):
        for micro in range(own):
            leaf = rank * own + micro
            seeded = torch.Generator().manual_seed(step * LEAVES + leaf)
            words = torch.randint(0, WORDS, (GRAIN, LENGTH), generator=seeded).to(device)
            reseed(device, 0, step, leaf)
            with tree:
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    mean = loss(parts, words) / (LEAVES * GRAIN * (LENGTH - 1))
                mean.backward()
        for parameter in trained if ranks > 1 else ():
            assert parameter.grad is not None
            everyone = [torch.empty_like(parameter.grad, device="cpu") for _ in range(ranks)]
            dist.all_gather(everyone, parameter.grad.cpu())
            parameter.grad.copy_(tree_sum(torch.stack(everyone)))
        norm = global_norm(trained, exact=True)
        clip_(trained, 0.5, norm)
        optimizer.step()
        optimizer.zero_grad()
        held = dict(parts.named_parameters()) | optimizer_tensors(parts, optimizer)
        bits.append((float(norm), fingerprint(held)["bits"]))
    if rank == 0:
        Path(out).write_text(json.dumps(bits))
    dist.destroy_process_group()


def several(ranks: int, half: bool, scratch: Path, count: int = STEPS) -> list[list]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = scratch / f"{ranks}-{half}.json"
    processes.start_processes(
        steps, (ranks, port, half, str(out), count), nprocs=ranks, start_method="spawn"
    )
    return list(json.loads(out.read_text()))


def typed(words: list[str], folder: Path, half: bool = False) -> None:
    environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "bf16" if half else "no"}
    command = [sys.executable, "-m", "oneloop.train", *words, *QUICK, "--run.dir", str(folder)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def cost(folder: Path) -> tuple[float, float]:
    """Return the milliseconds of a step, and the peak GiB."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train/samples_per_second" in line][1:]
    size = (logged[1]["samples"] - logged[0]["samples"]) / 10
    times = [size / line["train/samples_per_second"] * 1e3 for line in logged]
    return statistics.median(times), max(line["memory/peak_gib"] for line in logged)


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    table = [
        f"# {date.today()}  python {' '.join(['benchmarks/same_bits_gpu.py', *sys.argv[1:]])}",
        f"# {device}, torch {torch.__version__}, Python {platform.python_version()}",
    ]
    with tempfile.TemporaryDirectory() as made:
        scratch = Path(made)
        for half in (False, True):
            kind = "bf16" if half else "float32"
            one, two = several(1, half, scratch), several(2, half, scratch)
            apart = next(
                (step for step, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None
            )
            said = (
                f"the same bits over {STEPS} steps"
                if apart is None
                else f"they differ from step {apart + 1} on"
            )
            table.append(f"1 x {LEAVES} leaves against 2 x {LEAVES // 2}, {kind}: {said}")
            for name, (grain, words) in RECIPES.items() if "--leaves" not in sys.argv else ():
                places = [scratch / f"{name}-{kind}-{number}" for number in range(2)]
                costs: dict[str, list[tuple[float, float]]] = {"batch.micro": [], "batch.grain": []}
                for place in places:
                    typed([*words, "--batch.grain", str(grain)], place, half)
                    costs["batch.grain"].append(cost(place))
                    plain = place.with_name(f"{place.name}-plain")
                    typed([*words, "--batch.micro", str(grain)], plain, half)
                    costs["batch.micro"].append(cost(plain))
                command = [sys.executable, "-m", "oneloop", "verify", "--same", *map(str, places)]
                table.append(
                    f"{name}, {kind}, twice: "
                    f"{subprocess.run(command, capture_output=True, text=True).stdout}"
                )
                table += [
                    f"  {kind}: "
                    f"{', '.join(f'{each:.2f} ms, {peak:.2f} GiB' for each, peak in found)}"
                    for kind, found in costs.items()
                ]
    print("\n".join(table))


if __name__ == "__main__":
    main()
