"""A store of objects on this machine, a small task, and hosts that share no disk."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from worlds import _free_port, here, run

TASK = """
import os
import time
import torch
from torch import nn

class Small:
    def __init__(self, frozen: bool = False) -> None:
        self.seconds, self.frozen = float(os.environ.get("SLOW", 0)), frozen
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(256, 8, generator=generator)
        self.y = self.x.sin().sum(1, keepdim=True)

    def model(self):
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        if self.frozen:
            model[0].requires_grad_(False)
        return model

    def train_set(self):
        return list(zip(self.x[:192], self.y[:192]))

    def eval_sets(self):
        return {"validation": list(zip(self.x[192:], self.y[192:]))}

    def collate(self, samples):
        time.sleep(self.seconds)
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return ((model(batch["x"]) - batch["y"]) ** 2).sum(), {}
"""
WORDS = "small.py:Small --batch.size 32 --duration 60 --save.every 5 --eval.every 20 --log.every 5 --track none"
WORDS += " --optimizer.name adamw --optimizer.lr 0.01 --ema.half_life 256 --watch.quiet true"
KEYS = {"AWS_ACCESS_KEY_ID": "not-a-secret-id", "AWS_SECRET_ACCESS_KEY": "SeCrEt-KeY", "AWS_DEFAULT_REGION": "us-east-1"}
LEASE = {"ONELOOP_LEASE": "2"}  # seconds


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Start moto's server; yield the variables with which it is reached."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
    try:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None and time.monotonic() < until, "moto's server did not start"
            time.sleep(0.1)
        yield KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait()


def lay(folder: Path) -> Path:
    """Write the task into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.py").write_text(TASK)
    return folder


def on_hosts(words: Sequence[str], kill: float = 0.0) -> None:
    """Train this rank on a host that shares no disk with the others; after ``kill`` seconds, that host is gone."""
    rank = os.environ.get("RANK", "0")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if "RANK" in os.environ else {}
    os.chdir(lay(Path(f"host-{rank}")))
    if kill:
        killer = subprocess.Popen([sys.executable, "-S", "-c", f"import os,time;time.sleep({kill});os.kill({os.getpid()},9)"])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        assert killer.pid
    here([*words])


def trained(folder: Path, *more: str, ranks: int = 1, config: str = "", kill: float = 0.0, variables=None, hosts=False):
    """Run the small task in a folder; ``hosts``: each rank on its own host."""
    lay(folder)
    words = [*WORDS.split(), *more]
    config = config or ("single" if ranks == 1 else "ddp")
    how = {"ranks": ranks, "config": config, "folder": folder, "variables": LEASE | (variables or {})}
    return run(on_hosts, words, kill, **how) if hosts or kill else run(here, words, **how)
