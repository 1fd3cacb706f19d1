"""Part bits of ``gpu_day.py``: is ``batch.grain`` bit-identical on a GPU, and what does it cost?

    PYTHONPATH=src python benchmarks/gpu_day.py --part bits

1. The packaged recipes from the command line, twice on one GPU: ``oneloop verify --same`` finds no
   difference. Beside them, the same steps with ``batch.micro``: time of a step and peak memory.
2. Eight leaves per step on one process, against two processes with four leaves each on the same
   GPU. Forward, backward, counter, exact norm, clipping and foreach AdamW run on the device. The
   sums of the two processes meet in the tree through host memory (gloo, because NCCL allows one
   process per GPU). The hashes of each step are compared. (Also without a GPU.)
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from gpu_lines import Place, Result, line
from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.basics.seeds import reseed
from oneloop.basics.tensor_hash import fingerprint
from oneloop.machine.reduction import Tree
from oneloop.optim.adamw import AdamW
from oneloop.optim.clip import clip_, global_norm

LEAVES, GRAIN, STEPS, LENGTH, WORDS = 8, 4, 40, 64, 512
QUICK = ["--track", "none", "--eval.every", "0", "--save.every", "0", "--log.every", "10"]
QUICK += ["--watch.output", "quiet", "--eval.samples", "0"]
SMALL = ["--task.width", "32", "--task.heads", "2", "--task.layers", "1", "--task.block", "32"]


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
    """Return the summed cross-entropy of the next words."""
    length = words.shape[1] - 1
    mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
    hidden = parts["body"](parts["table"](words[:, :-1]), mask=mask)  # type: ignore[index]
    logits = hidden @ parts["table"].weight.T  # type: ignore[index,union-attr]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), words[:, 1:].flatten(), reduction="sum"
    )


def steps(
    rank: int, ranks: int, port: int, half: bool, device_name: str, out: str, count: int
) -> None:
    """Train, and write the hashes of each step."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device = torch.device(device_name)
    torch.manual_seed(0)
    parts = model().to(device)
    trained = list(parts.parameters())
    own = LEAVES // ranks
    optimizer = AdamW(trained, lr=1e-3, weight_decay=0.1)
    optimizer.elementwise = True
    tree = Tree(parts, trained, ranks=1, accumulate=own)
    bits = []
    for step in range(count):
        # Each leaf has its own words and its own dropout, on any number of ranks.
        for micro in range(own):
            leaf = rank * own + micro
            seeded = torch.Generator().manual_seed(step * LEAVES + leaf)
            words = torch.randint(0, WORDS, (GRAIN, LENGTH), generator=seeded).to(device)
            reseed(device, 0, step, leaf)
            with tree:
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    mean = loss(parts, words) / (LEAVES * GRAIN * (LENGTH - 1))
                mean.backward()

        # The sums of the ranks meet in the same tree, in host memory.
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


def several(ranks: int, half: bool, place: Place, count: int) -> list[list]:
    """Return the hashes of each step, trained by so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = place.folder / f"{ranks}-{half}.json"
    given = (ranks, port, half, str(place.device), str(out), count)
    processes.start_processes(steps, given, nprocs=ranks, start_method="spawn")
    return list(json.loads(out.read_text()))


def _leaves(place: Place, *, half: bool) -> Result:
    count = 3 if place.toy else STEPS
    one, two = (several(ranks, half, place, count) for ranks in (1, 2))
    for number, (a, b) in enumerate(zip(one, two), 1):
        assert a == b, f"they differ from step {number} on"
    says = f"1 x {LEAVES} against 2 x {LEAVES // 2} leaves: bit-identical over {count} steps"
    return Result(says, {"steps": len(one)})


@line("bits", seconds=30, numbers=["steps"])
def leaves_float32(place: Place) -> Result:
    return _leaves(place, half=False)


@line("bits", seconds=30, numbers=["steps"])
def leaves_bf16(place: Place) -> Result:
    return _leaves(place, half=True)


def environment() -> dict[str, str]:
    """Return the environment of a command: oneloop is imported from this checkout."""
    source = Path(__file__).resolve().parent.parent / "src"
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *sys.path])}


def typed(words: list[str], folder: Path, precision: str) -> None:
    """Run a command, without accelerate's launcher."""
    variables = {**environment(), "ACCELERATE_MIXED_PRECISION": precision}
    command = [sys.executable, "-m", "oneloop.train", *words, *QUICK, "--run.dir", str(folder)]
    subprocess.run(command, check=True, env=variables)


def cost(folder: Path) -> tuple[float, float]:
    """Return the milliseconds of a step, and the peak GiB."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [one for one in lines if "train/samples_per_second" in one][1:]
    size = (logged[1]["samples"] - logged[0]["samples"]) / 10
    times = [size / one["train/samples_per_second"] * 1e3 for one in logged]
    return statistics.median(times), max(one.get("memory/peak_gib", 0.0) for one in logged)


def _twice(place: Place, words: list[str], grain: int, duration: int, precision: str) -> Result:
    """Train a recipe twice with batch.grain, alternating with batch.micro."""
    duration = 40 if place.toy else duration
    words = [*words, "--duration", str(duration)]
    folders = [place.folder / f"run-{number}" for number in range(2)]
    costs: dict[str, list[tuple[float, float]]] = {"batch.micro": [], "batch.grain": []}
    for folder in folders:
        typed([*words, "--batch.grain", str(grain)], folder, precision)
        costs["batch.grain"].append(cost(folder))
        plain = folder.with_name(f"{folder.name}-plain")
        typed([*words, "--batch.micro", str(grain)], plain, precision)
        costs["batch.micro"].append(cost(plain))
    command = [sys.executable, "-m", "oneloop", "verify", "--same", *map(str, folders)]
    verified = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert verified.returncode == 0, verified.stdout + verified.stderr

    grains, micros = ([time for time, _ in costs[name]] for name in ("batch.grain", "batch.micro"))
    ratio = statistics.median(a / b for a, b in zip(grains, micros))
    rows = [
        {"key": name, "ms per step": time, "peak GiB": peak}
        for name, found in costs.items()
        for time, peak in found
    ]
    says = f"bit-identical over {duration} steps; a step takes {ratio:.2f} x that of batch.micro"
    return Result(says, {"steps": duration, "ratio_of_step": ratio}, {"cost": rows})


GPT = ["gpt", "--task.dropout", "0.1", "--eval.micro", "null"]
LLAMA = ["llama", "--eval.micro", "null"]


@line("bits", seconds=60, numbers=["steps", "ratio_of_step"])
def digits_bf16(place: Place) -> Result:
    return _twice(place, ["digits", "--task.dropout", "0.1"], 8, 100, "bf16")


@line("bits", seconds=75, numbers=["steps", "ratio_of_step"])
def gpt_bf16(place: Place) -> Result:
    return _twice(place, [*GPT, *(SMALL if place.toy else [])], 4, 60, "bf16")


@line("bits", seconds=60, numbers=["steps", "ratio_of_step"], gpus=1)
def digits_float32(place: Place) -> Result:
    return _twice(place, ["digits", "--task.dropout", "0.1"], 8, 100, "no")


@line("bits", seconds=75, numbers=["steps", "ratio_of_step"], gpus=1)
def gpt_float32(place: Place) -> Result:
    return _twice(place, GPT, 4, 60, "no")


@line("bits", seconds=90, numbers=["steps", "ratio_of_step"], gpus=1)
def llama_bf16(place: Place) -> Result:
    return _twice(place, LLAMA, 2, 60, "bf16")


@line("bits", seconds=90, numbers=["steps", "ratio_of_step"], gpus=1)
def llama_float32(place: Place) -> Result:
    return _twice(place, LLAMA, 2, 60, "no")
