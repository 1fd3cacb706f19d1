"""The programs of the page "Your loop, our parts", on every layout, killed and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import softplus

from oneloop.data.order import Order
from oneloop.data.seeded_samples import SeededSamples
from pages import blocks, program
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.resume",
    "oneloop.data.loader",
    "oneloop.ema",
    "oneloop.measure.meter",
    "oneloop.measure.noise_scale",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.clip",
)

PAGE = "how-to/your-loop.md"
PROGRAMS = blocks(PAGE, "python")
LINE = "y = 2.00 x + 1.00"
SLOW = pytest.mark.slow
LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]
ONE, DDP, FSDP2 = LAYOUTS


def test_all_programs_of_the_page_are_run():
    names = {"loader.py", "fabric_loop.py", "ddp_loop.py", "trainer.py", "parts.py", "gan.py"}
    assert PROGRAMS.keys() == names


WEIGHTS = """
def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


"""  # of a tensor that FSDP2 has sharded


def of_page(
    name: str,
    *names: str,
    config: str,
    ranks: int,
    folder: Path,
    before: dict[str, str] | None = None,
    after: str = "",
) -> Any:
    """Run a program of the page; return these variables of each rank.

    Args:
        before: what is inserted before lines of the program.
        after: what is added at its end.
    """
    folder.mkdir(exist_ok=True)
    text = PROGRAMS[name]
    if config == "fsdp2":  # as the page says
        plain = "Accelerator(cpu=not torch.accelerator.is_available())"
        assert plain in text
        text = text.replace(plain, "start().accelerator")
        text = f"from oneloop.launch.processes import start\n{text}"
    for line, inserted in (before or {}).items():
        assert text.count(line) == 1, line
        text = text.replace(line, inserted + line)
    (folder / name).write_text(text + WEIGHTS + after)
    return run(program, name, *names, config=config, ranks=ranks, folder=folder, timeout=240)


def killed_at(step: int) -> str:
    return f"""    if loader.position == {step}:
        __import__("os").kill(__import__("os").getpid(), 9)
"""


# The loader.

MODEL = "final = [whole(one) for one in model.parameters()]"


def test_the_loader_with_accelerate_is_resumed_on_another_layout(tmp_path):
    """40 steps on two processes and 40 on one are 80 steps on one."""
    first = of_page("loader.py", config="ddp", ranks=2, folder=tmp_path / "two")
    first.ok()
    assert "step 40" in first.output
    one = {"config": "single", "ranks": 1, "after": MODEL}
    second = of_page("loader.py", "final", folder=tmp_path / "two", **one)
    ((resumed,),) = second.ok()
    assert "step 80" in second.output
    at_once = {"stop = 40 if loader": "", "for group in loader": "stop = 80\n"}
    ((whole,),) = of_page("loader.py", "final", folder=tmp_path / "one", before=at_once, **one).ok()
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)


KILLED_IN_SAVE = """
class Killed:
    def state_dict(self):
        __import__("os").kill(__import__("os").getpid(), 9)

    def load_state_dict(self, state):
        pass


accelerator.register_for_checkpointing(Killed())
"""


@SLOW
@pytest.mark.parametrize(("config", "ranks"), LAYOUTS)
def test_a_kill_during_a_save_leaves_the_newest_complete_state(tmp_path, config, ranks):
    where = {"config": config, "ranks": ranks, "folder": tmp_path}
    of_page("loader.py", **where).ok()
    killed = of_page("loader.py", before={"for group in loader": KILLED_IN_SAVE}, **where)
    assert killed.codes == [-signal.SIGKILL] * ranks
    folders = tmp_path / "loader-run"
    assert {one.name for one in folders.iterdir()} == {"incomplete", "step-00000040"}
    again = of_page("loader.py", **where)
    again.ok()
    assert "step 80" in again.output
    assert {one.name for one in folders.iterdir()} == {"step-00000040", "step-00000080"}


@SLOW
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loader_with_fabric(tmp_path, ranks):
    """The second start resumes from step 200, and ends with the same weights."""
    config = "single" if ranks == 1 else "ddp"
    for begins in ("0", "200"):
        at = {"for group in loader": "print(f'begins at {loader.position}')\n"}
        where = {"config": config, "ranks": ranks, "folder": tmp_path}
        world = of_page("fabric_loop.py", before=at, **where)
        world.ok()
        assert f"begins at {begins}\n" in world.output and LINE in world.output


def test_the_loader_with_torch(tmp_path):
    world = of_page("ddp_loop.py", config="ddp", ranks=2, folder=tmp_path)
    world.ok()
    assert LINE in world.output


@SLOW
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sampler_in_trainer(tmp_path, ranks):
    config = "single" if ranks == 1 else "ddp"
    for _ in range(2):
        world = of_page("trainer.py", config=config, ranks=ranks, folder=tmp_path)
        world.ok()
    assert "y = " in world.output


# The parts together.

FINAL = """
final = [whole(one) for one in parameters] + [whole(one) for one in ema.tensors().values()]
"""
STOP = "    # Log and save."
TASK = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


class Digits:
    def collate(self, samples):
        x, y = zip(*samples)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def model(self):
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def train_set(self):
        images, digits = load_digits(return_X_y=True)
        return [*zip(torch.tensor(images).float() / 16, torch.tensor(digits))]

    def eval_sets(self):
        return {"validation": self.train_set()[:64]}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), {}
"""


def parts(folder: Path, config: str, ranks: int, *, kill: int = 0) -> Any:
    begin = "accelerator = start(" if config == "fsdp2" else "accelerator = Accelerator("
    before = {begin: "STEPS = 60\n"}
    before["        accelerator.print(f"] = (
        "        lines.append({**metrics, 'train/noise_scale': noise.value})\n"
    )
    before["for group in loader"] = "lines = []\n"
    if kill:
        before[STOP] = killed_at(kill)
    names = ("final", "lines")
    where = {"config": config, "ranks": ranks, "folder": folder}
    return of_page("parts.py", *names, before=before, after=FINAL, **where)


WORDS = (
    "digits.py:Digits --seed 0 --duration 60 --batch.size 64 --batch.micro 8 --run.dir run "
    "--init.from start.safetensors --optimizer.name adamw --optimizer.lr 1e-3 "
    "--optimizer.betas [0.9,0.999] --optimizer.clip 1 --schedule.name constant "
    "--schedule.warmup 0 --log.every 20 --eval.every 60 --track none --guard.nonfinite skip"
)


@pytest.fixture(scope="module")
def own_run(tmp_path_factory) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Return the final weights and EMA of oneloop's own run, and its log lines."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "digits.py").write_text(TASK)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    save_file(model.state_dict(), folder / "start.safetensors")
    words = WORDS.split()
    groups = '{"*": {"weight_decay": 0.01}}'
    words += ["--optimizer.groups", groups, "--ema.half_life", "2000 samples"]
    run(train, words, folder=folder).ok()
    weights = load_file(folder / "run" / "final" / "model.safetensors")
    averages = load_file(folder / "run" / "final" / "ema.safetensors")
    text = (folder / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    names = [name for name, _ in model.named_parameters()]
    tensors = [one[name] for one in (weights, averages) for name in names]
    return tensors, [line for line in lines if "train/loss" in line]


KILLED = [ONE, *(pytest.param(*one, marks=SLOW) for one in (DDP, FSDP2))]


@pytest.mark.parametrize(
    ("config", "ranks"),
    [ONE, pytest.param(*DDP, marks=SLOW), pytest.param(*FSDP2, marks=SLOW)],
)
def test_the_parts_train_what_oneloop_trains(tmp_path, own_run, config, ranks):
    tensors, logged = own_run
    for final, lines in parts(tmp_path, config, ranks).ok():
        torch.testing.assert_close(final, tensors, rtol=1e-4, atol=1e-6)
        assert len(lines) == 3
        compared = ["train/loss", "train/grad_norm", "train/update_ratio"]
        if config != "fsdp2":  # which has fewer parts of a step
            compared.append("train/noise_scale")
        for name in compared:
            expected = [line[name] for line in logged]
            assert [line[name] for line in lines] == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize(("config", "ranks"), KILLED)
def test_the_parts_are_killed_and_resumed(tmp_path, config, ranks):
    whole = parts(tmp_path / "whole", config, ranks).ok()
    killed = parts(tmp_path / "killed", config, ranks, kill=50)
    assert killed.codes == [-signal.SIGKILL] * ranks
    resumed = parts(tmp_path / "killed", config, ranks)
    assert [final for final, _ in resumed.ok()] == EqualTensors([final for final, _ in whole])
    assert "resuming from parts-run/step-000000" in resumed.output


class EqualTensors:
    """Nested lists of tensors that are equal bit by bit."""

    def __init__(self, expected: Any) -> None:
        self.expected = expected

    def __eq__(self, found: Any) -> bool:
        torch.testing.assert_close(found, self.expected, rtol=0, atol=0)
        return True

    __hash__ = None


# The GAN.

GAN_STEPS = 20
GAN_FINAL = """
final = [whole(one) for model in (generator, discriminator) for one in model.parameters()]
final += [whole(one) for ema in (ema_g, ema_d) for one in ema.tensors().values()]
states = [one for each in (optimizer_g, optimizer_d) for one in each.state.values()]
final += [whole(one) for state in states for _, one in sorted(state.items())]
"""

SAVES = """
    if loader.position % 4 == 0:
        state.save(checkpoints, loader.position)
"""


def gan(folder: Path, config: str, ranks: int, *, kill: int = 0) -> Any:
    before = {"class Samples(list)": f"STEPS = {GAN_STEPS}\n"}
    before["    if loader.position % 100 == 0"] = SAVES
    if kill:
        before["    losses.append(means)"] = killed_at(kill)
    where = {"config": config, "ranks": ranks, "folder": folder}
    return of_page("gan.py", "losses", "final", before=before, after=GAN_FINAL, **where)


def plain_gan() -> list[list[float]]:
    """Return the losses of the usual loop in plain PyTorch, with whole batches."""
    from sklearn.datasets import load_digits

    class Samples(list):
        def __getitem__(self, index):
            return super().__getitem__(index), torch.randn(16)

    samples = SeededSamples(Samples(torch.tensor(load_digits().data).float() / 8 - 1), seed=0)
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    losses = []
    for step in range(GAN_STEPS):
        epochs, indices = Order(len(samples), seed=0)[step * 64 : (step + 1) * 64]
        places = [*zip(epochs.tolist(), indices.tolist())]
        real, noise = (torch.stack(one) for one in zip(*(s for _, s in samples.good(places))))
        optimizer_d.zero_grad()
        fake = generator(noise).detach()
        loss_d = softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = softplus(-discriminator(generator(noise))).mean()
        loss_g.backward()
        optimizer_g.step()
        losses.append([loss_d.item(), loss_g.item()])
    return losses


@pytest.mark.parametrize(("config", "ranks"), [ONE, DDP, pytest.param(*FSDP2, marks=SLOW)])
def test_the_gan_has_the_losses_of_a_plain_loop(tmp_path, config, ranks):
    for losses, _ in gan(tmp_path, config, ranks).ok():
        assert losses == [pytest.approx(step, rel=1e-5) for step in plain_gan()]


@pytest.mark.parametrize(("config", "ranks"), KILLED)
def test_the_gan_is_killed_and_resumed(tmp_path, config, ranks):
    whole = gan(tmp_path / "whole", config, ranks).ok()
    killed = gan(tmp_path / "killed", config, ranks, kill=14)
    assert killed.codes == [-signal.SIGKILL] * ranks
    resumed = gan(tmp_path / "killed", config, ranks)
    for (losses, final), (losses_whole, final_whole) in zip(resumed.ok(), whole):
        assert losses == losses_whole[-len(losses) :] and 4 < len(losses) < GAN_STEPS
        assert final == EqualTensors(final_whole)


@SLOW
@pytest.mark.parametrize(("config", "ranks"), LAYOUTS)
def test_the_gan_is_resumed_on_another_layout(tmp_path, config, ranks):
    """From two processes with FSDP2."""
    killed = gan(tmp_path, "fsdp2", 2, kill=14)
    assert killed.codes == [-signal.SIGKILL] * 2
    for losses, _ in gan(tmp_path, config, ranks).ok():
        assert losses == [pytest.approx(step, rel=1e-5) for step in plain_gan()[-len(losses) :]]
