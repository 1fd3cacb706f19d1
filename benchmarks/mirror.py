"""The time of a training step while a checkpoint is uploaded: ``python benchmarks/mirror.py``.

The trainer has core 0 alone; the writing process, a local S3 server and a proxy with latency and 10
MB/s share core 1. Each round times steps without an upload, during one, and without one again; the
last against the first is the control. Ratios are medians over the rounds. The run is void if the
control differs from 1 by more than 3 %. Needs two cores, s3fs and moto. With ``--rounds 2``, it
takes half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "helpers")]
RATE, LATENCIES, LIMIT, NOISE = 10e6, (0.05, 0.2), 1.05, 0.03


def trainer(folder: str, rounds: int) -> None:
    """Print the step times of each round as JSON: before, during and after an upload."""
    os.sched_setaffinity(0, {0})
    import torch
    from accelerate import Accelerator
    from torch import nn

    from oneloop.basics.bucket import Bucket
    from oneloop.checkpoint.checkpoints import Checkpoints
    from oneloop.checkpoint.lease import take

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(
        nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 1024), torch.randint(0, 10, (64,))
    checkpoints = Checkpoints(Path(folder) / "checkpoints", accelerator)
    mirrored: list[int] = []
    checkpoints._heard = lambda news: mirrored.append(0 if news.error else news.mirrored)
    address = f"s3://bucket/{Path(folder).name}"
    lease = take(
        Bucket(address),
        {"pid": os.getpid(), "host": "benchmark", "since": "now", "token": "benchmark"},
    )
    checkpoints.mirror(address, lease=(lease.number, lease.about), counts=False)
    assert checkpoints._process is not None
    os.sched_setaffinity(checkpoints._process._process.pid, {1})  # later threads inherit it

    def step() -> float:
        began = time.perf_counter()
        checkpoints.poll()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for _ in range(100):
        step()
    for number in range(1, rounds + 1):
        before = [step() for _ in range(150)]
        checkpoints.save(number, model, optimizer, {"step": number})
        checkpoints.finish()  # the local save; the upload goes on
        during: list[float] = []
        while number not in mirrored:
            during.append(step())
        after = [step() for _ in range(150)]
        print(json.dumps({"before": before, "during": during, "after": after}), flush=True)
    checkpoints.close()


def measured(latency: float, rounds: int) -> list[dict[str, list[float]]]:
    import stores

    with tempfile.TemporaryDirectory() as folder, stores.s3_server() as variables:
        proxy = stores.Proxy(variables["AWS_ENDPOINT_URL"])
        os.environ |= variables
        import fsspec

        fsspec.filesystem("s3", endpoint_url=variables["AWS_ENDPOINT_URL"]).mkdir("bucket")
        proxy.latency, proxy.rate = latency, RATE
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": proxy.address,
            "PYTHONPATH": str(ROOT / "src"),
        }
        command = [sys.executable, __file__, "--folder", folder, "--rounds", str(rounds)]
        output = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        return [json.loads(line) for line in output.splitlines()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--folder", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.folder:
        trainer(given.folder, given.rounds)
        sys.exit()
    import fsspec
    import s3fs
    import torch

    os.sched_setaffinity(0, {1})  # also the server, which is started from here
    versions = f"torch {torch.__version__}, s3fs {s3fs.__version__}, fsspec {fsspec.__version__}"
    print(f"{date.today()}  python benchmarks/mirror.py --rounds {given.rounds}")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{versions}"
    )
    print(
        "latency   steps during   upload   step alone   ratio (least, most)       control "
        "(least, most)     verdict"
    )
    for latency in LATENCIES:
        rounds = measured(latency, given.rounds)
        pairs = [
            (median(one["before"]), median(one["during"]), median(one["after"])) for one in rounds
        ]
        ratios = sorted(2 * during / (before + after) for before, during, after in pairs)
        controls = sorted(after / before for before, _, after in pairs)
        void, good = abs(median(controls) - 1) > NOISE, median(ratios) <= LIMIT
        verdict = "void: the control is above 3 %" if void else "holds" if good else "does not hold"
        number, seconds = (
            median(len(one["during"]) for one in rounds),
            median(sum(one["during"]) for one in rounds),
        )
        print(
            f"{1000 * latency:4.0f} ms {number:12.0f}   {seconds:8.2f} s "
            f"{1000 * median(pairs[0][:1]):9.2f} ms"
            f"   x {median(ratios):.3f} ({ratios[0]:.3f}, {ratios[-1]:.3f})"
            f"   x {median(controls):.3f} ({controls[0]:.3f}, {controls[-1]:.3f})   {verdict}"
        )


if __name__ == "__main__":
    main()
