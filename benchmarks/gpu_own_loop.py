"""More lines of part check of ``gpu_day.py``: oneloop's loader and parts in a loop of the user.

PYTHONPATH=src python benchmarks/gpu_day.py --part check --only loader_batches
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_check import hashed
from gpu_lines import Place, Result, line
from oneloop import Loader
from same_bits_gpu import environment

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "your-loop.md"
STEPS = 24


class Noise:
    """Samples of different lengths, with numbers from the global generator of torch.

    Args:
        longest: numbers of the longest sample.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return torch.randint(1 << 40, (self.longest * (index % 7 + 1) // 7,))


def nested(samples: list[Tensor]) -> dict[str, Any]:
    """Return a batch with tensors at several depths, and one that is no tensor."""
    longest = max(len(sample) for sample in samples)
    rows = torch.zeros(len(samples), longest, dtype=torch.int64)
    for row, sample in zip(rows, samples):
        row[: len(sample)] = sample
    return {"rows": rows, "more": [rows.flip(0), (rows[:, ::2].clone(), {"sum": rows.sum(1)})]}


def digest(batch: dict[str, Any]) -> Tensor:
    """Return one number of all tensors of a batch, without waiting for the device."""
    rows = batch["rows"]
    turned, (half, last) = batch["more"]
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for factor, tensor in enumerate((rows, turned, half, last["sum"]), start=1):
        places = torch.arange(1, tensor.numel() + 1, device=rows.device)
        total = total * 31 + factor * (tensor.flatten() % 8191 * places).sum()
    return total


@line("check", seconds=30, numbers=["batches"])
def loader_batches(place: Place) -> Result:
    """A Loader's batches are those of the host, while kernels queue up and memory is used again."""
    data = Noise(1_000 if place.toy else 200_000)
    common: dict[str, Any] = {"seed": 3, "micro": 4, "collate": nested, "rank": 0, "ranks": 1}
    found = {}
    for name, device, workers in (
        ("host", torch.device("cpu"), 0),
        ("device", place.device, 0),
        ("device with 2 workers", place.device, 2),
    ):
        loader = Loader(data, 16, device=device, workers=workers, **common)
        busy = torch.ones(64 if place.toy else 4096, 64 if place.toy else 4096, device=device)
        digests = []
        for group in loader:
            if loader.position == STEPS:
                break
            for batch in group:
                # The device still computes when the batch after this one arrives.
                if device.type != "cpu":
                    for _ in range(4):
                        busy = (busy @ busy).clamp_(-1, 1)
                digests.append(digest(batch))
                del batch
        found[name] = torch.stack(digests).tolist()
    for name, digests_of in found.items():
        assert digests_of == found["host"], f"the batches of {name} differ"
    return Result(f"{len(found['host'])} batches equal", {"batches": len(found["host"])})


def programs() -> dict[str, str]:
    """Return the programs of the page about own loops, by name."""
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


def _run(folder: Path, program: str, *launcher: str) -> str:
    """Run a program in a folder, on its device, and return its output."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(program)
    command = [sys.executable, *launcher, "program.py"]
    given: dict[str, Any] = {"cwd": folder, "env": environment(), "text": True, "timeout": 280}
    ended = subprocess.run(command, capture_output=True, **given)
    print(ended.stdout, ended.stderr)
    assert ended.returncode == 0, ended.stderr[-2_000:]
    return ended.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "1", "--standalone")


@line("check", seconds=60, numbers=["programs"])
def programs_of_own_loops(place: Place) -> Result:
    """loader.py resumes; DDP with NCCL, and transformers' Trainer find the line."""
    texts = programs()
    folder = place.folder
    assert "step 40:" in _run(folder / "loader", texts["loader.py"])
    assert "step 80:" in _run(folder / "loader", texts["loader.py"])
    assert "y = 2.00 x + 1.00" in _run(folder / "ddp", texts["ddp_loop.py"], *TORCHRUN)
    assert "y = 1.4" in _run(folder / "trainer", texts["trainer.py"])
    return Result("three loops end as on a CPU", {"programs": 3})


@line("check", seconds=120, numbers=["runs"])
def parts_of_own_loops(place: Place) -> Result:
    """parts.py and gan.py, resumed halfway or on a process group of one, end bit-identically."""
    texts = programs()
    saved = {}
    for name in ("parts.py", "gan.py"):
        text = texts[name]
        (steps,) = re.findall(r"^STEPS(?:, BATCH)? = (\d+)", text, re.M)
        half = re.sub(rf"^(STEPS.* = ){steps}", rf"\g<1>{int(steps) // 2}", text, flags=re.M)
        assert half != text
        stem = name.removesuffix(".py")
        whole, resumed, group = (place.folder / f"{stem}-{one}" for one in "abc")
        _run(whole, text)
        _run(resumed, half)
        _run(resumed, text)
        _run(group, text, *TORCHRUN)
        for folder in (whole, resumed, group):
            newest = max(folder.glob(f"*/step-{int(steps):08d}"))
            files = sorted(newest.glob("*.safetensors"))
            saved[folder.name] = [hashed(file) for file in files]
            assert files, newest
        assert saved[resumed.name] == saved[whole.name], f"{name}: a resume has other weights"
        assert saved[group.name] == saved[whole.name], f"{name}: a process group has other weights"
    return Result("resumes and a process group of one: the same bits", {"runs": 6})


@line("check", seconds=15, numbers=["skipped"], gpus=1)
def loader_in_fp16(place: Place) -> Result:
    """Steps that the loss scale skips are counted once, as all others."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16")
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = [(torch.tensor([x / 10]), torch.tensor([x / 5 + 1])) for x in range(100)]
    loader = Loader(data, 16, accelerator=accelerator, micro=4)
    skipped = 0
    for group in loader:
        if loader.position == 40:
            break
        for x, y in group:
            with accelerator.accumulate(model):
                # the first losses are too large for the loss scale of 65,536
                loss = 100 * (model(x) - y).float().square().sum()
                accelerator.backward(loss * loader.factor / group.total)
                optimizer.step()
                optimizer.zero_grad()
        skipped += optimizer.step_was_skipped
    assert skipped > 0, "no step was skipped"
    assert loader.state_dict()["position"] == 40
    return Result(f"{skipped} of 40 steps were skipped, and counted", {"skipped": skipped})
