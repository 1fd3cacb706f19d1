"""Several models and optimizers by name, such as those of a GAN, are saved and loaded together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.basics.tensors import together
from oneloop.checkpoint.manifest import read_manifest
from oneloop.checkpoint.resume import RunState
from oneloop.checkpoint.state_dict import buffers_of, model_tensors
from oneloop.ema import EMA, EMASettings
from slow_cases import with_slow
from sync_saves import SyncCheckpoints
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.tensors",
    "oneloop.checkpoint.checkpoints",
    "oneloop.checkpoint.rank_buffers",
    "oneloop.checkpoint.resume",
    "oneloop.checkpoint.state_dict",
)


class Generator(nn.Module):
    """Has statistics of BatchNorm, and a buffer that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.total += x.detach().sum()
        return self.layers(x)


class Count:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Gan:
    """What a loop has: two models, two optimizers, two EMAs.

    Args:
        seed: of the initial weights.
        way: accelerate ``prepare``s each model with its optimizer, or ``plain``: torch's own
            ``fully_shard`` and optimizers, or no wrapper.
        turned: name the discriminator first.
    """

    def __init__(
        self,
        seed: int,
        way: str = "plain",
        *,
        accelerator: Accelerator | None = None,
        turned: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.accelerator = accelerator or Accelerator()
        self.g = Generator()
        self.d = nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(), nn.Linear(4, 1))
        if way == "plain" and self.accelerator.num_processes > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.accelerator.num_processes,))
            fully_shard(self.g, mesh=mesh)
            fully_shard(self.d, mesh=mesh)
        self.optimizer_g = torch.optim.AdamW(self.g.parameters(), lr=0.05)
        self.optimizer_d = torch.optim.SGD(self.d.parameters(), lr=0.05, momentum=0.9)
        if way == "prepare":
            self.g, self.optimizer_g = self.accelerator.prepare(self.g, self.optimizer_g)
            self.d, self.optimizer_d = self.accelerator.prepare(self.d, self.optimizer_d)
        self.emas = [
            EMA(self.g, EMASettings(half_life=64, buffers=True, name="smooth")),
            EMA(self.d, EMASettings(half_life=64, name="discriminator")),
        ]
        self.count = Count()
        models = {"generator": self.g, "discriminator": self.d}
        optimizers = {"generator": self.optimizer_g, "discriminator": self.optimizer_d}
        if turned:
            models = dict(reversed(models.items()))
            optimizers = dict(reversed(optimizers.items()))
        self.state = RunState(
            models,
            optimizers,
            parts={"count": self.count, "smooth": self.emas[0], "discriminator": self.emas[1]},
        )

    def step(self) -> None:
        seed = 100 * self.count.step + self.accelerator.process_index
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        for optimizer, sign in ((self.optimizer_d, 1), (self.optimizer_g, -1)):
            self.accelerator.backward(sign * self.d(self.g(x)).square().mean())
            optimizer.step()
            self.optimizer_d.zero_grad()
            self.optimizer_g.zero_grad()
        for ema in self.emas:
            ema.update(4)
        with torch.no_grad():  # a sample: FSDP2 keeps gathered weights
            self.g(x)
        self.count.step += 1

    def everything(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors, whole, and counters."""
        found = model_tensors(self.state.model)
        found |= optimizer_tensors(self.state.model, self.state.optimizer)
        for ema in self.emas:
            found |= ema.tensors()
            found[f"seen {ema.name}"] = torch.tensor(ema.seen)
        found["step"] = torch.tensor(self.count.step)
        found[OWN] = together({"g": self.g}).get_buffer("g.total")
        return {name: whole(tensor) for name, tensor in found.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def leg(root: str, seed: int, way: str) -> list[dict[str, torch.Tensor]]:
    """Run :func:`two_steps` in a world."""
    from oneloop.launch.processes import start

    return two_steps(root, Gan(seed, way, accelerator=start().accelerator, turned=seed % 2 == 1))


def two_steps(root: str, gan: Gan) -> list[dict[str, torch.Tensor]]:
    """Resume if there is a checkpoint, train two steps, save, and train one step more.

    Returns:
        All tensors: as loaded, one step later, as saved, and one step later.
    """
    checkpoints = SyncCheckpoints(Path(root), gan.accelerator)
    gan.state.resume(checkpoints, "auto", say=lambda line: None)
    seen = [gan.everything()]
    gan.step()
    seen.append(gan.everything())
    gan.step()
    gan.state.save(checkpoints, gan.count.step)
    seen.append(gan.everything())
    gan.step()
    return [*seen, gan.everything()]


SINGLE = ("single", 1, "plain")
DDP = ("ddp", 2, "prepare")
FSDP2 = ("fsdp2", 2, "plain")
PREPARED = ("fsdp2", 2, "prepare")
OWN = "total"  # a buffer that each rank saves
CHAINS = [[FSDP2, SINGLE, DDP], [DDP, FSDP2, ("single", 1, "prepare"), PREPARED, SINGLE, FSDP2]]


@pytest.mark.parametrize("layouts", with_slow(CHAINS, CHAINS[1:]))
def test_every_layout_loads_what_another_saved(tmp_path, layouts):
    saved: dict[str, torch.Tensor] = {}
    for seed, (config, ranks, way) in enumerate(layouts):
        results = run(leg, str(tmp_path), seed, way, ranks=ranks, config=config).ok()
        for loaded, *_ in results if saved else []:
            same(loaded | {OWN: saved[OWN]}, saved)
        saved = results[0][2]
    assert "optimizer.generator.layers.0.weight.exp_avg" in saved
    assert "optimizer.discriminator.0.weight.momentum_buffer" in saved
    assert saved["step"] == 2 * len(layouts)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks", "way"), [DDP, FSDP2, PREPARED])
def test_ranks_continue_as_if_left_alone(tmp_path, config, ranks, way):
    alone = run(leg, str(tmp_path), 1, way, ranks=ranks, config=config).ok()
    resumed = run(leg, str(tmp_path), 2, way, ranks=ranks, config=config).ok()
    same(alone[0][3], resumed[0][1])
    assert alone[0][3][OWN] != alone[1][3][OWN]  # each rank has its own buffer
    for name, tensor in alone[1][3].items():
        if "running" not in name:  # statistics are those of rank 0
            assert torch.equal(tensor, resumed[1][1][name]), name


@pytest.mark.parametrize("way", ["plain", "prepare"])
def test_one_process_continues_as_if_left_alone(tmp_path, way):
    alone = two_steps(str(tmp_path), Gan(1, way))
    other = "prepare" if way == "plain" else "plain"  # also without accelerate's optimizer
    resumed = two_steps(str(tmp_path), Gan(2, other, turned=True))
    same(resumed[0], alone[2])
    same(resumed[1], alone[3])
    names = read_manifest(tmp_path / "step-00000002")["about"]["named"]
    assert names[:2] == ["model discriminator", "model generator"]
    assert [line for line in names if "groups" in line] == [
        "optimizer discriminator: SGD, parameter groups: 1",
        "optimizer generator: AdamW, parameter groups: 1",
    ]


# --- other names
# --------------------------------------------------------------------------------------------------


class Pair:
    """Two small trained models, and optimizers of a kind each.

    Args:
        seed: of the weights.
        kinds: of the optimizers, by the names of the models.
    """

    def __init__(self, seed: int, **kinds: type[torch.optim.Optimizer]) -> None:
        torch.manual_seed(seed)
        self.models = {name: nn.Linear(3, 2) for name in kinds}
        self.optimizers = {}
        for name, kind in kinds.items():
            self.optimizers[name] = kind(self.models[name].parameters(), lr=0.1)

    def step(self) -> Pair:
        for name, model in self.models.items():
            model(torch.ones(2, 3)).square().sum().backward()
            self.optimizers[name].step()
        return self

    def everything(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, model in self.models.items():
            optimizer = self.optimizers[name]
            one = model_tensors(model) | optimizer_tensors(model, optimizer)
            found |= {f"{name} {key}": whole(tensor) for key, tensor in one.items()}
        return found


ADAM = torch.optim.Adam
ADAMW = torch.optim.AdamW


def pair(seed: int) -> Pair:
    return Pair(seed, generator=ADAMW, discriminator=ADAMW)


def model_added(made: Pair):
    made.models["critic"] = nn.Linear(1, 1)


def model_removed(made: Pair):
    del made.models["discriminator"], made.optimizers["discriminator"]


def model_renamed(made: Pair):
    made.models["critic"] = made.models.pop("discriminator")


def one_model(made: Pair):
    made.models = nn.ModuleDict(made.models)


def optimizer_added(made: Pair):
    made.models["discriminator"].requires_grad_(True)
    first, second = made.models["discriminator"].parameters()
    made.optimizers["discriminator"] = ADAMW([first])
    made.optimizers["biases"] = ADAMW([second])


def optimizer_removed(made: Pair):
    del made.optimizers["discriminator"]


def optimizer_renamed(made: Pair):
    made.optimizers["critic"] = made.optimizers.pop("discriminator")


def optimizers_swapped(made: Pair):
    one, other = made.optimizers.values()
    made.optimizers = {"generator": other, "discriminator": one}


def another_kind(made: Pair):
    made.optimizers["generator"] = ADAM(made.models["generator"].parameters())


def another_group(made: Pair):
    groups = [{"params": [one]} for one in made.models["generator"].parameters()]
    made.optimizers["generator"] = ADAMW(groups)


def one_optimizer(made: Pair):
    both = [*made.models["generator"].parameters(), *made.models["discriminator"].parameters()]
    made.optimizers = ADAMW(both)


# what the message must contain
CHANGES = {
    model_added: "only given: ['model critic']",
    model_removed: "only the checkpoint has ['model discriminator', 'optimizer discriminator: A",
    model_renamed: "only given: ['model critic', 'optimizer discriminator: critic.weight'",
    one_model: "only the checkpoint has ['model discriminator', 'model generator']; only given: no",
    optimizer_added: "only given: ['optimizer biases: AdamW, parameter groups: 1', 'optimizer bia",
    optimizer_renamed: "only given: ['optimizer critic: AdamW, parameter groups: 1', 'optimizer c",
    optimizers_swapped: "only given: ['optimizer discriminator: generator.weight', 'optimizer dis",
    another_kind: "only given: ['optimizer generator: Adam, parameter groups: 1']",
    another_group: "only given: ['optimizer generator: AdamW, parameter groups: 2']",
    optimizer_removed: "only the checkpoint has ['optimizer discriminator: AdamW, parameter grou",
    one_optimizer: "only given: nothing",
}


@pytest.fixture(scope="module")
def saved_pair(tmp_path_factory) -> Path:
    checkpoints = SyncCheckpoints(tmp_path_factory.mktemp("pair"), Accelerator())
    made = pair(1).step()
    checkpoints.save(1, made.models, made.optimizers, {})
    return checkpoints.newest()


def by_load(made: Pair, folder: Path) -> None:
    checkpoints = SyncCheckpoints(folder.parent, Accelerator())
    checkpoints.load(folder, made.models, made.optimizers)


def by_resume(made: Pair, folder: Path) -> None:
    checkpoints = SyncCheckpoints(folder.parent, Accelerator())
    RunState(made.models, made.optimizers, parts={}).resume(checkpoints, str(folder))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("through", [by_load, by_resume])
def test_other_names_are_rejected_before_a_tensor_changes(saved_pair, change, through):
    made = pair(2).step()
    models, optimizers = dict(made.models), dict(made.optimizers)
    before = made.everything()
    change(made)
    with pytest.raises(ValueError, match="has other named models or optimizers") as caught:
        through(made, saved_pair)
    assert CHANGES[change] in str(caught.value)
    made.models, made.optimizers = models, optimizers
    same(made.everything(), before)


def test_other_names_are_rejected_before_a_buffer_goes_back(tmp_path):
    first = Gan(1)
    checkpoints = SyncCheckpoints(tmp_path, first.accelerator)
    first.state.save(checkpoints, 1)  # before a buffer has moved
    gan = Gan(2)
    gan.step()
    before = gan.everything()
    assert before[OWN] != 0
    gan.state.optimizer = {"generator": gan.optimizer_d, "discriminator": gan.optimizer_g}
    with pytest.raises(ValueError, match="has other named models or optimizers"):
        gan.state.resume(checkpoints, "auto", say=lambda line: None)
    same(gan.everything(), before)


def test_a_checkpoint_without_names_is_not_of_named_models(tmp_path):
    checkpoints = SyncCheckpoints(tmp_path, Accelerator())
    made = pair(1).step()
    checkpoints.save(1, made.models["generator"], made.optimizers["generator"], {})
    assert read_manifest(checkpoints.newest())["about"]["named"] == []
    before = made.everything()
    with pytest.raises(ValueError, match=r"only the checkpoint has nothing; only given: \['model"):
        checkpoints.load(checkpoints.newest(), made.models, made.optimizers)
    same(made.everything(), before)


def test_another_number_of_groups_is_rejected_before_a_tensor_changes(tmp_path):
    checkpoints = SyncCheckpoints(tmp_path, Accelerator())
    made = pair(1).step()
    generator = made.models["generator"]
    checkpoints.save(1, generator, made.optimizers["generator"], {})
    made.step()
    before = made.everything()
    other = ADAMW([{"params": [one]} for one in generator.parameters()])
    with pytest.raises(
        ValueError, match=r"the state of AdamW \w+, but AdamW \w+, AdamW \w+ is given"
    ):
        checkpoints.load(checkpoints.newest(), generator, other)
    same(made.everything(), before)
    assert not other.state


# --- names and kinds
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.b", "", "train", "training", 1])
def test_names_that_no_module_can_have_are_rejected(name):
    made = pair(1)
    with pytest.raises((KeyError, TypeError), match="name|attribute"):
        RunState({name: made.models["generator"]}, made.optimizers["generator"], parts={})


def test_a_parameter_with_two_optimizers_is_rejected(tmp_path):
    made = pair(1)
    net = made.models["generator"]
    one = made.optimizers["generator"]
    checkpoints = SyncCheckpoints(tmp_path, Accelerator())
    for other in (torch.optim.SGD([net.bias], lr=0.1), one):
        both = {"one": one, "two": other}
        with pytest.raises(ValueError, match="the optimizers one and two both have the parameter "):
            checkpoints.save(1, net, both, {})
        with pytest.raises(ValueError, match="the optimizers one and two both have the parameter "):
            RunState(net, both, parts={})


def test_an_optimizer_of_another_model_is_rejected():
    made = pair(1)
    del made.models["discriminator"]
    with pytest.raises(ValueError, match="2 parameters that are not in the given models"):
        RunState(made.models, made.optimizers, parts={})


def test_one_model_with_several_optimizers(tmp_path):
    """The tensors have the names that they have with one optimizer."""
    checkpoints = SyncCheckpoints(tmp_path, Accelerator())

    def made(seed: int):
        torch.manual_seed(seed)
        net = nn.Linear(3, 2)
        rest = torch.optim.SGD([net.bias], lr=0.1, momentum=0.9)
        return net, {"matrices": ADAMW([net.weight]), "rest": rest}

    net, optimizers = made(1)
    net(torch.ones(2, 3)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    checkpoints.save(1, net, optimizers, {})
    assert held_in(checkpoints.newest()) == {
        "model.weight",
        "model.bias",
        "optimizer.weight.step",
        "optimizer.weight.exp_avg",
        "optimizer.weight.exp_avg_sq",
        "optimizer.bias.momentum_buffer",
    }
    other, others = made(2)
    checkpoints.load(checkpoints.newest(), other, dict(reversed(others.items())))
    assert torch.equal(other.weight, net.weight)
    moment = optimizers["rest"].state[net.bias]["momentum_buffer"]
    assert torch.equal(others["rest"].state[other.bias]["momentum_buffer"], moment)
    assert others["matrices"].state.keys() == {other.weight}


def held_in(folder: Path) -> set[str]:
    return set(load_file(folder / "rank-00000.safetensors"))


def test_several_models_with_one_optimizer(tmp_path):
    checkpoints = SyncCheckpoints(tmp_path, Accelerator())
    made = pair(1)
    one_optimizer(made)
    made.models["generator"](torch.ones(2, 3)).sum().backward()
    made.optimizers.step()
    checkpoints.save(1, made.models, made.optimizers, {})
    other = pair(2)
    one_optimizer(other)
    checkpoints.load(checkpoints.newest(), other.models, other.optimizers)
    same(
        optimizer_tensors(together(other.models), other.optimizers),
        optimizer_tensors(together(made.models), made.optimizers),
    )
    for name, model in made.models.items():
        assert torch.equal(model.weight, other.models[name].weight)


def test_a_module_of_two_models_is_saved_once(tmp_path):
    checkpoints = SyncCheckpoints(tmp_path, Accelerator())

    def made(seed: int) -> tuple[nn.Module, dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        trunk = nn.Linear(3, 4)
        one = nn.Sequential(trunk, nn.Linear(4, 1))
        two = nn.Sequential(trunk, nn.Linear(4, 2))
        optimizers = {"all": ADAMW(one.parameters()), "head": ADAMW(two[1].parameters())}
        return trunk, {"one": one, "two": two}, optimizers

    trunk, models, optimizers = made(1)
    checkpoints.save(1, models, optimizers, {})
    assert {name for name in held_in(checkpoints.newest()) if "weight" in name} == {
        "model.one.0.weight",
        "model.one.1.weight",
        "model.two.1.weight",
    }
    other, turned, others = made(2)
    checkpoints.load(checkpoints.newest(), dict(reversed(turned.items())), others)
    assert torch.equal(other.weight, trunk.weight)
    assert torch.equal(turned["two"][1].weight, models["two"][1].weight)


def test_a_frozen_model_is_saved_once(tmp_path):
    root = tmp_path / "checkpoints"
    checkpoints = SyncCheckpoints(root, Accelerator(), complete=False)
    made = pair(1)
    made.models["generator"].requires_grad_(False)
    mine = {"discriminator": made.optimizers["discriminator"]}
    checkpoints.save(1, made.models, mine, {})
    assert "model.generator.weight" in load_file(
        next((tmp_path / "base").glob("*/frozen.safetensors"))
    )
    other = pair(2)
    other.models["generator"].requires_grad_(False)
    del other.optimizers["generator"]
    checkpoints.load(checkpoints.newest(), other.models, other.optimizers)
    for name, model in made.models.items():
        assert torch.equal(model.weight, other.models[name].weight)


def test_a_model_that_is_frozen_between_steps_is_not_taken_as_frozen(tmp_path):
    root = tmp_path / "checkpoints"
    checkpoints = SyncCheckpoints(root, Accelerator(), complete=False)
    made = pair(1).step()
    made.models["discriminator"].requires_grad_(False)  # for the step of the generator
    with pytest.raises(ValueError, match="set requires_grad to True before each save"):
        checkpoints.save(1, made.models, made.optimizers, {})
    assert not (tmp_path / "base").exists()
    made.models["discriminator"].requires_grad_(True)
    assert checkpoints.save(1, made.models, made.optimizers, {}) is None
    assert "model.discriminator.weight" in held_in(checkpoints.newest())


# --- parts of the state
# --------------------------------------------------------------------------------------------------


def test_the_averaged_buffers_of_each_model_are_recognized():
    gan = Gan(1)
    extra = gan.emas[0].tensors() | gan.emas[1].tensors()
    statistics = ["layers.1.running_mean", "layers.1.running_var"]
    expected = {f"model.generator.{name}" for name in ("layers.1.num_batches_tracked", "total")}
    for name in statistics:
        expected |= {f"model.generator.{name}", f"ema.smooth.{name}"}
    names = {*model_tensors(gan.state.model), *extra, *expected}
    assert buffers_of(gan.state.model, names) == expected


def test_sizes_and_weights_of_named_models(tmp_path):
    gan = Gan(1, "prepare")
    checkpoints = SyncCheckpoints(tmp_path, gan.accelerator)
    for _ in range(2):
        gan.step()
    gan.state.save(checkpoints, 2)
    newest = checkpoints.newest()

    # The bytes of a save, and of its tensors.
    file = newest / "rank-00000.safetensors"
    data = sum(tensor.nbytes for tensor in load_file(file).values())
    assert data <= gan.state.bytes_of_rank(checkpoints) <= data + 100
    trained = sum(p.nbytes for model in (gan.g, gan.d) for p in model.parameters())
    once, each = gan.state.size(optimizer_share=2.0)
    assert each == once + 2 * trained and once > 2 * trained

    # Only weights and EMAs are taken.
    other = Gan(2)
    other.state.take(newest)
    found, expected = other.everything(), gan.everything()
    assert not any(name.startswith("optimizer.") for name in found)
    taken = [name for name in found if name.startswith(("model.", "ema."))]
    assert all(torch.equal(found[name], expected[name]) for name in taken)


def wrapped() -> list[list[str]]:
    """Return the names of a model in wrappers: compile, accelerate's, compile."""
    from oneloop.launch.processes import start

    accelerator = start().accelerator
    found = []
    for inside, outside in ((True, False), (False, True), (True, True)):
        model = nn.Linear(1, 1)
        if inside:
            model = torch.compile(model, backend="eager")
        model = accelerator.prepare(model)
        if outside and (accelerator.num_processes > 1 or not inside):  # never twice in a row
            model = torch.compile(model, backend="eager")
        found.append([*model_tensors(together({"net": model}))])
    return found


@pytest.mark.parametrize(("config", "ranks"), with_slow([("single", 1), ("ddp", 2)], [("ddp", 2)]))
def test_wrappers_are_not_in_the_names(config, ranks):
    for found in run(wrapped, ranks=ranks, config=config).ok():
        assert found == 3 * [["model.net.weight", "model.net.bias"]]
