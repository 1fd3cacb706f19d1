"""What can be checked without a GPU, so that the first run on one does not fail."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from oneloop.basics.exit_codes import BadInput
from oneloop.job.build import build_job
from oneloop.job.preflight import reject_half_parameters
from oneloop.launch.processes import start
from oneloop.machine.torch_settings import reject_not_deterministic
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.bad_step_policy import Fault
from oneloop.optim.clip import global_norm
from oneloop.plan.step_costs import StepCosts
from oneloop.recipe.parse import read
from oneloop.tasks.image_classification import Quarters

SMALL_GPT = ["gpt", "--task.width", "32", "--task.heads", "2", "--task.layers", "1"]


@pytest.mark.parametrize("words", [["digits"], SMALL_GPT, ["sft"]], ids=lambda words: words[0])
def test_the_packaged_models_are_deterministic_on_a_gpu(words):
    for keys in (["--machine.deterministic", "true"], ["--batch.grain", "1"]):
        job = build_job(read([*words, *keys]), ranks=1, device="cuda")
        reject_not_deterministic(job.model, "a key")


def test_a_layer_that_is_not_deterministic_on_a_gpu_is_rejected_before_the_run():
    words = ["digits", "--task.model", "alexnet"]
    build_job(read(words), ranks=1, device="cuda")
    build_job(read([*words, "--machine.deterministic", "true"]), ranks=1, device="cpu")
    for keys, name in (
        (["--machine.deterministic", "true"], "machine.deterministic true"),
        (["--batch.grain", "8"], "batch.grain"),
    ):
        with pytest.raises(ValueError, match=rf"{name} requires .* avgpool \(AdaptiveAvgPool2d\)"):
            build_job(read([*words, *keys]), ranks=1, device="cuda")


def test_adaptive_pooling_to_one_value_is_a_mean_and_allowed():
    reject_not_deterministic(nn.Sequential(nn.AdaptiveAvgPool2d(1)), "a key")
    with pytest.raises(ValueError, match="the gradient of 0"):
        reject_not_deterministic(nn.Sequential(nn.AdaptiveAvgPool2d(2)), "a key")


@pytest.mark.parametrize("height", [1, 2, 5, 8])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_quarters_are_those_of_adaptive_pooling(height, width):
    images = torch.randn(2, 3, height, width, dtype=torch.float64, requires_grad=True)
    gradients = []
    for pool in (Quarters(), nn.AdaptiveAvgPool2d(2)):
        pooled = pool(images)
        assert pooled.shape == (2, 3, 2, 2)
        gradients += torch.autograd.grad(pooled.pow(3).sum(), images)
    assert torch.allclose(*gradients, rtol=1e-12)


class _Dtypes(TorchDispatchMode):
    """Records the dtypes that the kernel of the bad-step guard gets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_amp_foreach_non_finite_check" in str(func):
            self.seen += [tensor.dtype for tensor in args[0]]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_guard_knows_parameters_of_every_dtype(dtype):
    net = nn.Linear(3, 3, dtype=dtype)
    guard = Guard(torch.optim.SGD(net.parameters(), lr=0.1), device=torch.device("cpu"))
    for scale, fault in ((1.0, Fault.NONE), (torch.inf, Fault.NONFINITE)):
        net.zero_grad()
        (net(torch.ones(2, 3, dtype=dtype)).sum() * scale).backward()
        with _Dtypes() as dtypes:
            guard.step(global_norm(net.parameters()))
        assert guard.resolve().fault is fault
        assert dtypes.seen == [torch.promote_types(dtype, torch.float32)]


def test_fp16_loss_scaling_needs_float32_parameters():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    with pytest.raises(BadInput, match=r"but 1\.weight is bfloat16"):
        reject_half_parameters(net)
    net[1].requires_grad_(False)
    reject_half_parameters(net)


def test_the_batches_of_a_measured_step_are_on_the_device_of_the_model():
    job, run = build_job(read(["digits", "--batch.size", "4"]), ranks=1), start()
    costs = StepCosts(job, run)
    run.device = torch.device("meta")
    ((batch, weight),) = costs._loaded(job, 4, 1)
    assert weight == 4 and {value.device.type for value in batch.values()} == {"meta"}
