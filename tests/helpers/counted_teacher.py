"""Conversations, a teacher, and the task ``distil``, whose forwards of the teacher and copies of it
in memory are counted in files."""

from __future__ import annotations

import os
import random
import weakref
from pathlib import Path
from typing import Any

import torch
import transformers

from adapters import a_base
from counted_pairs import BAD, GOOD, LAYOUTS, write
from oneloop.tasks.distil import Distil
from worlds import apply, here, run


class Counted(Distil):
    """Each process lists the documents of the pass in the folder $TEACHER_LOG, each teacher that it
    loads, and how many of them are in memory at each loss."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._built: list[weakref.ref[Any]] = []
        build = self.frozen.build

        def built() -> Any:
            assert build is not None
            model = build()
            _log("built", [type(model).__name__])
            # Parts of it must not be kept, either.
            self._built += [weakref.ref(one) for one in model.modules()]
            return model

        self.frozen.build = built

    def _documents(self, name: str, documents: Any) -> Any:
        _log("pass", [f"{name} {document}" for document in documents])
        return super()._documents(name, documents)

    def loss(self, model: Any, batch: Any) -> Any:
        alive = sum(one() is not None for one in self._built)
        _log("memory", [f"{alive}"])
        return super().loss(model, batch)


def _log(name: str, lines: list[str]) -> None:
    folder = os.environ.get("TEACHER_LOG")
    if folder:
        with Path(folder, f"{name}-{os.getpid()}").open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


def listed(folder: Path, name: str) -> list[str]:
    """Return what the processes of a run have listed, and forget it."""
    found = []
    for file in (folder / "log").glob(f"{name}-*"):
        found += file.read_text().splitlines()
        file.unlink()
    return found


def chats(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return conversations of one or two answers, of different lengths."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        messages = []
        for _ in range(draw.choice([1, 1, 2])):
            question = " ".join(draw.choices(GOOD + BAD, k=draw.randint(1, 3)))
            answer = " ".join(draw.choices(GOOD + BAD, k=draw.randint(1, 5)))
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        made.append({"messages": messages})
    return made


def a_teacher(folder: Path, *, seed: int = 1, **sizes: Any) -> Path:
    """Save a small Llama whose distributions are far from uniform."""
    a_base(folder, seed=seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.update(sizes)
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 20
    model.save_pretrained(folder)
    return folder


def lay(folder: Path) -> Path:
    """Write the data and the teacher."""
    a_teacher(folder / "teacher")
    (folder / "data").mkdir()
    for name, count, seed in (("train", 60, 0), ("validation", 9, 1)):
        write(folder / "data" / f"{name}.jsonl", chats(count, seed=seed))
    write(folder / "new.jsonl", chats(7, seed=2))
    return folder


def words(base: Path, *more: str) -> list[str]:
    """Return the words of a run with a student from scratch, in float64."""
    return [
        "recipe.yaml",
        *("--task.teacher", str(base / "teacher")),
        *("--task.data", str(base / "data")),
        *("--task.store", "store"),
        *("--task.length", "96"),
        *("--task.layers", "1"),
        *("--task.width", "32"),
        *("--batch.size", "4"),
        *("--duration", "20"),
        *("--optimizer.name", "sgd"),
        *("--optimizer.lr", "0.1"),
        *("--optimizer.clip", "0"),
        *("--optimizer.weight_decay", "0"),
        *("--schedule.name", "constant"),
        *("--schedule.warmup", "0"),
        *("--log.every", "1"),
        *("--eval.every", "0"),
        *("--save.every", "10"),
        *("--track", "none"),
        *("--machine.workers", "0"),
        *("--machine.dtype", "float64"),
        *("--run.dir", "run"),
        *more,
    ]


def trained(folder: Path, given: list[str], layout: str = "single") -> Any:
    """Run these words in a folder, which counts the forwards."""
    (folder / "recipe.yaml").parent.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("task: counted_teacher.Counted\n")
    return _run(here, given, folder, layout)


def applied(folder: Path, layout: str, *given: str) -> Any:
    """Run ``oneloop evaluate`` or ``predict`` in a folder."""
    return _run(apply, [*given], folder, layout)


def _run(function: Any, given: list[str], folder: Path, layout: str) -> Any:
    (folder / "log").mkdir(exist_ok=True)
    variables = {"OMP_NUM_THREADS": "1", "TEACHER_LOG": str(folder / "log")}
    ranks = LAYOUTS[layout]
    return run(function, given, ranks=ranks, config=layout, folder=folder, variables=variables)
