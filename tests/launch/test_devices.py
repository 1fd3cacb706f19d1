"""One GPU for each process: which settings are rejected, and what is set before CUDA starts.

There is no GPU here: a recorder replaces torch.cuda.device_count and torch.cuda.set_device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.memory import peak_memory
from oneloop.basics.seeds import random_states, reseed
from oneloop.checkpoint.pieces import Piece, stage
from oneloop.checks.state import restored
from oneloop.data.step_batches import to_device
from oneloop.launch import devices
from oneloop.launch.interpreter import borrowed
from oneloop.machine.recompute import recompute
from oneloop.optim.adamw import AdamW, _correction
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.bad_step_policy import Fault
from oneloop.optim.muon import Muon
from oneloop.optim.sgd import SGD
from worlds import apply, here, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.memory",
    "oneloop.basics.seeds",
    "oneloop.basics.system.processes",
    "oneloop.checkpoint.pieces",
    "oneloop.data.step_batches",
    "oneloop.launch.devices",
    "oneloop.launch.interpreter",
    "oneloop.launch.processes",
    "oneloop.loop.training_state",
    "oneloop.machine.recompute",
    "oneloop.optim.adamw",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.bad_step_policy",
    "oneloop.optim.elementwise",
    "oneloop.optim.muon",
    "oneloop.optim.sgd",
    "oneloop.run.compatibility",
)

CUDA = torch.device("cuda")


def with_gpus(visible: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function while ``visible`` GPUs are counted; return a BadInput as its message."""
    torch.cuda.device_count = lambda: visible
    try:
        return function(*args, **options)
    except BadInput as error:
        return str(error)


def asked(variables: dict[str, str], visible: int, *, device: torch.device = CUDA) -> str | None:
    """Return the message for a host with so many visible GPUs, and these variables."""
    before = dict(os.environ), torch.cuda.device_count
    os.environ.update(variables)
    try:
        return with_gpus(visible, devices.reject_shared, device)
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        torch.cuda.device_count = before[1]


def processes(number: int, **more: str) -> dict[str, str]:
    """Return the variables of the last of so many processes on one host."""
    return {
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "LOCAL_RANK": str(number - 1),
        **more,
    }


@pytest.mark.parametrize(
    ("variables", "visible"),
    [
        ({}, 1),
        ({}, 8),
        (processes(2), 2),
        (processes(2), 8),
        (processes(2, CUDA_VISIBLE_DEVICES="3,5"), 2),
        # one process on each of four hosts, which have one GPU or one MIG slice each
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1),
        # the launcher does not count the processes of a host, and there may be enough GPUs
        ({"WORLD_SIZE": "16", "LOCAL_RANK": "7"}, 8),
    ],
)
def test_one_gpu_for_each_process_is_accepted(variables, visible):
    assert asked(variables, visible) is None


@pytest.mark.parametrize(
    ("variables", "visible", "words"),
    [
        # README's second command on a host with one GPU
        (processes(2), 1, "starts 2 processes, and each sees 1; start at most 1"),
        (processes(8), 4, "starts 8 processes, and each sees 4; start at most 4"),
        # gpu_ids of accelerate set the same variable
        (processes(4, CUDA_VISIBLE_DEVICES="0,2"), 2, "sees 2 (CUDA_VISIBLE_DEVICES=0,2); start"),
        # srun --gpus-per-task 1, or torchrun --virtual-local-rank: each sees its own GPU
        (processes(8, CUDA_VISIBLE_DEVICES="0"), 1, "srun --gpus-per-node in place of"),
        # several MIG slices: CUDA shows one of them
        (processes(2, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b"), 1, "one MIG slice at most"),
        # the same without the number of processes on the host: also rank 0 must notice
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 1, "LOCAL_WORLD_SIZE is not set"),
    ],
)
def test_processes_that_share_a_gpu_are_rejected(variables, visible, words):
    message = asked(variables, visible)
    assert message is not None and words in message
    # every rank raises the same message
    assert asked({**variables, "LOCAL_RANK": "0"}, visible) == message
    if "LOCAL_WORLD_SIZE" in variables:
        assert "--config_file single" in message and "(--machine.device cpu)" in message


def test_several_hosts_have_their_own_advice():
    message = asked({**processes(4), "WORLD_SIZE": "8"}, 2)
    assert message is not None and "start at most 2 on each host, or" in message
    assert "--num_processes" not in message


def on_one_gpu(argv: list[str]) -> None:
    """Train where one GPU is visible."""
    devices.kind = lambda: CUDA
    with_gpus(1, train, argv)


def test_all_ranks_end_with_one_message_before_they_connect(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    world = run(on_one_gpu, ["r.yaml", "--run.dir", "a"], ranks=2, folder=tmp_path, timeout=120)
    assert world.codes == [2, 2], world.output
    assert world.output.count("oneloop: NCCL requires one GPU per process") == 1
    assert not (tmp_path / "a").exists()


def test_a_cpu_needs_no_gpu():
    for visible in (0, 1):
        assert asked(processes(2), visible, device=torch.device("cpu")) is None
    assert asked(processes(2, CUDA_VISIBLE_DEVICES=""), 0, device=devices.kind()) is None


def started(variables: dict[str, str], device: torch.device = CUDA) -> dict[str, Any]:
    """Set up a process with these variables, and return what it has set."""
    os.environ.update(variables)
    given = dict(os.environ)
    devices.set_allocator(device)
    return {
        "new": {name: value for name, value in os.environ.items() if given.get(name) != value},
        "allocator": torch._C._accelerator_getAllocatorSettings(),
    }


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocators_settings_are_those_of_the_user(name):
    [found] = run(started, {name: "max_split_size_mb:64"}).ok()
    assert found["new"] == {} and EXPANDABLE not in found["allocator"]


def test_the_allocator_gets_segments_that_grow_but_not_on_a_cpu():
    [found] = run(started, {}).ok()
    assert found["new"] == {"PYTORCH_ALLOC_CONF": EXPANDABLE}
    assert found["allocator"] == EXPANDABLE  # torch has read it, although it was imported before
    [found] = run(started, {}, torch.device("cpu")).ok()
    assert found["new"] == {} and found["allocator"] == ""


def current_device() -> tuple[list[str], str]:
    from oneloop.launch.processes import start

    selected: list[str] = []
    torch.cuda.set_device = lambda device: selected.append(str(device))
    return selected, str(start().device)


def test_the_named_gpu_is_the_current_one():
    variables = {"ACCELERATE_TORCH_DEVICE": "cuda:3"}
    assert run(current_device, variables=variables).ok() == [(["cuda:3"], "cuda:3")]
    assert run(current_device).ok() == [([], "cpu")]


def test_unused_gpus_are_reported_in_one_line():
    begins = "GPUs of this host in use: 2 of 8; to use all: "
    assert with_gpus_of_two(8) == [f"{begins}--num_processes 8"]
    assert with_gpus_of_two(8, ranks=4) == [f"{begins}8 processes on each host"]
    assert with_gpus_of_two(2) == [] == with_gpus_of_two(8, device=torch.device("cpu"))
    unknown = run(with_gpus, 4, devices.unused, CUDA, variables={"WORLD_SIZE": "8"})
    assert unknown.ok() == [[]]  # the processes of this host are not counted
    alone = with_gpus_of_two(8, ranks=1, here=1)
    assert alone == [
        "GPUs of this host in use: 1 of 8; to use all: --config_file ddp --num_processes 8"
    ]


def with_gpus_of_two(
    visible: int, *, ranks: int = 2, here: int = 2, device: torch.device = CUDA
) -> list[str]:
    """Return the line of a run of ``ranks`` processes, with ``here`` on this host."""
    variables = {"LOCAL_WORLD_SIZE": str(here), "WORLD_SIZE": str(ranks)}
    return run(with_gpus, visible, devices.unused, device, variables=variables).ok()[0]


def allocator_at_a_check() -> str | None:
    """Return the allocator's settings when the check of fp8 asks for the GPU, and starts CUDA."""
    from oneloop.launch import processes

    devices.kind = lambda: CUDA

    def asked_for(*_: Any) -> None:
        raise BadInput(os.environ.get("PYTORCH_ALLOC_CONF", "nothing"))

    processes._reject_precision = asked_for
    try:
        processes.start()
    except BadInput as error:
        return str(error)
    return None


def test_the_allocator_is_set_before_a_check_starts_cuda():
    assert run(allocator_at_a_check).ok() == [EXPANDABLE]


# An Apple GPU: there is none here, so what oneloop and accelerate ask torch and its libraries is
# answered as on a Mac. No tensor gets onto it.
MPS = torch.device("mps")


def on_a_mac() -> None:
    """Let oneloop, accelerate and FSDP2's mesh find an Apple GPU, but not torch itself."""
    import accelerate.state

    real = torch.accelerator.current_accelerator
    real_of_mesh = torch._C._get_accelerator

    def of_mesh(*given: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        return MPS if caller.startswith("torch.distributed.fsdp") else real_of_mesh(*given)

    torch._C._get_accelerator = of_mesh

    def found(check_available: bool = False) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        return MPS if caller.startswith("oneloop.") else real(check_available)

    torch.accelerator.current_accelerator = found
    accelerate.state.is_mps_available = lambda *_: True


def train_on_a_mac(words: list[str]) -> None:
    on_a_mac()
    here(words)


def apply_on_a_mac(words: list[str]) -> None:
    on_a_mac()
    apply(words)


SHORT = ["r.yaml", "--run.dir", "a", "--duration", "3", "--save.every", "0", "--eval.every", "0"]


@pytest.mark.parametrize("config", ["single", "ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_mac_trains_on_its_cpu_if_asked(tmp_path, config):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\nmachine: {device: cpu}\n")
    how = {"ranks": 1 if config == "single" else 2, "config": config, "folder": tmp_path}
    world = run(train_on_a_mac, SHORT, **how)
    assert world.codes == [0] * how["ranks"], world.output
    assert " on cpu, no mixed precision" in world.output
    assert (tmp_path / "a" / "final" / "model.safetensors").exists()
    if config == "single":
        # evaluate uses the device of the run
        assert run(apply_on_a_mac, ["evaluate", "a"], folder=tmp_path).codes == [0]


@pytest.mark.parametrize(
    ("words", "how", "message"),
    [
        (["--batch.grain", "4"], {}, "does not support batch.grain: it has no float64"),
        ([], {"ranks": 2}, "does not support 2 processes: torch.distributed has no backend"),
        (
            [],
            {"options": ["--mixed_precision", "fp16"]},
            "fp16 was never tried on the Apple GPU (mps)",
        ),
    ],
    ids=["grain", "ddp", "fp16"],
)
def test_a_mac_rejects_what_its_gpu_cannot_do(tmp_path, words, how, message):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    world = run(
        train_on_a_mac,
        [*SHORT, *words],
        folder=tmp_path,
        variables={"ACCELERATE_TORCH_DEVICE": "mps"},
        **how,
    )
    assert set(world.codes) == {2}, world.output
    assert world.output.count(message) == 1, world.output
    assert "machine.device cpu" in world.output and "Traceback" not in world.output
    assert not (tmp_path / "a").exists()


def deterministic() -> str:
    from oneloop.launch.processes import start

    on_a_mac()
    try:
        start(deterministic=True)
    except BadInput as error:
        return str(error)
    return ""


def test_an_apple_gpu_has_no_deterministic_algorithms():
    (found,) = run(deterministic).ok()
    assert "does not support machine.deterministic true" in found


def test_the_variables_of_accelerate_choose_the_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: MPS)
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name, raising=False)
    assert devices.kind() == MPS
    for name, value in (("ACCELERATE_USE_CPU", "True"), ("ACCELERATE_TORCH_DEVICE", "cpu")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert devices.kind().type == "cpu"
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    devices.use_cpu()
    assert devices.kind().type == "cpu" and "ACCELERATE_TORCH_DEVICE" not in os.environ


@pytest.fixture
def generator(monkeypatch) -> torch.Generator:
    """The generator of an emulated Apple GPU."""
    made = torch.Generator().manual_seed(7)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "manual_seed", made.manual_seed)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device="mps": made.get_state())
    monkeypatch.setattr(
        torch.mps, "set_rng_state", lambda state, device="mps": made.set_state(state)
    )
    return made


def test_the_generator_of_an_apple_gpu_is_seeded_and_restored(generator):
    def drawn() -> list[float]:
        return torch.rand(3, generator=generator).tolist()

    # each micro-batch
    reseed(MPS, 1, 2)
    first = drawn()
    reseed(MPS, 1, 2)
    assert drawn() == first

    # the checks before a run
    model = torch.nn.Linear(2, 2)
    states = random_states(MPS)
    assert states == random_states(MPS)
    with restored(MPS, model, {}):
        inside = drawn()
        assert states != random_states(MPS)
    assert states == random_states(MPS) and drawn() == inside

    # a run in the user's interpreter
    before = generator.get_state()
    with borrowed():
        drawn()
    assert torch.equal(generator.get_state(), before)


def test_activation_checkpointing_repeats_the_draws_of_an_apple_gpu(generator):
    class Drop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Its square keeps the masked value for the backward.
            return (self.weight * x * (torch.rand(64, generator=generator) > 0.5)) ** 2

    gradients = []
    for mode in ("none", "full"):
        generator.manual_seed(3)
        model = torch.nn.Sequential(Drop(), Drop())
        if mode == "full":
            recompute(model, mode, names=["Drop"])
        model(torch.ones(64, requires_grad=True)).sum().backward()
        gradients.append(model[0].weight.grad)
        last = torch.rand(1, generator=generator)
    assert torch.equal(*gradients)
    generator.manual_seed(3)
    torch.rand(128, generator=generator)
    assert torch.equal(torch.rand(1, generator=generator), last)  # recomputation changes nothing


class OnMps(torch.Tensor):
    """A tensor in host memory that says that it is on an Apple GPU."""

    device = MPS


def test_a_batch_is_copied_to_an_apple_gpu_at_once():
    copies = []

    class Copied(torch.Tensor):
        def to(self, device, non_blocking):
            copies.append((str(device), non_blocking))
            return self

    batch = {"x": torch.ones(2).as_subclass(Copied), "name": "a"}
    for device in (MPS, CUDA):
        assert to_device(batch, device)["name"] == "a"
    assert copies == [("mps", False), ("cuda", True)]


def test_a_checkpoint_is_copied_through_aligned_memory():
    copies = []

    class Copied(OnMps):
        def cpu(self):
            copies.append(len(self))
            return torch.Tensor.clone(self).as_subclass(torch.Tensor)

    values = [torch.arange(2).float(), torch.arange(3).bfloat16()]
    buffer = torch.zeros(14, dtype=torch.uint8)
    pieces = [Piece(name, one.as_subclass(Copied), ()) for name, one in zip("ab", values)]
    stage(pieces, buffer)
    assert copies == [2, 3]
    assert torch.equal(buffer, torch.cat([one.view(torch.uint8) for one in values]))


def test_memory_is_that_of_the_device_that_trains(monkeypatch):
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 123)
    assert peak_memory(MPS) == 123
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert peak_memory(torch.device("cpu")) > 1 << 20  # although a program has used a GPU


def test_optimizers_skip_a_bad_step_on_an_apple_gpu_without_fused_kernels():
    class Parameter(torch.nn.Parameter):
        device = MPS

    def parameter() -> Any:
        made = Parameter(torch.ones(4, 4))
        made.grad = torch.full((4, 4), torch.nan)
        return made

    for make in (AdamW, SGD, Muon):
        mine = parameter()
        optimizer = make([mine], lr=0.1)
        assert optimizer.elementwise, make
        if make is SGD:
            optimizer.found_inf = torch.ones(())
            optimizer.step()
            assert bool((mine.detach() == 1).all())
        assert not make([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1).elementwise

    # Other fused optimizers ignore the flag, so the guard reads it before the step.
    mine = parameter()
    for optimizer, waits in (
        (torch.optim.Adam([mine], fused=True), True),
        (SGD([mine], lr=0.1), False),
    ):
        guard = Guard(optimizer, device=torch.device("cpu"))
        assert guard._on_device is not waits
        guard.step(torch.tensor(torch.nan))
        assert guard.resolve().fault is Fault.NONFINITE and bool((mine.detach() == 1).all())


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.999999])
def test_bias_corrections_without_float64(beta):
    steps = torch.tensor([1.0, 2, 10, 1000, 1e6])
    exact = _correction(beta, steps)
    found = _correction(beta, steps.as_subclass(OnMps)).as_subclass(torch.Tensor)
    assert exact.dtype is torch.float64 and found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0.0)


def train_as_on_cuda(words: list[str]) -> None:
    """Train; checkpoints say that they are from a CUDA device."""
    from oneloop.run import entry

    real = entry.inputs_of
    entry.inputs_of = lambda *args: {**real(*args), "device": "cuda"}
    train(words)


def test_a_resume_on_another_device_says_what_differs(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "task: {name: tiny.Ragged, dropout: 0.1}\nschedule: {name: constant}\n"
    )
    run(train_as_on_cuda, ["r.yaml", "--run.dir", "a", "--duration", "2"], folder=tmp_path).ok()
    more = ["r.yaml", "--run.dir", "a", "--duration", "4", "--machine.device", "cpu"]
    output = run(train, more, folder=tmp_path)
    assert output.codes == [0], output.output
    assert "device: cuda -> cpu; the samples stay the same" in output.output
    assert "rounding and the numbers of dropout are others" in output.output


def plan_on_a_mac(words: list[str]) -> int:
    from oneloop.cli import main

    on_a_mac()
    return main(["plan", *words])


@pytest.mark.slow
def test_a_plan_needs_no_device(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\nbatch: {size: 8}\n")
    words = ["--config_file", "ddp", "r.yaml", "--batch.grain", "4"]
    world = run(plan_on_a_mac, words, folder=tmp_path)
    assert "does not support" not in world.output, world.output
    assert world.codes == [0], world.output


def proved_keys(words: list[str]) -> list[str]:
    """Return the words of a run that ``oneloop prove`` starts, without a GPU."""
    from oneloop.tools.prove import prove

    sys.path.insert(0, "")
    own = SimpleNamespace(
        config_file="ddp", processes=2, steps=2, every_step=False, double=False, json=False
    )
    return prove._Proof(words, own, Path("scratch"), lambda *_: 0).training


def test_prove_uses_the_cpu_if_there_are_fewer_gpus_than_processes(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\nbatch: {size: 8}\n")
    (words,) = run(proved_keys, ["r.yaml"], folder=tmp_path).ok()
    assert words == ["tensors:2", "r.yaml", "--machine.device", "cpu"]
