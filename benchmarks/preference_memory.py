"""Peak memory of preference optimization: oneloop beside TRL's DPOTrainer with its reference.

    python benchmarks/preference_memory.py --rounds 3 --to benchmarks/DATE-preference-memory.md

Both train the same Llama (float32, AdamW, padded pairs of the packaged lessons) for some steps,
each in a new process. TRL runs twice: with its reference model in memory, and with
log-probabilities that it computes before training (precompute_ref_log_probs). A process writes its
largest resident size; the control is oneloop's loss simpo, which has no reference at all.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

WAYS = ("oneloop dpo", "oneloop simpo", "trl reference", "trl precomputed")
WIDTH, LAYERS, STEPS, BATCH, VOCABULARY = 768, 8, 4, 4, 4096


def shape(folder: Path) -> Path:
    """Save the model and its tokenizer, and the pairs as rows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from oneloop.tasks.language.tokens import chat_tokenizer
    from oneloop.tasks.packaged_rows import PackagedRows

    texts = []
    for row in PackagedRows("lessons", "train"):
        texts += [message["content"] for message in row["messages"]]
    tokenizer = chat_tokenizer(texts, 512)
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with (folder / "pairs.jsonl").open("w") as file:
        for pair in PackagedRows("answer_pairs", "train")[:60]:
            file.write(json.dumps(pair) + "\n")
    return folder


def with_oneloop(folder: Path, loss: str) -> None:
    from oneloop.train import main

    words = {
        "task.data": folder / "pairs.jsonl",
        "task.model": folder / "model",
        "task.length": 128,
        "task.pack": "padded",
        "task.loss": loss,
        "task.store": folder / "store",
        "batch.size": BATCH,
        "duration": STEPS,
        "optimizer.lr": 1e-6,
        "eval.every": 0,
        "track": "none",
        "machine.workers": 0,
        "run.dir": folder / f"run-{os.getpid()}",
    }
    if loss == "simpo":
        del words["task.store"]
    (folder / "recipe.yaml").write_text("task: preference\n")
    argv = [str(folder / "recipe.yaml")]
    for key, value in words.items():
        argv += [f"--{key}", str(value)]
    try:
        main(argv)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"exit code {end.code}") from end


def with_trl(folder: Path, *, precomputed: bool) -> None:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = DPOConfig(
        output_dir=str(folder / f"trl-{os.getpid()}"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-6,
        max_length=128,
        precompute_ref_log_probs=precomputed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model,
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.train()


def one(way: str, folder: Path) -> None:
    kind, what = way.split()
    if kind == "oneloop":
        import atexit

        # main() ends the process.
        atexit.register(report)
        with_oneloop(folder, what)
    else:
        with_trl(folder, precomputed=what == "precomputed")
        report()


def report() -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(os.environ["PEAK"]).write_text(str(peak))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--to", type=Path)
    options.add_argument("--one", nargs=2)
    given = options.parse_args()
    if given.one:
        one(given.one[0], Path(given.one[1]))
        return
    folder = shape(Path(tempfile.mkdtemp()))
    weights = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
    peaks: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way in WAYS:
            peak = folder / "peak"
            words = [sys.executable, __file__, "--one", way, str(folder)]
            variables = {**os.environ, "PEAK": str(peak), "ONELOOP_CACHE": str(folder / "cache")}
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run(words, env=variables, check=True, **quiet)
            peaks[way].append(float(peak.read_text()) / 1e9)
            peak.unlink()
    about = (
        f"`python benchmarks/preference_memory.py --rounds {given.rounds}`; {platform.machine()}, "
        f"{os.cpu_count()} cores, torch {version('torch')}, trl {version('trl')}, transformers "
        f"{version('transformers')}. A Llama of {weights / 4e6:.0f} M parameters in float32 "
        f"({weights / 1e9:.2f} GB), AdamW, {BATCH} pairs per step, {STEPS} steps, one process on "
        "the CPU. Largest resident size of the process (GB): median (smallest to largest)."
    )
    lines = [
        f"# {date.today()}: peak memory of preference optimization",
        "",
        about,
        "",
        "| way | GB |",
        "|---|---|",
    ]
    for way, found in peaks.items():
        middle = statistics.median(found)
        lines.append(f"| {way} | {middle:.2f} ({min(found):.2f} to {max(found):.2f}) |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.to:
        given.to.write_text(text)


if __name__ == "__main__":
    main()
