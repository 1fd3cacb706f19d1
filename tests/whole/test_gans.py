"""GANs: the programs of docs/how-to/gans.md equal plain PyTorch loops, on any layout and after a
kill."""

from __future__ import annotations

import importlib.util
import json
import re
import textwrap
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from pages import blocks
from worlds import ROOT, run, train

pytestmark = [
    pytest.mark.covers("oneloop.train", "oneloop.machine.reduction"),
    pytest.mark.usefixtures("one_thread"),
]

PAGE = "how-to/gans.md"
PROGRAMS = blocks(PAGE, "python")
STEPS, BATCH, LR, BETAS = 48, 64, 1e-3, (0.5, 0.999)
COMMON = [
    *("--duration", str(STEPS), "--batch.size", str(BATCH), "--log.every", "1"),
    *("--eval.every", "0", "--track", "none", "--run.dir", "run"),
]
TURNS = [
    *("by_turns.py:Digits", *COMMON, "--optimizer.lr", str(LR)),
    *("--optimizer.betas", "[0.5,0.999]", "--optimizer.clip", "0"),
]
TOGETHER = ["together.yaml", *COMMON]
SEARCH = ["--machine.find_unused_parameters", "true"]

MORTAL = """
import os
import signal
import time
from pathlib import Path

from {module} import Digits as Immortal


class Digits(Immortal):
    progress = None

    def loss(self, model, batch):
        mark = Path("killed-" + os.environ.get("RANK", "0"))
        if model.training and self.progress.step == 30 and not mark.exists():
            mark.touch()
            saved = Path("run", "checkpoints", "step-00000021")
            end = time.monotonic() + 120
            while not saved.exists() and time.monotonic() < end:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
"""


@pytest.fixture
def folder(tmp_path):
    """Create the files of the page, and tasks that are killed in step 31."""
    for name, text in {**PROGRAMS, **blocks(PAGE, "yaml")}.items():
        (tmp_path / name).write_text(text)
    for name in ("by_turns", "together"):
        (tmp_path / f"mortal_{name}.py").write_text(MORTAL.format(module=name))
    return tmp_path


def load(file: Path) -> ModuleType:
    """Import a program."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(place: Path):
    """Return the weights at the end of a run, and its loss by step."""
    weights = load_file(place / "run" / "final" / "model.safetensors")
    lines = map(json.loads, (place / "run" / "metrics.jsonl").read_text().splitlines())
    return weights, {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def batches(program: ModuleType, count: int):
    """Yield the first batches in oneloop's order, with the noise that it draws."""
    from oneloop.data.order import Order
    from oneloop.data.seeded_samples import SeededSamples

    data = program.Digits().train_set()
    samples = SeededSamples(data, seed=0)
    order = Order(len(data), seed=0)
    for number in range(count):
        epochs, indices = order[number * BATCH : (number + 1) * BATCH]
        places = zip(epochs.tolist(), indices.tolist(), strict=True)
        yield program.default_collate([samples[place][1] for place in places])


def start(program: ModuleType):
    """Return the networks with the initial weights of a run with seed 0."""
    from oneloop.basics.seeds import key

    torch.manual_seed(key(0))
    return program.Digits().model()


def plain_turns(program: ModuleType):
    """Return the networks and losses of a loop as in PyTorch's DCGAN example."""
    networks = start(program)
    generator, discriminator = networks.generator, networks.discriminator
    # Fused, as oneloop: PyTorch's other implementation rounds in another way.
    of_generator = torch.optim.Adam(generator.parameters(), LR, BETAS, fused=True)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), LR, BETAS, fused=True)
    losses = []
    for batch in batches(program, STEPS // 2):
        # The discriminator: real images, then generated ones.
        discriminator.zero_grad()
        real = F.softplus(-discriminator(batch["real"])).mean()
        real.backward()
        fake = generator(batch["noise"])
        generated = F.softplus(discriminator(fake.detach())).mean()
        generated.backward()
        of_discriminator.step()

        # The generator, judged by the updated discriminator.
        generator.zero_grad()
        loss = F.softplus(-discriminator(fake)).mean()
        loss.backward()
        of_generator.step()
        losses += [float(real.detach() + generated.detach()), float(loss.detach())]
    return networks, losses


RATES = {"generator": (2e-3 / 4, BETAS), "discriminator": (2e-3, BETAS)}


def plain_together(program: ModuleType, rates=RATES, *, fused: bool = True):
    """Return the networks and losses of a loop that computes both gradients before it updates."""
    networks = start(program)
    generator, discriminator = networks.generator, networks.discriminator
    of_generator, of_discriminator = (
        torch.optim.Adam(getattr(networks, name).parameters(), lr, betas, fused=fused)
        for name, (lr, betas) in rates.items()
    )
    losses = []
    for batch in batches(program, STEPS):
        label = F.one_hot(batch["digit"], 10).float()
        fake = generator(torch.cat((batch["noise"], label), 1))
        fools = F.softplus(-discriminator(torch.cat((fake, label), 1))).mean()
        generator.zero_grad()
        fools.backward()

        discriminator.zero_grad()
        generated = F.softplus(discriminator(torch.cat((fake.detach(), label), 1))).mean()
        real = F.softplus(-discriminator(torch.cat((batch["real"], label), 1))).mean()
        (generated + real).backward()
        of_discriminator.step()
        of_generator.step()
        losses.append(float(fools.detach() + generated.detach() + real.detach()))
    return networks, losses


PLAIN = {"by_turns": (TURNS, plain_turns), "together": (TOGETHER, plain_together)}


def equal(weights: dict, networks: torch.nn.Module) -> None:
    """Check that all parameters are bit-identical."""
    for name, parameter in networks.named_parameters():
        assert torch.equal(weights[name], parameter), name


@pytest.mark.parametrize("name", PLAIN)
def test_one_process_is_bit_identical_to_a_plain_loop(folder, name):
    words, plain = PLAIN[name]
    run(train, words, folder=folder).ok()
    weights, losses = result(folder)
    networks, expected = plain(load(folder / f"{name}.py"))
    assert list(losses.values()) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] != pytest.approx(expected[-3], rel=1e-4)
    equal(weights, networks)


LAYOUTS = [
    ("by_turns", "ddp", 2, 32),
    ("by_turns", "ddp", 2, 16),
    ("by_turns", "single", 1, 16),
    ("by_turns", "fsdp2", 2, 32),
    ("together", "ddp", 2, 32),
    ("together", "fsdp2", 2, 16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config", "ranks", "micro"), LAYOUTS)
def test_other_layouts_have_the_same_losses(folder, name, config, ranks, micro):
    words, plain = PLAIN[name]
    words = [*words, "--batch.micro", str(micro)]
    words += SEARCH if (name, config) == ("by_turns", "ddp") else []
    run(train, words, ranks=ranks, config=config, folder=folder).ok()
    _, losses = result(folder)
    _, expected = plain(load(folder / f"{name}.py"))
    assert list(losses.values()) == pytest.approx(expected, rel=1e-6)


UNITS = """
import by_turns
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return F.leaky_relu(self.linear(x), 0.2)


class Digits(by_turns.Digits):
    def model(self):
        networks = by_turns.Networks()
        networks.discriminator = nn.Sequential(
            nn.Flatten(), Block(), Block(), nn.Linear(64, 1), nn.Flatten(0)
        )
        return networks
"""


def constants_in_a_unit() -> list[str]:
    """Return the errors of forwards that replace a parameter before a unit, or within it."""
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.fsdp import fully_shard
    from torch.func import functional_call

    from oneloop.basics.exit_codes import Inexact
    from oneloop.checks.passes import run_pass

    class Own(torch.nn.Linear):
        replaces = False

        def forward(self, x):
            if self.replaces:
                self.weight = torch.nn.Parameter(self.weight.detach() + 1)
            return super().forward(x)

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = torch.nn.Sequential(Own(4, 4), Own(4, 1))
    for module in (*model, model):
        fully_shard(module)
    x = torch.ones(2, 4)
    assert run_pass(model, lambda: model(x).sum()).keys() - {""}
    found = []
    constants = {name: p.detach() for name, p in model[0].named_parameters()}
    for replaces, own in ((False, constants), (True, {})):
        Own.replaces = replaces
        called = partial(functional_call, model[0], own, (x,))
        try:
            run_pass(model, lambda called=called: model[1](called()).sum())
        except Inexact as error:
            found.append(str(error))
    return found


def test_constants_in_a_unit_are_named_as_such():
    """``functional_call`` in a step by turns: FSDP2 would train the discriminator, too."""
    found = run(constants_in_a_unit).ok()[0]
    assert len(found) == 2
    for error in found:
        assert "replaces the parameter 0.weight by another tensor" in error
        assert "set machine.blocks to classes outside of this unit" in error


@pytest.mark.slow
def test_units_in_a_discriminator_of_constants_are_rejected_with_the_cause(folder):
    """FSDP2 puts its own parameters in place of the constants of ``functional_call``."""
    (folder / "units.py").write_text(UNITS)
    words = ["units.py:Digits", *TURNS[1:], "--duration", "2", "--machine.blocks", '["Block"]']
    world = run(train, words, ranks=2, config="fsdp2", folder=folder)
    assert world.codes == [1, 1], world.output
    assert "replaces the parameter discriminator.1.linear.weight by another tensor" in world.output
    assert "set machine.blocks to classes outside of this unit, or use ddp.yaml" in world.output


@pytest.mark.slow
def test_units_in_the_generator_train_the_same_weights(folder):
    """What the message and the page say."""
    (folder / "units.py").write_text(UNITS)
    found = []
    for config, ranks in (("single", 1), ("fsdp2", 2)):
        words = ["units.py:Digits", *TURNS[1:], "--machine.blocks", '["ConvTranspose2d"]']
        run(train, words, ranks=ranks, config=config, folder=folder).ok()
        found.append(list(result(folder)[1].values()))
        (folder / "run").rename(folder / config)
    assert len(found[0]) == STEPS and found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_with_a_grain_all_layouts_are_bit_identical(folder, name):
    found = []
    for config, ranks in (("single", 1), ("ddp", 2), ("fsdp2", 2)):
        words = [*PLAIN[name][0], "--batch.grain", "16"]
        words += SEARCH if (name, config) == ("by_turns", "ddp") else []
        run(train, words, ranks=ranks, config=config, folder=folder).ok()
        found.append(result(folder))
        (folder / "run").rename(folder / config)
    (weights, losses), *others = found
    for other, same in others:
        assert same == losses
        assert all(torch.equal(weights[one], other[one]) for one in weights)


def killed_and_resumed(folder: Path, words: list[str], ranks: int) -> None:
    """Check that a run is bit-identical to one that was killed in step 31.

    That one is resumed after step 21: before a turn of the generator.
    """
    words = [*words, "--save.every", "21"]
    killed = run(train, words, ranks=ranks, folder=folder)
    assert killed.codes == [-9] * ranks, killed.output
    resumed = run(train, words, ranks=ranks, folder=folder)
    resumed.ok()
    assert re.search(r"resuming from \S+step-0+21", resumed.output), resumed.output
    weights, losses = result(folder)

    # The same task is not killed again.
    (folder / "run").rename(folder / "resumed")
    run(train, words, ranks=ranks, folder=folder).ok()
    expected, whole = result(folder)
    assert losses == whole and len(whole) == STEPS
    assert all(torch.equal(weights[one], expected[one]) for one in expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"), [("by_turns", 1), ("by_turns", 2), ("together", 1), ("together", 2)]
)
def test_a_run_that_is_killed_and_resumed_is_bit_identical(folder, name, ranks):
    words = [*PLAIN[name][0], "--task", f"mortal_{name}.py:Digits"]
    words = words[1:] if name == "by_turns" else words
    words += SEARCH if (name, ranks) == ("by_turns", 2) else []
    killed_and_resumed(folder, words, ranks)


@pytest.mark.slow
def test_without_the_search_ddp_names_the_key(folder):
    world = run(train, TURNS, ranks=2, folder=folder)
    assert world.codes == [2, 2] and not (folder / "run").exists()
    assert "other steps" in world.output and " ".join(SEARCH) in world.output


SNIPPET = re.findall(r"```python\n(with .*?)```", (ROOT / "docs" / PAGE).read_text(), re.DOTALL)
PLAIN_TURN = """        with torch.no_grad():
            fake = self.generator(noise)
"""


def with_batch_norm(folder: Path, *, copies: bool) -> ModuleType:
    """Change the program: all its norms are BatchNorm.

    Args:
        folder: of the program.
        copies: use the page's code that leaves the generator's statistics alone.
    """
    text = PROGRAMS["by_turns.py"]
    text = re.sub(r"nn.GroupNorm\(4, (\d+)\)", r"nn.BatchNorm2d(\1)", text)
    text = text.replace(
        "nn.Linear(64, 64), nn.Leaky", "nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Leaky"
    )
    assert text.count("BatchNorm") == 3 and text.count(PLAIN_TURN) == len(SNIPPET) == 1
    if copies:
        text = text.replace(PLAIN_TURN, textwrap.indent(SNIPPET[0], " " * 8))
    (folder / "by_turns.py").write_text(text)
    return load(folder / "by_turns.py")


@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True])
def test_batch_norm_is_that_of_a_plain_loop(folder, copies):
    """All weights, and the running statistics that the page names, are bit-identical."""
    program = with_batch_norm(folder, copies=copies)
    run(train, TURNS, folder=folder).ok()
    weights, losses = result(folder)
    networks, expected = plain_turns(program)
    equal(weights, networks)
    assert list(losses.values()) == pytest.approx(expected, rel=1e-6)
    for name, buffer in networks.named_buffers():
        same = copies or name.startswith("discriminator")
        assert torch.equal(weights[name], buffer) == same, name


@pytest.mark.slow
def test_batch_norm_trains_and_resumes_under_ddp(folder):
    with_batch_norm(folder, copies=True)
    killed_and_resumed(folder, ["mortal_by_turns.py:Digits", *TURNS[1:], *SEARCH], ranks=2)


@pytest.mark.slow
def test_own_adam_has_rates_and_betas_for_each_network(folder):
    words = [*TOGETHER, "--optimizer.name", "own_adam.py:adam"]
    recipe = (folder / "together.yaml").read_text()
    recipe = re.sub(r"  (betas|groups): .*\n", "", recipe)
    (folder / "together.yaml").write_text(recipe)
    run(train, words, folder=folder).ok()
    weights, _ = result(folder)
    rates = {"generator": (5e-4, (0.5, 0.999)), "discriminator": (2e-3, (0.0, 0.99))}
    networks = plain_together(load(folder / "together.py"), rates, fused=False)[0]
    equal(weights, networks)
