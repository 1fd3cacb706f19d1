"""Measure how much of a divergence remains if only the teacher's k most likely entries are stored.

    oneloop launch --config_file single llama --task.vocab 8192 --duration 200 \
        --run.dir runs/teacher
    oneloop launch --config_file single llama --task.vocab 8192 --task.layers 1 --task.width 64 \
        --duration 200 --run.dir runs/student
    python benchmarks/top_k_error.py runs/teacher/final runs/student/final [--tokens 16384]

Teacher and student predict the validation files of Python's standard library. All divergences are
means over tokens, in nats, of stored float32 records against all entries in float64. For a student
from scratch, see ``untrained``. The gradient is that with respect to the student's logits: its
cosine with the gradient of the whole divergence, over all tokens.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from datetime import date
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.language.divergences import divergence, merged
from oneloop.tasks.language.top_logits import record_of, records

KINDS = ("forward", "reverse", "js")
SIZES = (1, 4, 16, 64, 256, 0)  # 0: all entries


def batches(vocabulary: int, tokens: int) -> Iterator[Tensor]:
    """Return samples of the validation files, until they have this many tokens."""
    task = CausalLM(tokenizer="bpe", vocab=vocabulary, block=256)
    samples = task.eval_sets()["validation"]
    chosen = np.linspace(0, len(samples) - 1, max(1, tokens // 256)).astype(int)
    for start in range(0, len(chosen), 8):
        several = [samples[int(number)] for number in chosen[start : start + 8]]
        yield task.collate(several)["input"]


def merged_pair(teacher: Tensor, student: Tensor, k: int, temperature: float) -> list[Tensor]:
    """Return log-probabilities of both, by way of records."""
    stored = records(teacher, record_of(k, teacher.shape[-1]), temperature=temperature)
    entries = torch.from_numpy(stored["entry"].astype(np.int64))
    values = [torch.from_numpy(stored["logp"].copy())]
    if k < teacher.shape[-1]:
        values.append(torch.from_numpy(stored["tail"].copy())[:, None])
    of_teacher = torch.cat(values, -1).double()
    return [of_teacher, merged(student, entries, temperature=temperature)]


def with_gradient(pair: list[Tensor], student: Tensor, kind: Any) -> tuple[float, Tensor]:
    total = divergence(*pair, kind).sum()
    (gradient,) = torch.autograd.grad(total, student, retain_graph=True)
    return float(total.detach()), gradient


def measured(teacher: Any, student: Any, inputs: list[Tensor], temperature: float) -> None:
    """Print a table of one student and temperature."""
    sums = {(kind, k): np.zeros(4) for kind in KINDS for k in (None, *SIZES)}
    tail = dict.fromkeys(SIZES, 0.0)
    count = 0
    for batch in inputs:
        with torch.no_grad():
            of_teacher = teacher(input_ids=batch).logits.flatten(0, 1)
            of_student = student(input_ids=batch).logits.flatten(0, 1).double()
        of_student.requires_grad_()
        count += len(of_teacher)
        whole = [(one.double() / temperature).log_softmax(-1) for one in (of_teacher, of_student)]
        pairs = {}
        for k in SIZES:
            pairs[k] = merged_pair(of_teacher, of_student, k or of_teacher.shape[-1], temperature)
            if k:
                tail[k] += float(pairs[k][0][:, -1].exp().sum())
        for kind in KINDS:
            exact, expected = with_gradient(whole, of_student, kind)
            sums[kind, None] += [exact, 0, 0, 0]
            for k in SIZES:
                total, found = with_gradient(pairs[k], of_student, kind)
                products = (found * expected).sum(), found.square().sum(), expected.square().sum()
                sums[kind, k] += [total, *map(float, products)]

    print("k      bytes  tail    " + "".join(f"{kind:>9} of all  cosine  " for kind in KINDS))
    vocabulary = of_teacher.shape[-1]
    for k in SIZES:
        line = f"{k or 'all':<5} {record_of(k or vocabulary, vocabulary).itemsize:>6}"
        line += f"  {100 * tail[k] / count:5.2f} %"
        for kind in KINDS:
            total, product, own, other = sums[kind, k]
            share = 100 * total / sums[kind, None][0]
            line += f"{total / count:9.4f} {share:5.1f} % {product / (own * other) ** 0.5:6.4f}  "
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("--tokens", type=int, default=16_384)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    load = transformers.AutoModelForCausalLM.from_pretrained
    teacher, student = (load(one).eval() for one in (options.teacher, options.student))
    torch.manual_seed(0)
    untrained = transformers.AutoModelForCausalLM.from_config(student.config).eval()
    of = transformers.AutoTokenizer.from_pretrained
    vocabularies = [of(one).get_vocab() for one in (options.teacher, options.student)]
    if vocabularies[0] != vocabularies[1]:
        raise SystemExit("teacher and student must have one vocabulary")
    inputs = [*batches(len(vocabularies[0]), options.tokens)]

    print(f"# {date.today()}  python {shlex.join(sys.argv)}")
    print(
        f"# torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores"
    )
    for name, model in (("teacher", teacher), ("student", student)):
        number = sum(one.numel() for one in model.parameters())
        print(f"# {name}: {number / 1e6:.2f} M parameters")
    print(f"# {sum(one.numel() for one in inputs):,} tokens, {teacher.config.vocab_size:,} entries")
    for name, model, temperature in (
        ("trained", student, 1.0),
        ("trained", student, 2.0),
        ("untrained", untrained, 1.0),
    ):
        print(f"\n{name} student, temperature {temperature}")
        measured(teacher, model, inputs, temperature)


if __name__ == "__main__":
    main()
