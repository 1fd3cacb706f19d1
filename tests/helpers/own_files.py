"""User data files, as tests write them; and a task over rows that records the rows it got, and its
memory."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor, nn

from oneloop.tasks.rows.open_data import named_sources, opened, sets_of
from silent_cases import unfinished
from worlds import run, train

WORDS = ("alpha", "beta", "gamma")


def rows(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Return rows: a text that begins with its class, the label, the class number, and tokens with
    tags."""
    made = []
    for number in range(first, first + count):
        word = WORDS[number % 3]
        made.append(
            {
                "text": f"{word} {number}",
                "label": word,
                "number": float(number % 3),
                "tokens": [word, str(number), "end"],
                "tags": ["NAME", "COUNT", "O"],
            }
        )
    return made


def write(folder: Path, kind: str, made: list[dict[str, Any]], *, files: int = 3) -> Path:
    """Write the rows as files of one kind, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        each = -(-len(made) // files)
        part, name = made[number * each : (number + 1) * each], folder / f"part-{number}"
        if kind == "parquet":
            options = {"row_group_size": 16, "compression": "none", "use_dictionary": False}
            parquet.write_table(pa.Table.from_pylist(part), name.with_suffix(".parquet"), **options)
        elif kind == "jsonl":
            name.with_suffix(".jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
        elif kind == "csv":
            lines = [f'"{row["text"]}",{row["label"]},{row["number"]}\n' for row in part]
            name.with_suffix(".csv").write_text("text,label,number\n" + "".join(lines))
        elif kind == "text":
            for row in part:
                (folder / f"{row['text'].replace(' ', '-')}.txt").write_text(row["text"] * 20)
    if kind == "arrow":
        from datasets import Dataset

        Dataset.from_list(made).save_to_disk(folder)
    return folder


def images(folder: Path, kind: str, *, each: int = 30) -> Path:
    """Write images of three colours, as files in one folder per class or as Parquet rows."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw, made = np.random.default_rng(0), []
    for number in range(3 * each):
        pixels = draw.integers(0, 60, (8, 8, 3), dtype=np.uint8)
        pixels[..., number % 3] += 150
        file = folder / WORDS[number % 3] / f"{number:03d}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(file)
        made.append({"image": {"bytes": file.read_bytes(), "path": None}, "label": number % 3})
    if kind == "parquet":
        from datasets import ClassLabel, Dataset, Features
        from datasets import Image as Picture

        for file in folder.rglob("*.png"):
            file.unlink()
        kinds = Features({"image": Picture(), "label": ClassLabel(names=list(WORDS))})
        Dataset.from_list(made, features=kinds).to_parquet(
            folder / "pictures.parquet", batch_size=16
        )
    return folder


def bulk(
    folder: Path, *, megabytes: float, files: int, group: int = 100, letters: int = 950
) -> int:
    """Write Parquet files of numbered rows of about a kilobyte; return the number of rows."""
    folder.mkdir(parents=True)
    draw, total, each = np.random.default_rng(0), 0, int(megabytes * 1e6 / (letters + 50) / files)
    for number in range(files):
        noise = draw.integers(97, 123, (each, letters), dtype=np.uint8)
        texts = [noise[row].tobytes().decode() for row in range(each)]
        table = pa.table({"text": texts, "id": np.arange(total, total + each)})
        parquet.write_table(
            table,
            folder / f"part-{number:03d}.parquet",
            row_group_size=group,
            compression="none",
            use_dictionary=False,
        )
        total += each
    return total


# --- a task that records its rows
# -------------------------------------------------------------------------------------


def anonymous() -> float:
    """Return the MiB of memory of this process without mapped files."""
    import psutil

    return psutil.Process().memory_full_info().uss / 2**20


class Numbered:
    """Numbered rows and a tiny model; ids go to ``$OWN_FOLDER/ids-RANK-TIME``, and memory to
    ``memory-PID``.

    Args:
        data: parquet files with text and id.
        window: megabytes of the shuffle window.
        kill_at: micro-batches after which the process kills itself (0: never).
    """

    sample_weight = 1.0

    def __init__(self, data: str, window: int = 4, kill_at: int = 0) -> None:
        self.folder, self.kill_at, self.seen = Path(os.environ["OWN_FOLDER"]), kill_at, 0
        self.start = anonymous()
        threading.Thread(target=self._watch, daemon=True).start()
        [source] = named_sources(data, {"text": "text", "id": "id"})
        self.sets = sets_of(
            [opened(source, held_out=0.02, window=window)], lambda source: self.sample
        )
        self.ids = self.folder / f"ids-{os.environ.get('RANK', '0')}-{time.time()}"

    def _watch(self) -> None:
        most = 0.0
        while True:
            most = max(most, anonymous() - self.start)
            (self.folder / f"memory-{os.getpid()}").write_text(f"{most:.1f}")
            time.sleep(0.05)

    def sample(self, row: dict[str, Any]) -> tuple[Tensor, int]:
        self.seen += 1
        if self.seen % 200 == 0 and torch.utils.data.get_worker_info():
            (self.folder / f"memory-{os.getpid()}-{self.seen}").write_text(
                f"{anonymous() - self.start:.1f}"
            )
        return torch.tensor([ord(row["text"][0]) / 128, len(row["text"]) / 1000]), row["id"]

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_set(self) -> Any:
        return self.sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": self.sets["validation"]}

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        x, ids = zip(*samples, strict=True)
        return {"x": torch.stack(x), "id": torch.tensor(ids)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["id"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if torch.is_grad_enabled():
            with self.ids.open("a") as file:
                file.write(f"{' '.join(map(str, batch['id'].tolist()))}\n")
            if self.kill_at and len(self.ids.read_text().splitlines()) >= self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return (model(batch["x"])[:, 0] - batch["x"][:, 1]).square().sum(), {}


def steps_of(folder: Path, *, ranks: int, micro: int, batch: int) -> list[list[int]]:
    """Return the ids of each step of the last start, from the records of all ranks, without the
    preflight check."""
    steps: list[list[int]] = []
    for rank in range(ranks):
        newest = max(folder.glob(f"ids-{rank}-*"), key=lambda path: float(path.name.split("-")[2]))
        lines = [[*map(int, line.split())] for line in newest.read_text().splitlines()]
        real = [line for line in lines if len(line) == micro]
        accumulate = batch // (ranks * micro)
        for step in range(len(real) // accumulate):
            if len(steps) <= step:
                steps.append([])
            for line in real[step * accumulate : (step + 1) * accumulate]:
                steps[step] += line
    return [sorted(step) for step in steps if len(step) == batch]


def started(where: Path, words: list[str], data: Path) -> None:
    """Leave a run that was stopped after half of its steps."""
    run(train, [*words, "--task.data", str(data), "--run.dir", "run"], folder=where).ok()
    unfinished(where / "run")


def again(where: Path, words: list[str], data: Path):
    return run(train, [*words, "--task.data", str(data), "--run.dir", "run"], folder=where)
