"""Check in at most 4 minutes what must hold on a GPU: each check passes, fails, or is skipped with
a reason.

    PYTHONPATH=src python benchmarks/gpu_check.py [--toy] [--only NAME,NAME] [--to FILE.json]

`--toy` runs smaller checks on a CPU and skips those that need a GPU. The JSON file (by default
gpu_check.json) is written after each check, so an interrupted run keeps its results. The exit code
is 1 if a check fails. `same_bits_gpu.py` compares more recipes and measures the cost of
batch.grain.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import same_bits_gpu
from oneloop import fit
from oneloop.ema import EMA
from oneloop.optim.adamw import AdamW
from oneloop.tasks.image_classification import ImageClassification

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
TOY = "--toy" in sys.argv
GPU = torch.cuda.is_available() and not TOY
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
QUIET = {"watch": {"quiet": True}, "eval": {"every": 0, "samples": 0}, "track": []}
SMALL = {"layers": 2, "width": 64, "heads": 2, "block": 64, "dropout": 0.1}
CHECKS: dict[str, Callable[[Path], str]] = {}


class Skipped(Exception):
    """The check is not possible on this machine."""


def check(function: Callable[[Path], str]) -> Callable[[Path], str]:
    CHECKS[function.__name__] = function
    return function


def needs_gpu() -> None:
    if not GPU:
        raise Skipped("needs a GPU")


def trained(
    folder: Path, recipe: Any = "digits", *, steps: int = 12, precision: str = "no", **groups: Any
) -> str:
    """Train, and return a hash of the final weights."""
    save = {"every": 0, **groups.pop("save", {})}
    run = {"dir": str(folder)}
    summary = fit(
        recipe, mixed_precision=precision, duration=steps, run=run, save=save, **{**QUIET, **groups}
    )
    assert summary["step"] == steps, summary
    (weights,) = (folder / "final").glob("*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def texts(folder: Path) -> str:
    """Write a short text that is quick to read, and return its path."""
    (folder / "texts").mkdir()
    for file in Path(same_bits_gpu.__file__).parent.glob("*.py"):
        (folder / "texts" / f"{file.stem}.txt").write_text(file.read_text())
    return str(folder / "texts")


def loss_falls(folder: Path, precision: str, **groups: Any) -> str:
    trained(
        folder, steps=40, precision=precision, log={"every": 1}, optimizer={"lr": 3e-3}, **groups
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0], losses
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


@check
def bf16(folder: Path) -> str:
    return loss_falls(folder, "bf16")


@check
def fp16_with_its_scaler(folder: Path) -> str:
    needs_gpu()
    return loss_falls(folder, "fp16", guard={"nonfinite": "skip"})


@check
def compile_regional(folder: Path) -> str:
    needs_gpu()
    runs = [
        trained(folder / kind, "gpt", steps=4, task=SMALL, machine={"compile": kind})
        for kind in ("none", "regional")
    ]
    return "trains" + (
        "; the same bits as without" if runs[0] == runs[1] else "; other rounding than without"
    )


@check
def pinned_copies(folder: Path) -> str:
    needs_gpu()
    one, two = (
        trained(folder / str(pinned), machine={"pinned": pinned}) for pinned in (True, False)
    )
    assert one == two
    return "pinned or not: the same bits"


@check
def attention_of_different_lengths(folder: Path) -> str:
    needs_gpu()
    from oneloop.tasks.language.attention import _of_different_lengths

    torch.manual_seed(0)
    cuts = torch.tensor([0, 100, 130, 256, 400, 512], dtype=torch.int32, device=DEVICE)
    query, key, value = (
        torch.randn(2, 4, 256, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    made = _of_different_lengths(query, key, value, cuts, None, None).transpose(1, 2)
    document = torch.bucketize(torch.arange(512, device=DEVICE), cuts, right=True).view(2, 1, 256)
    mask = (document[..., None] == document[..., None, :]) & torch.ones(
        256, 256, device=DEVICE
    ).tril().bool()
    expected = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=mask
    )
    gradients = [
        torch.autograd.grad(each.float().square().sum(), (query, key, value))
        for each in (made, expected)
    ]
    apart = max(float((a.float() - b.float()).abs().max()) for a, b in zip(*gradients, strict=True))
    near = float((made.float() - expected).abs().max())
    assert near < 0.03 and apart < 0.2, (near, apart)
    return f"values within {near:.1e}, gradients within {apart:.1e} of SDPA in float32"


@check
def chunked_loss(folder: Path) -> str:
    from oneloop.tasks.language.chunked_loss import chunked_cross_entropy

    torch.manual_seed(0)
    hidden = torch.randn(200, 32, device=DEVICE, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(500, 32, device=DEVICE, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 500, (200,), device=DEVICE)
    whole = F.cross_entropy(hidden @ weight.T, target, reduction="sum")
    parts = chunked_cross_entropy(hidden, weight, target, entries=4_000).total
    expected, made = (torch.autograd.grad(each, (hidden, weight)) for each in (whole, parts))
    apart = max(
        float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, made, strict=True)
    )
    assert apart < 1e-5, apart
    return f"gradients within {apart:.1e} of the whole logits"


@check
def activation_checkpointing(folder: Path) -> str:
    modes = ("none", "full") if TOY else ("none", "full", "every:2", "selective")
    task = SMALL | {"data": texts(folder)}
    runs = {
        mode: trained(folder / mode, "gpt", steps=3, task=task, machine={"recompute": mode})
        for mode in modes
    }
    assert len(set(runs.values())) == 1, runs
    return f"{', '.join(modes)}: the same bits"


class Watched(ImageClassification):
    """A task in which any wait of the host for the device between two steps is an error."""

    calls = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training:
            type(self).calls += 1
            if type(self).calls in (20, 220):
                torch.cuda.set_sync_debug_mode("error" if type(self).calls == 20 else "default")
        return super().loss(model, batch)


@check
def no_host_wait_in_200_steps(folder: Path) -> str:
    needs_gpu()
    try:
        trained(
            folder,
            Watched,
            steps=240,
            log={"every": 1000},
            ema={"half_life": 500},
            machine={"gc_every": 0},
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert Watched.calls >= 220
    return "none, with EMA and clipping"


@check
def fused_adamw(folder: Path) -> str:
    models = []
    for kind in (AdamW, partial(torch.optim.AdamW, fused=True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(DEVICE)
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
        for _ in range(10):
            model(torch.randn(16, 64).to(DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert all(
        torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True)
    )
    return "the same bits as torch's"


@check
def ema_weights(folder: Path) -> str:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(DEVICE)
    ema, expected = EMA(model, decay=0.9), model.weight.detach().double()
    for _ in range(30):
        with torch.no_grad():
            model.weight.add_(torch.randn(64, 64).to(DEVICE))
        ema.update(1)
        expected = 0.9 * expected + 0.1 * model.weight.detach().double()
    with ema.swapped():
        apart = float((model.weight.detach().double() - expected).abs().max())
    assert apart < 1e-5, apart
    return f"within {apart:.1e} of the rule in float64"


@check
def lora_in_four_bits(folder: Path) -> str:
    needs_gpu()
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise Skipped(f"needs bitsandbytes: {error}") from error
    from test_lora import a_base

    base = a_base(folder / "base", dtype=torch.bfloat16)
    task = {"model": str(base), "length": 128, "lora": {"rank": 4, "quantize": "nf4"}}
    summary = fit(
        "sft",
        mixed_precision="bf16",
        duration=4,
        task=task,
        run={"dir": str(folder / "run")},
        **QUIET,
    )
    assert summary["step"] == 4
    return "trains"


@check
def checkpoint_and_resume(folder: Path) -> str:
    how = {"save": {"every": 4, "keep": 9}, "task": {"dropout": 0.1}}
    whole = trained(folder / "run", **how)
    run = folder / "run"
    for name in ("final", "checkpoints/step-00000012", "summary.json"):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).unlink(missing_ok=True) if not (run / name).is_dir() else None
    for left in sorted((run / "checkpoints").iterdir())[2:]:
        shutil.rmtree(left)
    assert trained(run, **how) == whole
    return "a run resumed at step 8 of 12 ends in the same bits"


def on_one_device(rank: int, port: int, sharded: bool, out: str) -> None:
    """Compare one step of SGD, by two ranks on one device, with the whole batch."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(DEVICE)
    x = torch.randn(8, 16).to(DEVICE)
    expected = torch.autograd.grad(model(x).square().mean(), model[0].weight)[0]
    try:
        if sharded:
            from torch.distributed.fsdp import fully_shard

            made: nn.Module = fully_shard(
                model, mesh=dist.device_mesh.init_device_mesh(DEVICE.type, (2,))
            )
        else:
            made = nn.parallel.DistributedDataParallel(model)
        made(x.chunk(2)[rank]).square().mean().backward()
        gradient = model[0].weight.grad
        gradient = gradient.full_tensor() if sharded else gradient
        result = f"{float((gradient - expected).abs().max()):.1e}"
    except RuntimeError as error:
        result = f"gloo: {str(error).splitlines()[0]}"
    if rank == 0:
        Path(out).write_text(result)
    dist.destroy_process_group()


def two_processes(folder: Path, *, sharded: bool) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / "said"
    torch.multiprocessing.start_processes(
        on_one_device, (port, sharded, str(out)), nprocs=2, start_method="spawn"
    )
    result = out.read_text()
    if result.startswith("gloo"):
        raise Skipped(result) if sharded else AssertionError(result)
    assert float(result) < 1e-6, result
    return f"gradients within {result} of the whole batch"


@check
def two_processes_ddp(folder: Path) -> str:
    return two_processes(folder, sharded=False)


@check
def two_processes_fsdp2(folder: Path) -> str:
    return two_processes(folder, sharded=True)


@check
def bit_identical_on_two_processes(folder: Path) -> str:
    kinds, steps = ("float32",) if TOY else ("float32", "bf16"), 3 if TOY else same_bits_gpu.STEPS
    for kind in kinds:
        one, two = (same_bits_gpu.several(ranks, kind == "bf16", folder, steps) for ranks in (1, 2))
        assert one == two, f"{kind}: they differ"
    return f"1 x 8 against 2 x 4 micro-batches, {' and '.join(kinds)}, {steps} steps"


@check
def memory_snapshot(folder: Path) -> str:
    needs_gpu()
    trained(folder, steps=4, watch={"quiet": True, "memory": "2-3"})
    return f"{(folder / 'memory.pickle').stat().st_size:,} bytes"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--toy", action="store_true")
    options.add_argument("--only", default=",".join(CHECKS))
    options.add_argument("--to", default="gpu_check.json", type=Path)
    given = options.parse_args()
    if not (GPU or TOY):
        sys.exit("there is no GPU; --toy runs what can be checked without one")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found: dict[str, dict[str, Any]] = {}
    for name in given.only.split(","):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as made:
            try:
                outcome = ("pass", CHECKS[name](Path(made)))
            except Skipped as reason:
                outcome = ("skipped", str(reason))
            except (Exception, SystemExit) as error:
                outcome = ("fail", f"{type(error).__name__}: {error}")
        found[name] = {
            "outcome": outcome[0],
            "says": outcome[1],
            "seconds": round(time.perf_counter() - began, 1),
        }
        about = {
            "device": torch.cuda.get_device_name() if GPU else "cpu",
            "torch": torch.__version__,
        }
        given.to.write_text(json.dumps({**about, "checks": found}, indent=1))
        print(f"{outcome[0]:8}{name:34}{found[name]['seconds']:6.1f} s  {outcome[1]}", flush=True)
    sys.exit(any(one["outcome"] == "fail" for one in found.values()))


if __name__ == "__main__":
    main()
