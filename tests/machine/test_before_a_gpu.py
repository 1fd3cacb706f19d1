"""What can be checked without a GPU, so that the first run on one does not fail."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import runpy
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from oneloop.basics.exit_codes import BadInput
from oneloop.job.build import build_job
from oneloop.launch.processes import start
from oneloop.machine.mixed_precision import prepare, reject_half_parameters
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.bad_step_policy import Fault
from oneloop.optim.clip import global_norm
from oneloop.recipe.class_paths import packaged
from oneloop.recipe.parse import read
from oneloop.tasks.image_models import Quarters
from oneloop.tasks.language.attention import attend_within_documents, causal
from oneloop.tools.plan.step_costs import StepCosts
from tiny import Ragged
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.machine.mixed_precision",
    "oneloop.machine.torch_settings",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.bad_step_policy",
    "oneloop.optim.clip",
    "oneloop.tasks.image_models",
    "oneloop.tasks.language.attention",
    "oneloop.tools.plan.step_costs",
)


class Unpooled(Ragged):
    """Its loss uses an operation that has no deterministic algorithm on any device."""

    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        places = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        return loss * nn.MaxUnpool2d(2)(torch.ones(1, 1, 1, 1), places).sum(), outputs


def test_an_operation_that_is_not_deterministic_is_reported_before_the_run(tmp_path):
    words = ["digits", "--task.name", "test_before_a_gpu.Unpooled", "--run.dir", "run"]
    world = run(train, [*words, "--machine.deterministic", "true"], folder=tmp_path)
    assert world.codes == [2], world.output
    assert "does not have a deterministic implementation" in world.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5, 8, 33, 64])
def test_quarters_are_those_of_adaptive_pooling(height):
    """Of an odd height or width, the quarters overlap. Both are treated alike."""
    for width in range(1, 66):
        images = torch.randn(1, 1, height, width, dtype=torch.float64, requires_grad=True)
        pooled = Quarters()(images)
        expected = nn.AdaptiveAvgPool2d(2)(images)
        assert pooled.shape == expected.shape
        assert torch.allclose(pooled, expected, rtol=1e-12)
        slopes = torch.randn(1, 1, 2, 2, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(pooled, images, slopes)
        (expected,) = torch.autograd.grad(expected, images, slopes)
        assert torch.allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_guard_knows_parameters_of_every_dtype(dtype):
    net = nn.Linear(3, 3, dtype=dtype)
    guard = Guard(torch.optim.SGD(net.parameters(), lr=0.1), device=torch.device("cpu"))
    for scale, fault in ((1.0, Fault.NONE), (torch.inf, Fault.NONFINITE)):
        net.zero_grad()
        (net(torch.ones(2, 3, dtype=dtype)).sum() * scale).backward()
        guard.step(global_norm(net.parameters()))
        assert guard.resolve().fault is fault


def test_fp16_loss_scaling_needs_float32_parameters():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(BadInput, match=r"but 1\.weight is torch.bfloat16"):
        reject_half_parameters(net)
    net[1].requires_grad_(False)
    reject_half_parameters(net)


def layers_in_fp8(sizes: list[int]) -> list[str] | str:
    """Return the classes of a model's layers after it is prepared for fp8, or the error."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    layers = [nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]
    try:
        prepared = prepare(nn.Sequential(*layers), accelerator)
    except BadInput as error:
        return str(error)
    assert {type(parameter.data) for parameter in prepared.parameters()} == {torch.Tensor}
    return [type(layer).__name__ for layer in prepared]


def test_fp8_converts_the_layers_that_torchao_can_multiply():
    """Accelerate's prepare_model converts none: such a run silently trained in bf16."""
    sizes = [16, 32, 48, 40, 16, 16]
    assert run(layers_in_fp8, sizes).ok() == [
        ["Linear", "Float8Linear", "Linear", "Linear", "Linear"]
    ]
    (error,) = run(layers_in_fp8, [16, 16, 16]).ok()
    assert error.startswith("mixed_precision fp8 converts linear layers")


def test_the_batches_of_a_measured_step_are_on_the_device_of_the_model():
    job, run = build_job(read(["digits", "--batch.size", "4"]), ranks=1), start()
    costs = StepCosts(job, run)
    run.device = torch.device("meta")
    ((batch, weight),) = costs._loaded()
    assert weight == 4 and {value.device.type for value in batch.values()} == {"meta"}


def counted_graphs(model: Any) -> int:
    """Compile each block of a model, and return the number of graphs of one pass."""
    attend_within_documents(model)
    torch._dynamo.reset()
    counters.clear()
    for block in model.model.layers:
        block.compile(backend="eager", fullgraph=True)
    tokens = torch.arange(16)[None]
    mask = causal(torch.device("cpu"))
    compiled = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    graphs: int = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert torch.isfinite(compiled).all()
    return graphs


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_blocks_of_one_kind_share_one_compilation(kind):
    """Dynamo gives up after eight compilations of one function."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
    )
    assert counted_graphs(getattr(transformers, f"{kind}ForCausalLM")(config)) <= 2


@pytest.fixture
def benchmarks(monkeypatch):
    """The modules of ``benchmarks/``."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def event(kind: str, name: str, start: float, length: float, **more: int) -> dict[str, Any]:
    """An event of a trace; ``more`` are its thread and its correlation."""
    thread = more.pop("thread", 1)
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": start,
        "dur": length,
        "pid": 0,
        "tid": thread,
        "args": more,
    }


def test_a_trace_is_reduced_to_phases_idle_time_and_waits(benchmarks):
    from gpu_trace import FORWARD, reduce

    events = [
        event("user_annotation", FORWARD, 0, 10),
        event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=2, thread=2),
        event("cuda_driver", "cuLaunchKernel", 30, 1, correlation=3),
        event("cuda_runtime", "cudaMemcpyAsync", 32, 1, correlation=4),
        event("cuda_runtime", "cudaStreamSynchronize", 22, 7),
        event("cuda_runtime", "cudaDeviceSynchronize", 33, 7),  # the end of the measurement
        event("kernel", "gemm", 100, 50, correlation=1, thread=7),
        event("kernel", "gemm_backward", 140, 60, correlation=2, thread=7),
        event("kernel", "adamw", 210, 20, correlation=3, thread=7),
        event("gpu_memcpy", "Memcpy DtoH", 240, 10, correlation=4, thread=7),
        event("gpu_user_annotation", FORWARD, 0, 1000, thread=7),
        {"ph": "M", "name": "process_name"},
    ]
    reduced = reduce(events, steps=2)
    assert reduced.idle_share == pytest.approx(1 - 130 / 150)
    assert reduced.kernels == 1.5 and reduced.kernels_outside == 0.5 and reduced.waits == 0.5
    phases = {row["phase"]: row for row in reduced.tables["time of the device by phase"]}
    assert phases["backward"] == {"phase": "backward", "ms per step": 0.03, "kernels": 0.5}
    assert phases["outside"]["ms per step"] == pytest.approx(0.015)
    assert reduced.tables["longest kernels"][0]["kernel"] == "gemm_backward"
    assert reduced.tables["waits"] == [
        {"call": "cudaStreamSynchronize", "calls per step": 0.5, "ms per step": 0.0035}
    ]


def test_kernels_of_attention_are_found_by_their_names_and_by_their_operators(benchmarks):
    from gpu_trace import reduce

    events = [
        event("cpu_op", "aten::scaled_dot_product_attention", 0, 10),
        event("cpu_op", "aten::bmm", 1, 2),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),  # of the product inside
        event("cuda_runtime", "cudaLaunchKernel", 8, 1, correlation=2),  # after that product
        event("cuda_runtime", "cudaLaunchKernel", 11, 1, correlation=3),  # after the operator
        event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=4, thread=2),
        event("kernel", "gemm", 100, 10, correlation=1),
        event("kernel", "softmax", 110, 20, correlation=2),
        event("kernel", "gemm", 130, 40, correlation=3),
        event("kernel", "gemm", 170, 80, correlation=4),
        event("kernel", "pytorch_flash::flash_bwd_dq_dk_dv_loop", 250, 30, correlation=5),
        event("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 280, 20),
        event("kernel", "triton_poi_fused__scaled_dot_product_flash_attention_cat", 300, 50),
    ]
    reduced = reduce(events, steps=2)
    assert reduced.attention_ms == pytest.approx((10 + 20 + 30 + 20) / 2 / 1e3)
    assert reduced.attention_share == pytest.approx(80 / 250)


class _Stopped(Exception):
    pass


class _Recorder:
    """In place of a pacer: the tokens of each step, as the model gets them."""

    def __init__(self, steps: int) -> None:
        self.steps: list[list[list[int]]] = []
        self._most = steps
        self._number = None
        self._due = False

    def knows(self, model):
        pass

    def step(self, number=None):
        if number is not None and number == self._number:
            return
        self._number = number
        if len(self.steps) == self._most:
            raise _Stopped
        self._due = True

    def watch(self, module, args, kwargs):
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if self._due:
            self.steps.append(tokens.tolist())
            self._due = False


@pytest.mark.slow
def test_all_loops_of_a_pair_train_on_the_same_batches(benchmarks, tmp_path, monkeypatch):
    """Also at steps at which oneloop repeats a micro-batch, and after the end of the list."""
    import gpu_loops
    import gpu_rivals
    from gpu_pacer import Setting
    from gpu_workloads import Text

    monkeypatch.setattr(gpu_loops, "LOG_EVERY", 1)  # a repeat is possible in each step
    workload = Text(
        "toy",
        "llama",
        layers=1,
        heads=2,
        width=16,
        vocabulary=64,
        length=16,
        rows=2,
        texts=40,
        batches=3,
    )
    rows = workload.samples
    expected = [workload.batch([rows[2 * step], rows[2 * step + 1]])["input"] for step in range(7)]
    assert torch.equal(expected[0], expected[3])
    assert not torch.equal(expected[0], expected[1])
    built = Text.build
    loops = {
        "by hand": gpu_loops.by_hand,
        "oneloop": gpu_loops.by_oneloop,
        "accelerate": gpu_loops.by_accelerate,
        "trainer": gpu_rivals.by_trainer,
        "tuned": gpu_rivals.by_tuned_trainer,
    }
    for name, loop in loops.items():
        recorder = _Recorder(steps=7)

        def build(text, device, recorder=recorder):
            model = built(text, device)
            model.register_forward_pre_hook(recorder.watch, with_kwargs=True)
            return model

        monkeypatch.setattr(Text, "build", build)
        folder = tmp_path / name.replace(" ", "-")
        setting = Setting(workload, torch.device("cpu"), "no", False, folder, folder)
        with pytest.raises(_Stopped):
            loop(setting, recorder)
        assert recorder.steps == [batch.tolist() for batch in expected], name


def test_what_pip_installs_for_lines(benchmarks):
    from gpu_lines import Line, requirements

    lines = [
        Line("speed", "one", lambda place: None, 1.0, [], [], 0, ["peft", "datasets"]),
        Line("speed", "two", lambda place: None, 1.0, [], [], 0, ["peft"], ["liger_kernel"]),
    ]
    assert requirements(lines) == ["datasets", "dill", "liger-kernel", "multiprocess", "peft"]
    assert lines[1].why_skipped(gpus=0) is None
    lines[1] = dataclasses.replace(lines[1], gpu_packages=["no_such_package"])
    assert lines[1].why_skipped(gpus=0) is None
    assert lines[1].why_skipped(gpus=1) == "package missing: no_such_package"


def _hanging(place):
    subprocess.Popen(["sleep", "543"])
    time.sleep(60)


def test_a_line_needs_its_numbers_and_takes_its_processes_with_it(benchmarks):
    from gpu_lines import Line, Result, Running

    def tried(run, *numbers: str, limit: float = 60.0):
        line = Line("check", "one", run, 1.0, numbers, ["on_a_gpu"], 0, [])
        return Running(line, toy=True, rates={}, limit=limit).outcome()

    def broken(place):
        print("what happened before")
        raise ValueError("a reason")

    assert tried(lambda place: Result("fine", {"a": 1.0}), "a").outcome == "pass"
    missing = tried(lambda place: Result("fine", {"a": math.nan}), "a", "b")
    assert (missing.outcome, missing.says) == ("fail", "without its numbers a, b: fine")
    failed = tried(broken)
    assert failed.outcome == "fail" and failed.says == "ValueError: a reason"
    assert failed.log[0] == "what happened before" and "Traceback" in failed.log[1]
    assert tried(lambda place: os._exit(3)).says == "its process ended with code 3 and no result"
    late = tried(_hanging, limit=2.0)
    assert (
        late.outcome == "fail" and late.says == "it took longer than the 2 s that were left for it"
    )
    left = [one for one in psutil.process_iter() if one.name() == "sleep"]
    assert not [
        one for one in left if one.status() != psutil.STATUS_ZOMBIE and "543" in one.cmdline()
    ]


@pytest.mark.parametrize(
    ("gpus", "needs", "package", "expected"),
    [
        (0, 0, "json", None),
        (0, 1, "json", "no CUDA"),
        (1, 2, "json", "one GPU only; it needs 2"),
        (1, 1, "no_such_package", "package missing: no_such_package"),
    ],
)
def test_the_reasons_to_skip_a_line(benchmarks, gpus, needs, package, expected):
    from gpu_lines import Line

    line = Line("check", "one", lambda place: None, 1.0, [], [], needs, [package])
    assert line.why_skipped(gpus) == expected


@pytest.mark.slow
@pytest.mark.timeout(4500)
def test_all_parts_of_the_day_with_a_gpu_run_without_one(tmp_path):
    script = ROOT / "benchmarks" / "gpu_day.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "--toy", "--jobs", "2", "--to", str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (record,) = tmp_path.glob("*.json")
    assert len(list(tmp_path.iterdir())) == 2
    lines = json.loads(record.read_text())["lines"]
    skipped = {line["says"] for line in lines if line["outcome"] == "skipped"}
    assert skipped == {"no CUDA"}
    assert {line["part"] for line in lines if line["outcome"] == "pass"} == {
        "check",
        "speed",
        "bits",
        "plan",
        "faults",
    }
    ran = sum(line["outcome"] == "pass" for line in lines)
    assert f"{ran} lines ran: {ran} passed, 0 failed" in ended.stdout


def test_each_packaged_recipe_is_trained_twice_on_a_gpu():
    found = set()
    for file in (ROOT / "benchmarks").glob("gpu_*.py"):
        found.update(re.findall(r"^def deterministic_(\w+)\(place", file.read_text(), re.M))
    # the same models as gpt and llama, and as digits
    others = {"gpt2", "llama-1b", "llama-7b", "images"}
    assert found == set(packaged()) - others


def the_day(words: list[str]) -> None:
    """Run the script of the day with a GPU, as from a command line."""
    script = ROOT / "benchmarks" / "gpu_day.py"
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")


def test_a_line_that_does_not_exist_is_bad_input(tmp_path):
    world = run(the_day, ["--part", "bits", "--only", "gpt3"], folder=tmp_path)
    assert world.codes == [2], world.output
    assert "unknown lines: gpt3; known: leaves_float32" in world.output
    assert not list(tmp_path.iterdir())
