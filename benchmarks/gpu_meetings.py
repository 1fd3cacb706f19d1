"""More lines of part check of ``gpu_day.py``: what only a GPU shows where two features meet.

PYTHONPATH=src python benchmarks/gpu_day.py --part check --only packed_rows_compiled
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_check import DETERMINISTIC, SMALL, SMALL_LLAMA, hashed, resumed, texts, trained
from gpu_lines import Place, Result, line
from oneloop.measure.flops import data_sheet, measured_peak
from oneloop.tasks.retrieval_metrics import Retrieval
from same_bits_gpu import environment

SETTINGS = """
import os, sys, torch
from oneloop.launch.processes import start
run = start()
tensor = torch.ones(1, device=run.device)
segments = torch.cuda.memory_snapshot()
grows = all(segment.get("is_expandable", False) for segment in segments)
print(f"found {int(grows)} {len(os.sched_getaffinity(0))} {os.cpu_count()}")
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _torchrun(processes: int, words: list[str], **variables: str) -> subprocess.CompletedProcess:
    """Start oneloop on several processes as torchrun does, without oneloop's launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_port", str(_free_port()), "-m", "oneloop.train", *words]
    common = ["--track", "none", "--watch.output", "quiet", "--eval.every", "0"]
    given: dict[str, Any] = {"env": {**environment(), **variables}, "text": True}
    return subprocess.run([*command, *common], capture_output=True, timeout=280, **given)


@line("check", seconds=30, numbers=["graphs", "steps"], gpus=1)
def packed_rows_compiled(place: Place) -> Result:
    """Compiled blocks, and blocks that recompute, train on packed rows in bf16."""
    from torch._dynamo.utils import counters

    task = {**SMALL_LLAMA, "tokenizer": "bytes", "data": texts(place.folder)}
    for name, machine in (
        ("compiled", {"compile": "regional"}),
        ("selective", {"recompute": "selective"}),
    ):
        counters.clear()
        run = place.folder / name
        trained(
            run,
            "llama",
            steps=3,
            precision="bf16",
            task=task,
            batch={"size": 4},
            machine=machine,
        )
        if name == "compiled":
            graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 4, f"{graphs} graphs"
    return Result(f"both train; {graphs} graphs", {"graphs": graphs, "steps": 3})


@line("check", seconds=15, numbers=["steps"], gpus=1)
def fp16_resume(place: Place) -> Result:
    """A run in fp16 that resumes at step 8 of 12 ends bit-identical, with its loss scale."""
    return resumed(place, precision="fp16")


@line("check", seconds=40, numbers=["runs"], gpus=1)
def offload_with_compile(place: Place) -> Result:
    """Inputs of compiled blocks in pinned host memory: the loss is that without."""
    task = {**SMALL, "dropout": 0.0, "data": texts(place.folder)}
    hashes = []
    for offload in (False, True):
        machine = {**DETERMINISTIC, "recompute": "full", "compile": "regional", "offload": offload}
        run = place.folder / str(offload)
        hashes.append(trained(run, "gpt", steps=3, task=task, machine=machine))
    same = "the same bits" if len(set(hashes)) == 1 else "other bits"
    return Result(f"trains with offload; {same} as without", {"runs": 2})


@line("check", seconds=20, numbers=["expandable", "cpus"], gpus=1)
def allocator_and_cpus(place: Place) -> Result:
    """The allocator's segments grow, and the process may use CPUs next to its GPU."""
    command = [sys.executable, "-c", SETTINGS]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
    (found,) = (text for text in out.stdout.splitlines() if text.startswith("found"))
    grows, cpus, all_cpus = map(int, found.split()[1:])
    assert grows, "the segments do not grow"
    numbers = {"expandable": float(grows), "cpus": float(cpus)}
    return Result(f"segments grow; {cpus} of {all_cpus} CPUs", numbers)


@line("check", seconds=30, numbers=["code"], gpus=1)
def processes_that_share_a_gpu(place: Place) -> Result:
    """One process more than there are GPUs ends with exit code 2 and one message."""
    processes = torch.cuda.device_count() + 1
    words = ["digits", "--duration", "2", "--run.dir", str(place.folder / "run")]
    ended = _torchrun(processes, words)
    # torchrun has its own exit code; the message is oneloop's.
    assert "NCCL requires one GPU per process" in ended.stderr + ended.stdout, ended.stderr[-2000:]
    assert "Duplicate GPU" not in ended.stderr
    assert not (place.folder / "run").exists()
    return Result("rejected before the ranks connect", {"code": float(ended.returncode)})


@line("check", seconds=20, numbers=["tf32_tflops", "bf16_tflops"], gpus=1, alone=True)
def peaks_of_the_data_sheet(place: Place) -> Result:
    """Measured matrix products are slower than the data sheet's peak, but not by much."""
    torch.set_float32_matmul_precision("high")  # a line has a process of its own
    tf32 = measured_peak(place.device, torch.float32)
    bf16 = measured_peak(place.device, torch.bfloat16)
    numbers = {"tf32_tflops": tf32 / 1e12, "bf16_tflops": bf16 / 1e12}
    peaks = data_sheet(torch.cuda.get_device_name(place.device))
    if not peaks:
        return Result("this card is not known: MFU uses a measured peak", numbers)
    shares = [tf32 / peaks[torch.float32], bf16 / peaks[torch.bfloat16]]
    assert all(0.2 < share < 1.1 for share in shares), (shares, numbers)
    return Result(f"{shares[0]:.0%} of TF32, {shares[1]:.0%} of bf16", numbers)


@line("check", seconds=5, numbers=["recall"])
def grouped_retrieval_is_deterministic(place: Place) -> Result:
    ids = [torch.tensor(one, device=place.device) for one in ([3, 1, 3, 2], [5, 5, 4, 5])]
    vectors: Tensor = torch.eye(4, device=place.device)
    torch.use_deterministic_algorithms(True)
    try:
        metric = Retrieval(group=True).to(place.device)
        metric.update(vectors, vectors, ids=ids)
        found = {name: float(value) for name, value in metric.compute().items()}
    finally:
        torch.use_deterministic_algorithms(False)
    return Result(f"{found}", {"recall": next(iter(found.values()))})


@line("check", seconds=60, numbers=["runs"], gpus=2)
def muon_on_two_gpus(place: Place) -> Result:
    """Matrices that two processes divide get the bits of one process."""
    words = ["gpt", "--duration", "4", "--batch.grain", "4", "--batch.size", "8"]
    words += ["--optimizer.name", "muon", "--task.data", texts(place.folder)]
    hashes = []
    for processes in (1, 2):
        folder = place.folder / f"run-{processes}"
        ended = _torchrun(processes, [*words, "--run.dir", str(folder)])
        assert ended.returncode == 0, ended.stderr[-2000:]
        hashes.append(hashed(Path(folder) / "final" / "model.safetensors"))
    assert len(set(hashes)) == 1, "the weights differ"
    return Result("two processes and one: the same bits", {"runs": 2})


@line("check", seconds=120, numbers=["runs"], gpus=2)
def micro_batch_search_under_fsdp2(place: Place) -> Result:
    """``batch.micro auto`` ends with one size for both processes."""
    folder = place.folder / "run"
    words = ["gpt", "--duration", "2", "--batch.micro", "auto", "--run.dir", str(folder)]
    words += ["--task.data", texts(place.folder)]
    sharding = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    ended = _torchrun(2, words, XDG_CACHE_HOME=str(place.folder), **sharding)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return Result("ends", {"runs": 1})
