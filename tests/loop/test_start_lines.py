"""The start-up log and the docs promise the same: what is bit-identical, and what is equal up to
rounding."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oneloop.data.batch_layout import BatchLayout
from oneloop.job.preflight_result import Preflight
from oneloop.loop import start_lines
from oneloop.loop.start_lines import _promise
from worlds import ROOT

pytestmark = pytest.mark.covers(
    "oneloop.checks.preflight",
    "oneloop.loop.training_state",
    "oneloop.loop.start_lines",
    "oneloop.run.environment",
)

ALWAYS = r"bit-identical(?! only)"  # without a condition
CONDITIONS = {"machine.deterministic", "batch.grain"}


def promise(
    device: str,
    precision: str = "no",
    *,
    model: nn.Module | None = None,
    dtype: str = "float32",
    benchmark: bool = False,
    deterministic: bool = False,
    grain: bool = False,
    matmul: str = "highest",
) -> str:
    machine = SimpleNamespace(
        dtype=dtype, deterministic=deterministic, cudnn_benchmark=benchmark, matmul=matmul
    )
    layout = BatchLayout(size=8, ranks=1, micro=4, grain=4 if grain else None)
    job = SimpleNamespace(recipe=SimpleNamespace(machine=machine), exact=grain, layout=layout)
    run = SimpleNamespace(
        device=torch.device(device), accelerator=SimpleNamespace(mixed_precision=precision)
    )
    trial = Preflight(draws=isinstance(model, nn.Sequential))
    return _promise(job, run, model or nn.Linear(2, 2), trial)


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """The line of batch.grain names the card."""
    about = {"device": "a card", "versions": {"torch": "2.15"}}
    monkeypatch.setattr(start_lines, "computed_by", lambda *_: about)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("way", [{}, {"deterministic": True}, {"grain": True}], ids=str)
def test_what_a_gpu_promises(way, precision):
    line = promise("cuda", precision, **way)
    assert bool(re.search(ALWAYS, line)) == bool(way), line
    if not way:
        assert "bit-identical only with machine.deterministic true or batch.grain" in line
    if "grain" in way:
        assert "sharded or not" in line and "1e-6" not in line
    elif precision == "no":
        assert "same gradients (relative difference up to 1e-6)" in line
    else:
        assert f"up to the rounding of {precision}" in line and "1e-6 only in float32" in line
        assert "autocast" in line and "FSDP2" in line


def test_what_a_cpu_promises():
    assert promise("cpu") == (
        "any parallel layout gives the same gradients (relative difference up to 1e-6), and a "
        "rerun on the same layout is bit-identical; check: oneloop prove"
    )
    assert "1e-12" in promise("cpu", dtype="float64")
    assert "rounding of bf16" in promise("cpu", "bf16")


def test_tf32_and_weights_in_half_precision_round_more():
    assert "up to 1e-3, with machine.matmul high" in promise("cuda", matmul="high")
    assert "up to 1e-6" in promise("cpu", matmul="high")  # a CPU has no TF32
    half = nn.Linear(2, 2).bfloat16()
    line = promise("cpu", model=half)
    assert "up to the rounding of bfloat16, the dtype of weights; 1e-6 only in float32" in line


def test_other_devices_are_not_told_to_use_what_they_do_not_support():
    for precision in ("no", "bf16"):
        line = promise("mps", precision)
        assert "batch.grain" not in line and "machine.deterministic" not in line
        assert "a rerun may differ by rounding" in line and "only with machine.device cpu" in line
    assert "FSDP2" not in promise("cuda", "fp8")


def test_a_model_with_dropout_has_the_same_condition():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    assert promise("cpu", model=model).endswith("a rerun on the same layout is bit-identical")
    assert not re.search(ALWAYS, promise("cuda", model=model))
    assert re.search(ALWAYS, promise("cuda", model=model, deterministic=True))
    timed = promise("cuda", deterministic=True, benchmark=True)
    assert "and without machine.cudnn_benchmark" in timed and not re.search(ALWAYS, timed)


PROMISES = {  # sentences on reruns, resumes and recomputation
    "README.md": r"Resume in the middle of an epoch \| (.*?) \|",
    "docs/explanation/exactness.md": r"(On a GPU, a rerun, a resume and.*?)\.\s",
    "docs/how-to/memory-and-speed.md": r"`--machine.recompute selective`, then (.*?\))",
    "docs/how-to/bad-steps.md": r"After `skip`, (weights.*?\))",
    "docs/how-to/checkpoints-in-a-bucket.md": r"The final weights are (.*?\))",
    "docs/tutorials/first-run.md": r"The final weights are (.*?\))",
    "docs/questions.md": r"(On a GPU, they are bit-identical.*?)\.\s",
}


@pytest.mark.parametrize("page", PROMISES)
def test_the_docs_have_the_conditions_of_the_log(page):
    (sentence,) = re.findall(PROMISES[page], (ROOT / page).read_text(), re.S)
    of_log = set(re.findall(r"machine\.deterministic|batch\.grain", promise("cuda")))
    assert "GPU" in sentence and "only with" in " ".join(sentence.split())
    assert of_log == CONDITIONS == set(re.findall("|".join(CONDITIONS), sentence))


def test_the_docs_name_the_precision_as_the_log_does():
    text = " ".join((ROOT / "docs/explanation/exactness.md").read_text().split())
    assert "In bf16 and fp16, gradients agree only up to the rounding of that precision" in text
    assert (
        "1e-6 in float32" in text
        and "(1e-6 relative in float32)" in (ROOT / "README.md").read_text()
    )
