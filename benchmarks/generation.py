"""Measure evaluations that generate: their time beside Seq2SeqTrainer's, and memory under FSDP2.

    python benchmarks/generation.py time --rounds 7
    python benchmarks/generation.py memory

``time`` trains the recipe `numbers` for 800 steps. Then it evaluates the 300 validation samples
(loss, texts, and metrics of texts) with oneloop and with transformers' Seq2SeqTrainer, in batches of
8, greedy and with four beams. Each round runs both in a new order, and oneloop twice (control).

``memory`` trains one step of a T5 that two processes shard by FSDP2, and then writes texts of 8
tokens. After each feed-forward layer it adds up the parameters that are whole.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

MEASURED_TASK = """
import json, os
from pathlib import Path
from torch.distributed.fsdp import FSDPModule
from oneloop.machine.fsdp2_units import unit_groups
from oneloop.tasks.seq2seq import Seq2Seq

class Measured(Seq2Seq):
    def generate(self, model, batch):
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [group for unit in units for group in unit_groups(unit)]
        found = []

        def measure(*_):
            whole = 0
            for group in groups:
                if group._sharded_state.name == "UNSHARDED":
                    whole += sum(one.unsharded_param.nbytes for one in group.fsdp_params)
            found.append(whole / 2**20)

        layers = [layer for layer in model.modules() if type(layer).__name__ == "T5LayerFF"]
        hooks = [layer.register_forward_hook(measure) for layer in layers]
        made = super().generate(model, batch)
        for hook in hooks:
            hook.remove()
        total = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
        rank = os.environ.get("RANK", "0")
        with Path(f"memory-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([total, max(found), len(found)]) + "\\n")
        return made
"""


def oneloop(folder: Path, *words: str) -> None:
    """Run the command in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
    command = [sys.executable, "-m", "oneloop", *words]
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)


def evaluations(folder: Path, beams: int) -> dict[str, Callable[[], Any]]:
    """Return functions that evaluate the run of a folder, by who does it."""
    from accelerate import Accelerator

    from oneloop.evaluation import evaluate
    from oneloop.task_protocol.generated import Generation
    from oneloop.tasks.language.text_metrics import DEFAULT, text_metrics, update_texts
    from oneloop.tasks.seq2seq import Seq2Seq

    final = str(folder / "run" / "final")
    task = Seq2Seq(model=final, length=32, target_length=32, beams=beams)
    data = task.eval_sets()["validation"]
    model: Any = task.model()
    accelerator = Accelerator(cpu=True)

    def ours() -> dict[str, float]:
        found = evaluate(
            task, model, data, accelerator=accelerator, micro=8, generation=Generation(batch=8)
        )
        assert found is not None
        return found

    rows = []
    for index in range(len(data)):
        source, target = data[index]
        rows.append({"input_ids": source.tolist(), "labels": target.tolist()})

    def measured(predicted: Any) -> dict[str, float]:
        decode = task.tokenizer.batch_decode
        tokens, labels = ([[t if t >= 0 else 0 for t in row] for row in part] for part in predicted)
        metrics = text_metrics(DEFAULT)
        texts = decode(tokens, skip_special_tokens=True)
        update_texts(metrics, texts, decode(labels, skip_special_tokens=True))
        return {name: float(value) for name, value in metrics.compute().items()}

    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_eval_batch_size=8,
        predict_with_generate=True,
        generation_max_length=33,  # with the start token
        generation_num_beams=beams,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Seq2SeqTrainer(
        model,
        arguments,
        eval_dataset=rows,
        data_collator=transformers.DataCollatorForSeq2Seq(task.tokenizer, model=model),
        compute_metrics=measured,
    )
    return {"Seq2SeqTrainer": trainer.evaluate, "oneloop": ours, "oneloop again": ours}


def measure_time(rounds: int) -> None:
    """Print the seconds of an evaluation by each, and their ratio."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = ["numbers", "--duration", "800", "--run.dir", "run", "--eval.every", "0"]
        oneloop(folder, "launch", "--config_file", "single", *words)
        for beams in (1, 4):
            ways = evaluations(folder, beams)
            found: dict[str, list[float]] = {name: [] for name in ways}
            scores = {}
            for number in range(rounds + 1):
                names = list(ways)
                random.Random(number).shuffle(names)
                for name in names:
                    start = time.perf_counter()
                    scores[name] = ways[name]()
                    if number:  # the first round warms up
                        found[name].append(time.perf_counter() - start)
            for name, values in found.items():
                first = found["Seq2SeqTrainer"]
                ratios = [value / other for value, other in zip(values, first, strict=True)]
                score = scores[name].get("bleu", scores[name].get("eval_bleu"))
                print(
                    f"beams {beams}  {name:15} median {statistics.median(values):6.2f} s "
                    f"({min(values):.2f} to {max(values):.2f})  {statistics.median(ratios):.3f}x "
                    f"({min(ratios):.3f} to {max(ratios):.3f})  bleu {score:.6f}",
                    flush=True,
                )


def measure_memory() -> None:
    """Print the size of a model, and how much of it is whole at once while it generates."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "measured.py").write_text(MEASURED_TASK)
        words = ["numbers", "--task", "measured.py:Measured", "--duration", "1"]
        words += ["--task.width", "512", "--task.heads", "8", "--task.layers", "6"]
        words += ["--eval.generate", "8", "--eval.samples", "0", "--batch.size", "8"]
        words += ["--run.dir", "run", "--save.every", "0", "--machine.workers", "0"]
        oneloop(folder, "launch", "--config_file", "fsdp2", *words, "--task.answer", "8")
        for file in sorted(folder.glob("memory-*.jsonl")):
            total, most, forwards = json.loads(file.read_text().splitlines()[-1])
            print(
                f"{file.stem}: {total:.0f} MiB of parameters over two processes; at most {most:.0f} "
                f"MiB of them are whole at once, in {forwards:,} layers that ran",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("time", "memory"))
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print(f"# {date.today()}  python benchmarks/generation.py {' '.join(sys.argv[1:])}")
    print(
        f"# Python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {platform.machine()}, {os.cpu_count()} cores, 1 thread"
    )
    if given.what == "time":
        measure_time(given.rounds)
    else:
        measure_memory()


if __name__ == "__main__":
    main()
