"""Part check of ``gpu_day.py``: what must hold on a GPU, in about five minutes.

    PYTHONPATH=src python benchmarks/gpu_day.py --part check

Each check trains a few steps of a packaged recipe, or runs one module, and returns what it found; a
check that does not hold raises an error. The numbers are recorded beside the sentences.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import same_bits_gpu
from gpu_lines import Place, Result, line
from gpu_trace import FORWARD, reduce
from oneloop import fit
from oneloop.checkpoint.background_save import BackgroundSaves
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.writing_process import WritingProcess
from oneloop.ema import EMA, EMASettings
from oneloop.optim.adamw import AdamW
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.image_classification import ImageClassification

QUIET: dict[str, Any] = {
    "watch": {"output": "quiet"},
    "eval": {"every": 0, "samples": 0},
    "track": [],
}
SMALL = {"layers": 2, "width": 64, "heads": 2, "block": 64, "dropout": 0.1}
SMALL_LLAMA = {
    "architecture": "llama",
    "layers": 2,
    "width": 128,
    "heads": 2,
    "block": 256,
    "pack": "packed",
}
DETERMINISTIC = {"deterministic": True}


def trained(
    folder: Path, recipe: Any = "digits", *, steps: int = 12, precision: str = "no", **groups: Any
) -> str:
    """Train, and return a hash of the final weights."""
    save = {"every": 0, **groups.pop("save", {})}
    run = {"dir": str(folder)}
    summary = fit(
        recipe,
        mixed_precision=precision,
        duration=steps,
        run=run,
        save=save,
        **{**QUIET, **groups},
    )
    assert summary["step"] == steps, summary
    return hashed(folder / "final" / "model.safetensors")


def hashed(file: Path) -> str:
    """Return the hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def texts(folder: Path) -> str:
    """Write a few short texts that are quick to read, and return their folder."""
    made = folder / "texts"
    if not made.exists():
        made.mkdir(parents=True)
        for file in Path(__file__).parent.glob("*.py"):
            (made / f"{file.stem}.txt").write_text(file.read_text())
    return str(made)


def loss_falls(folder: Path, precision: str, recipe: Any = "digits", **groups: Any) -> Result:
    """Train for 40 steps; the last loss is below the first."""
    groups.setdefault("optimizer", {"lr": 3e-3})
    trained(folder, recipe, steps=40, precision=precision, log={"every": 1}, **groups)
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [one["train/loss"] for one in lines if "train/loss" in one]
    assert losses[-1] < losses[0], losses
    numbers = {"first_loss": losses[0], "last_loss": losses[-1]}
    return Result(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}", numbers)


# What a user's first run needs, and the faults that reading the code has found.


@line("check", seconds=8, numbers=["last_loss"])
def bf16(place: Place) -> Result:
    return loss_falls(place.folder, "bf16")


@line("check", seconds=8, numbers=["last_loss"], gpus=1)
def fp16_with_its_scaler(place: Place) -> Result:
    return loss_falls(place.folder, "fp16", guard={"nonfinite": "skip"})


class HalfImages(ImageClassification):
    """Image classification with parameters in bfloat16."""

    def model(self) -> nn.Module:
        return super().model().bfloat16()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return super().loss(model, {**batch, "image": batch["image"].bfloat16()})


@line("check", seconds=8, numbers=["last_loss"])
def parameters_in_bfloat16(place: Place) -> Result:
    """The guard's kernel gets the norm of bfloat16 gradients."""
    return loss_falls(place.folder, "no", HalfImages)


@line("check", seconds=15, numbers=["logits_in_millions"], gpus=1)
def fp16_with_many_logits(place: Place) -> Result:
    """Above 134 million logits the loss is fused, which fp16 does not allow."""
    rows, vocabulary = 16, 131_072
    task = {**SMALL, "block": 128, "padded_vocab": vocabulary, "data": texts(place.folder)}
    trained(place.folder / "run", "gpt", steps=3, precision="fp16", task=task, batch={"size": rows})
    millions = rows * 128 * vocabulary / 1e6
    return Result(f"trains with {millions:,.0f} million logits", {"logits_in_millions": millions})


def deterministic(place: Place, recipe: str, **task: Any) -> Result:
    """Train twice with deterministic algorithms: the weights are bit-identical."""
    hashes = [
        trained(
            place.folder / f"run-{number}",
            recipe,
            steps=4,
            precision=place.precision,
            machine=DETERMINISTIC,
            task=task,
            batch={"size": 8},
        )
        for number in range(2)
    ]
    assert len(set(hashes)) == 1, "two runs differ"
    return Result("two runs are bit-identical", {"steps": 4})


@line("check", seconds=10, numbers=["steps"])
def deterministic_digits(place: Place) -> Result:
    return deterministic(place, "digits")


@line("check", seconds=12, numbers=["steps"])
def deterministic_gpt(place: Place) -> Result:
    return deterministic(place, "gpt", **SMALL, data=texts(place.folder))


@line("check", seconds=12, numbers=["steps"])
def deterministic_llama(place: Place) -> Result:
    task = {**SMALL_LLAMA, "tokenizer": "bytes", "vocab": 4096, "data": texts(place.folder)}
    del task["vocab"]
    return deterministic(place, "llama", **task)


@line("check", seconds=12, numbers=["steps"])
def deterministic_sft(place: Place) -> Result:
    return deterministic(place, "sft", layers=1, width=64)


@line("check", seconds=25, numbers=["steps"], packages=["datasets"])
def deterministic_snippets(place: Place) -> Result:
    return deterministic(place, "snippets")


@line("check", seconds=25, numbers=["steps"], packages=["datasets"])
def deterministic_docstrings(place: Place) -> Result:
    return deterministic(place, "docstrings")


@line("check", seconds=15, numbers=["calls", "layers"], gpus=1)
def attention_of_packed_rows(place: Place) -> Result:
    """Packed rows of a Llama in bf16 use the kernel for documents of different lengths."""
    from oneloop.tasks.language import attention

    called = []
    kernel = attention._of_different_lengths

    def counted(*given: Any) -> Tensor:
        called.append(1)
        return kernel(*given)

    attention._of_different_lengths = counted
    task = {**SMALL_LLAMA, "tokenizer": "bytes", "data": texts(place.folder)}
    trained(place.folder / "run", "llama", steps=3, precision="bf16", task=task, batch={"size": 4})
    found = f"the kernel was called {len(called)} times in 3 steps and the checks before them"
    assert len(called) >= 3 * 2, f"{found}: packed rows used a dense mask"
    return Result(found, {"calls": len(called), "layers": 2})


class Halting:
    """Lets a task raise an error wherever torch waits for the device between two of its losses."""

    first, last = 20, 220
    calls = 0

    def at_loss(self, model: nn.Module) -> None:
        if not model.training:
            return
        Halting.calls += 1
        if not torch.cuda.is_available():
            return
        if Halting.calls == self.first:
            torch.cuda.set_sync_debug_mode("error")
        if Halting.calls == self.last:
            torch.cuda.set_sync_debug_mode("default")


class WatchedImages(Halting, ImageClassification):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.at_loss(model)
        return super().loss(model, batch)


class WatchedText(Halting, CausalLM):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        self.at_loss(model)
        return super().loss(model, batch)


def _without_waits(place: Place, recipe: Any, says: str, **groups: Any) -> Result:
    trained(
        place.folder / "run",
        recipe,
        steps=240,
        log={"every": 1000},
        ema={"half_life": 500},
        **groups,
    )
    assert Halting.calls >= Halting.last
    return Result(says, {"steps": Halting.last - Halting.first})


@line("check", seconds=12, numbers=["steps"])
def no_host_wait_in_200_steps(place: Place) -> Result:
    return _without_waits(place, WatchedImages, "none, with EMA and clipping")


@line("check", seconds=12, numbers=["steps"], gpus=1)
def no_host_wait_in_fp16(place: Place) -> Result:
    """The loss scale falls and grows on the device."""
    return _without_waits(place, WatchedImages, "none in fp16", precision="fp16")


@line("check", seconds=20, numbers=["steps"])
def no_host_wait_with_packed_rows(place: Place) -> Result:
    task = {**SMALL_LLAMA, "tokenizer": "bytes", "data": texts(place.folder)}
    guard = {"nonfinite": "skip", "sigma": 6.0}
    says = "none in a packed Llama in bf16, with EMA, clipping and a window of spikes"
    return _without_waits(
        place,
        WatchedText,
        says,
        precision=place.precision,
        task=task,
        guard=guard,
        batch={"size": 4},
    )


class MarkedText(CausalLM):
    """Language modelling whose forward is marked in a trace."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.profiler.record_function(FORWARD):
            return super().loss(model, batch)


@line("check", seconds=15, numbers=["waits_per_step", "kernels_outside"])
def waits_and_kernels_in_a_trace(place: Place) -> Result:
    """Count the calls in which the host waits, and the kernels of clip, AdamW, guard and EMA."""
    folder = place.folder / "run"
    task = {**SMALL_LLAMA, "tokenizer": "bytes", "data": texts(place.folder)}
    steps = 10
    trained(
        folder,
        MarkedText,
        steps=60,
        precision=place.precision,
        task=task,
        batch={"size": 4},
        ema={"half_life": 500},
        log={"every": 50},
        watch={"output": "quiet", "profile": f"30-{29 + steps}"},
    )
    import gzip

    with gzip.open(folder / "profile" / "trace.json.gz") as file:
        reduced = reduce(json.load(file)["traceEvents"], steps=steps)
    says = f"{reduced.waits:.1f} waits and {reduced.kernels:.0f} kernels per step"
    numbers = {
        "waits_per_step": reduced.waits,
        "kernels": reduced.kernels,
        "kernels_outside": reduced.kernels_outside,
    }
    return Result(says, numbers, reduced.tables)


@line("check", seconds=15, numbers=["steps"])
def checkpoint_and_resume(place: Place) -> Result:
    """A run that resumes at step 8 of 12 ends bit-identical."""
    return resumed(place, task={"dropout": 0.1})


def resumed(place: Place, **groups: Any) -> Result:
    """Train 12 steps, delete what is newer than step 8, and train on."""
    groups |= {"save": {"every": 4, "keep": 9}, "machine": DETERMINISTIC}
    run = place.folder / "run"
    whole = trained(run, **groups)
    shutil.rmtree(run / "final")
    (run / "summary.json").unlink()
    for left in sorted((run / "checkpoints").iterdir())[2:]:
        shutil.rmtree(left)
    assert trained(run, **groups) == whole, "the weights differ"
    return Result("a run resumed at step 8 of 12 ends in the same bits", {"steps": 12})


@line("check", seconds=20, numbers=["saves"])
def saves_of_two_sizes_and_a_killed_writer(place: Place) -> Result:
    """The shared buffer grows, and is replaced when the writing process has died."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=place.toy, project_dir=str(place.folder))
    model = accelerator.prepare(nn.Linear(512, 512).to(place.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    checkpoints = Checkpoints(place.folder / "saved", accelerator)

    def saved(step: int) -> None:
        checkpoints.save(step, model, optimizer, {})
        problem = checkpoints.finish()
        assert problem is None, problem

    # Without optimizer state, then with it: the second save is three times as large.
    saved(1)
    model(torch.randn(4, 512, device=place.device)).sum().backward()
    optimizer.step()
    saved(2)

    # The writer dies: its buffer has the same size again, and the next save succeeds.
    process = checkpoints.start()._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    problem = checkpoints.save(3, model, optimizer, {}) or checkpoints.finish()
    saved(4)
    newest = checkpoints.newest()
    checkpoints.close()
    assert newest is not None and newest.name.endswith("4"), newest
    lost = "was lost, as it should be reported" if problem else "was written by a new one"
    return Result(f"the save after a killed writer {lost}; the next one is intact", {"saves": 4})


class Noise:
    """A task with dropout and BatchNorm, whose model has layers of this width."""

    def __init__(self, width: int = 32) -> None:
        self.width = width

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers.append(nn.Linear(self.width, self.width))
            layers.append(nn.BatchNorm1d(self.width))
            layers += [nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers)

    def train_set(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.TensorDataset(torch.randn(256, self.width, generator=generator))

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": self.train_set()}

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return {"x": torch.stack([one for (one,) in samples])}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return (model(batch["x"]) - batch["x"]).square().mean(1).sum(), {}


@line("check", seconds=60, numbers=["checkpoints", "overlapping"])
def save_while_training(place: Place) -> Result:
    """All checkpoints of a run whose copies overlap with training are those of one that waits."""
    chosen = BackgroundSaves._overlapping
    overlapping = 0

    def counted(self: BackgroundSaves, process: WritingProcess) -> Any:
        nonlocal overlapping
        device = chosen(self, process)
        overlapping += device is not None
        return device

    found = []
    for side in (lambda self, process: None, counted):
        BackgroundSaves._overlapping = side
        run = place.folder / "run"
        trained(
            run,
            Noise,
            steps=60,
            task={"width": 32 if place.toy else 2048},
            batch={"size": 64},
            ema={"half_life": 500},
            eval={"every": 7, "samples": 0},
            machine=DETERMINISTIC,
            save={"every": 3, "keep": 99, "best": False},
        )
        files = sorted(run.glob("checkpoints/step-*/*.safetensors"))
        found.append({file.parent.name: hashed(file) for file in files})
        shutil.rmtree(run)
    BackgroundSaves._overlapping = chosen
    assert len(found[0]) >= 20, found
    assert found[0] == found[1], "the checkpoints differ"
    assert place.toy or overlapping >= 20, overlapping
    says = f"{len(found[0])} checkpoints are bit-identical, {overlapping} copies overlapped"
    return Result(says, {"checkpoints": len(found[0]), "overlapping": overlapping})


@line("check", seconds=40, numbers=["runs"])
def ema_in_host_memory(place: Place) -> Result:
    """EMA weights in host memory are those of a run in which every launch waits, with and without
    batch.grain."""
    words = ["digits", "--duration", "30", "--ema.half_life", "200", "--ema.device", "cpu"]
    words += ["--machine.deterministic", "true", "--save.every", "0", "--eval.every", "0"]
    words += ["--track", "none", "--watch.output", "quiet"]
    for grain in ([], ["--batch.grain", "8"]):
        hashes = []
        for blocking in ("0", "1"):
            folder = place.folder / f"run-{len(grain)}-{blocking}"
            command = [sys.executable, "-m", "oneloop.train", *words, *grain]
            variables = {**same_bits_gpu.environment(), "CUDA_LAUNCH_BLOCKING": blocking}
            subprocess.run([*command, "--run.dir", str(folder)], check=True, env=variables)
            hashes.append(hashed(folder / "final" / "ema.safetensors"))
        title = "with batch.grain" if grain else "without batch.grain"
        assert len(set(hashes)) == 1, f"{title}, the EMA weights differ"
    return Result("bit-identical to runs in which every launch waits", {"runs": 4})


@line("check", seconds=60, numbers=["graphs"], gpus=1)
def compile_regional_with_layer_types(place: Place) -> Result:
    """Twelve blocks of a Qwen3 share one compilation."""
    import transformers
    from torch._dynamo.utils import counters

    from oneloop.machine.compile import compile_
    from oneloop.tasks.language.attention import attend_within_documents, causal

    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
    )
    model = transformers.Qwen3ForCausalLM(config).to(place.device)
    attend_within_documents(model)
    compile_(model, "regional")
    counters.clear()
    tokens = torch.randint(0, 256, (2, 128), device=place.device)
    mask = causal(place.device)
    model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.sum().backward()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs <= 2, f"{graphs} graphs"
    return Result(f"{graphs} graphs for 12 blocks", {"graphs": graphs})


@line("check", seconds=30, numbers=["steps"], gpus=1)
def compile_regional(place: Place) -> Result:
    kinds = ("none", "regional")
    task = {**SMALL, "data": texts(place.folder)}
    runs = [
        trained(place.folder / kind, "gpt", steps=4, task=task, machine={"compile": kind})
        for kind in kinds
    ]
    same = "the same bits as without" if runs[0] == runs[1] else "other rounding than without"
    return Result(f"trains; {same}", {"steps": 4})


@line("check", seconds=20, numbers=["largest_difference"])
def rerun_without_determinism(place: Place) -> Result:
    """Two runs of a model with attention: how far apart are they?"""
    from safetensors.torch import load_file

    task = {**SMALL, "dropout": 0.0, "data": texts(place.folder)}
    weights = []
    for number in range(2):
        folder = place.folder / f"run-{number}"
        trained(folder, "gpt", steps=40, precision=place.precision, task=task)
        weights.append(load_file(folder / "final" / "model.safetensors"))
    apart = max(
        float((one - weights[1][name]).abs().max() / one.abs().max().clamp(min=1e-12))
        for name, one in weights[0].items()
    )
    says = "bit-identical" if apart == 0 else f"at most {apart:.1e} of the largest weight apart"
    return Result(f"{says} after 40 steps", {"largest_difference": apart})


@line("check", seconds=12, numbers=["runs"])
def pinned_copies(place: Place) -> Result:
    hashes = [
        trained(place.folder / str(pinned), machine={"pinned": pinned, "deterministic": True})
        for pinned in (True, False)
    ]
    assert len(set(hashes)) == 1, "the weights differ"
    return Result("pinned or not: the same bits", {"runs": 2})


@line("check", seconds=10, numbers=["values", "gradients"], gpus=1)
def attention_of_different_lengths(place: Place) -> Result:
    """torch's kernel for documents beside SDPA with a mask in float32."""
    from oneloop.tasks.language.attention import _of_different_lengths

    device = place.device
    torch.manual_seed(0)
    cuts = torch.tensor([0, 100, 130, 256, 400, 512], dtype=torch.int32, device=device)
    query, key, value = (
        torch.randn(2, 4, 256, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    made = _of_different_lengths(query, key, value, cuts, None, None).transpose(1, 2)
    document = torch.bucketize(torch.arange(512, device=device), cuts, right=True).view(2, 1, 256)
    before = torch.ones(256, 256, device=device).tril().bool()
    mask = (document[..., None] == document[..., None, :]) & before
    expected = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), attn_mask=mask
    )
    own, reference = (
        torch.autograd.grad(one.float().square().sum(), (query, key, value))
        for one in (made, expected)
    )
    gradients = max(float((a.float() - b.float()).abs().max()) for a, b in zip(own, reference))
    values = float((made.float() - expected).abs().max())
    assert values < 0.03 and gradients < 0.2, (values, gradients)
    says = f"values within {values:.1e}, gradients within {gradients:.1e} of SDPA in float32"
    return Result(says, {"values": values, "gradients": gradients})


@line("check", seconds=5, numbers=["gradients"])
def chunked_loss(place: Place) -> Result:
    from oneloop.tasks.language.chunked_loss import chunked_cross_entropy

    torch.manual_seed(0)
    kind = {"device": place.device, "dtype": torch.float64, "requires_grad": True}
    hidden = torch.randn(200, 32, **kind)
    weight = torch.randn(500, 32, **kind)
    target = torch.randint(0, 500, (200,), device=place.device)
    whole = F.cross_entropy(hidden @ weight.T, target, reduction="sum")
    parts = chunked_cross_entropy(hidden, weight, target, entries=4_000).total
    expected, made = (torch.autograd.grad(each, (hidden, weight)) for each in (whole, parts))
    apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, made))
    assert apart < 1e-5, apart
    return Result(f"gradients within {apart:.1e} of the whole logits", {"gradients": apart})


@line("check", seconds=25, numbers=["modes"])
def activation_checkpointing(place: Place) -> Result:
    modes = ("none", "full") if place.toy else ("none", "full", "every:2", "selective")
    task = {**SMALL, "data": texts(place.folder)}
    hashes = {
        mode: trained(
            place.folder / mode.replace(":", "-"),
            "gpt",
            steps=3,
            task=task,
            machine={"recompute": mode, "deterministic": True},
        )
        for mode in modes
    }
    assert len(set(hashes.values())) == 1, hashes
    return Result(f"{', '.join(modes)}: the same bits", {"modes": len(modes)})


@line("check", seconds=5, numbers=["steps"])
def fused_adamw(place: Place) -> Result:
    models = []
    for kind in (AdamW, partial(torch.optim.AdamW, fused=True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(place.device)
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
        for _ in range(10):
            model(torch.randn(16, 64).to(place.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    pairs = zip(*(model.parameters() for model in models))
    assert all(torch.equal(a, b) for a, b in pairs), "the weights differ"
    return Result("the same bits as torch's", {"steps": 10})


@line("check", seconds=5, numbers=["difference"])
def ema_weights(place: Place) -> Result:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(place.device)
    ema = EMA(model, EMASettings(decay=0.9))
    expected = model.weight.detach().double()
    for _ in range(30):
        with torch.no_grad():
            model.weight.add_(torch.randn(64, 64).to(place.device))
        ema.update(1)
        expected = 0.9 * expected + 0.1 * model.weight.detach().double()
    with ema.swapped():
        apart = float((model.weight.detach().double() - expected).abs().max())
    assert apart < 1e-5, apart
    return Result(f"within {apart:.1e} of the rule in float64", {"difference": apart})


@line("check", seconds=30, numbers=["steps"], gpus=1, packages=["bitsandbytes", "peft"])
def lora_in_four_bits(place: Place) -> Result:
    from adapters import a_base

    base = a_base(place.folder / "base", dtype=torch.bfloat16)
    task = {"model": str(base), "length": 128, "lora": {"rank": 4, "quantize": "nf4"}}
    run = {"dir": str(place.folder / "run")}
    summary = fit("sft", mixed_precision="bf16", duration=4, task=task, run=run, **QUIET)
    assert summary["step"] == 4
    return Result("trains", {"steps": 4})


def on_one_device(rank: int, port: int, sharded: bool, device: str, out: str) -> None:
    """Compare one step of SGD, by two ranks, with the whole batch. Under DDP they share a GPU."""
    backend = "gloo"
    if sharded:
        backend = "nccl"
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    x = torch.randn(8, 16).to(device)
    expected = torch.autograd.grad(model(x).square().mean(), model[0].weight)[0]
    if sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh(torch.device(device).type, (2,))
        made: nn.Module = fully_shard(model, mesh=mesh)
    else:
        made = nn.parallel.DistributedDataParallel(model)
    made(x.chunk(2)[rank]).square().mean().backward()
    gradient: Any = model[0].weight.grad
    gradient = gradient.full_tensor() if sharded else gradient
    if rank == 0:
        Path(out).write_text(f"{float((gradient - expected).abs().max()):.3e}")
    dist.destroy_process_group()


def two_processes(place: Place, *, sharded: bool) -> Result:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = place.folder / "difference"
    given = (port, sharded, str(place.device), str(out))
    torch.multiprocessing.start_processes(on_one_device, given, nprocs=2, start_method="spawn")
    apart = float(out.read_text())
    assert apart < 1e-6, apart
    return Result(f"gradients within {apart:.1e} of the whole batch", {"gradients": apart})


@line("check", seconds=20, numbers=["gradients"])
def two_processes_ddp(place: Place) -> Result:
    return two_processes(place, sharded=False)


@line("check", seconds=20, numbers=["gradients"], gpus=2)
def two_processes_fsdp2(place: Place) -> Result:
    """gloo has no reduce-scatter on CUDA (torch 2.11 crashes), so each process needs a GPU."""
    return two_processes(place, sharded=True)


@line("check", seconds=10, numbers=["bytes"], gpus=1)
def memory_snapshot(place: Place) -> Result:
    folder = place.folder / "run"
    trained(folder, steps=4, watch={"output": "quiet", "memory": "2-3"})
    size = (folder / "profile" / "memory.pickle").stat().st_size
    return Result(f"{size:,} bytes", {"bytes": size})
