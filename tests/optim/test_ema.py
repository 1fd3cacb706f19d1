"""EMA weights: the closed form, bit-identical under every strategy, evaluated in place,
exported."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from oneloop.checkpoint.store import Store
from oneloop.ema import EMA, EMASettings, gamma
from oneloop.optim import optimizers
from oneloop.optim.optimizers import build
from oneloop.tools.export.power_emas import post_hoc
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.checkpoint.store",
    "oneloop.ema",
    "oneloop.optim.optimizers",
    "oneloop.tools.export.convert",
    "oneloop.tools.export.power_emas",
)

RECIPE = """
task: {name: tiny.Ragged}
batch: {size: 8}
duration: 24
log: {every: 6}
eval: {every: 8}
save: {every: 3, keep: 99}
ema: {half_life: 40 samples}
track: []
"""


def walk(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(steps + 1, 10, generator=generator).cumsum(0))


def averaged(weights: list[torch.Tensor], **kind) -> torch.Tensor:
    model = nn.Linear(10, 1, bias=False)
    model.weight.data.copy_(weights[0])
    ema = EMA(model, EMASettings(**kind))
    for one in weights[1:]:
        model.weight.data.copy_(one)
        ema.update(16)
    return ema.tensors()["ema.ema.weight"][0]


def closed_form(weights: list[torch.Tensor], keep) -> torch.Tensor:
    """Return the sum of (1 - k_n) * prod(later k) in float64; k_n = keep(n): share kept at update n
    = 1, 2, …"""
    kept = torch.tensor([keep(n) for n in range(1, len(weights))], dtype=torch.float64)
    later = torch.cat([kept.flip(0).cumprod(0).flip(0)[1:], torch.ones(1, dtype=torch.float64)])
    factors = torch.cat([kept.prod()[None], (1 - kept) * later])
    return (factors[:, None] * torch.stack(weights).double()).sum(0)


@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        ({"half_life": 400.0}, lambda n: 0.5 ** (16 / min(400, 0.05 * 16 * n))),
        ({"decay": 0.99}, lambda n: 0.99),
        ({"power": 0.1}, lambda n: (1 - 1 / n) ** (gamma(0.1) + 1)),
    ],
)
def test_200_updates_are_the_closed_form(kind, keep):
    weights = walk(200)
    assert (averaged(weights, **kind) - closed_form(weights, keep)).abs().max() / weights[
        -1
    ].abs().max() < 1e-6


def test_an_update_takes_the_number_of_samples():
    """Libraries for EMA take the model or its parameters there."""
    model = nn.Linear(1, 1)
    ema = EMA(model, EMASettings(half_life=9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in (model, model.parameters(), optimizer):
        with pytest.raises(TypeError, match="unsupported operand"):
            ema.update(wrong)
    ema.update(torch.tensor(64))
    assert ema.seen == 64


def test_every_keeps_the_half_life():
    weights = walk(200)
    rare = averaged(weights, half_life=400.0, every=5)
    assert torch.allclose(
        rare.double(),
        closed_form(weights[::5], lambda n: 0.5 ** (80 / min(400, 0.05 * 80 * n))),
        rtol=1e-5,
    )


def test_the_shadow_of_half_precision_keeps_its_bits():
    model = nn.Linear(10, 3).bfloat16()
    ema = EMA(model, EMASettings(decay=0.9))
    with torch.no_grad():
        model.weight.add_(1.0)
    ema.update(1)
    shadow, raw = ema.tensors()["ema.ema.weight"].clone(), model.weight.clone()
    assert shadow.dtype == torch.float32
    with ema.swapped():
        assert torch.equal(model.weight, shadow.bfloat16())
    assert torch.equal(model.weight, raw) and torch.equal(ema.tensors()["ema.ema.weight"], shadow)


def test_the_model_gets_its_weights_back_after_an_error():
    model = nn.Linear(4, 2)
    ema = EMA(model, EMASettings(decay=0.5))
    with torch.no_grad():
        model.weight.add_(1.0)
    raw = model.weight.clone()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), ema.swapped():
        model(torch.ones(3, 5))
    assert torch.equal(model.weight, raw)


class Late:
    """Copies weights as late as an EMA in host memory allows: just before the next step."""

    def __init__(self, weights: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self.weights = weights
        self.use = None
        optimizer.register_step_pre_hook(lambda *_: self.wait())

    def then(self, use) -> None:
        self.wait()
        self.use = use

    def wait(self) -> None:
        if self.use is not None:
            self.use([weight.clone() for weight in self.weights])
        self.use = None


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("grain", [False, True])
def test_an_average_in_host_memory_is_that_on_the_device(name, grain):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = build(getattr(optimizers, name), model, lr=0.1, weight_decay=0.1, elementwise=grain)
    here, there = EMA(model, EMASettings(decay=0.5)), EMA(model, EMASettings(decay=0.5))
    there._away = Late(there._weights, optimizer)
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        here.update(1)
        there.update(1)
    expected, found = here.tensors(), there.tensors()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class Uneven(nn.Module):
    """Seven rows on two ranks, and a bias of which one rank has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def given_weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(p.shape, generator=generator)
        for name, p in sorted(Uneven().named_parameters())
    }


def on_given_weights() -> dict:
    """Average the same weights under any strategy, and evaluate with and without the EMA
    weights."""
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.profiler import profile

    from oneloop.launch.processes import start

    started = start()
    model = started.prepare(Uneven())
    bare = getattr(model, "module", model)
    ema = EMA(model, EMASettings(half_life=100.0))

    def put(step: int) -> None:
        for name, parameter in bare.named_parameters():
            value = given_weights(step)[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            with torch.no_grad():
                parameter.copy_(value)

    put(0)
    ema.restart()
    with profile() as profiled:
        for step in range(1, 6):
            put(step) if step == 5 else None
            ema.update(32)
    sent = [
        event.name
        for event in profiled.events()
        if event.name.startswith("c10d") and "scatter" not in event.name
    ]
    x = torch.linspace(-1, 1, 15).view(3, 5)
    model.eval()
    with torch.no_grad():
        before = model(x)  # leaves the root unsharded under FSDP2
        with ema.swapped():
            inside = model(x)
        after = model(x)
    whole = {
        name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in ema.tensors().items()
    }
    return {
        "ema": {n: t.tolist() for n, t in whole.items()},
        "sent": sent,
        "raw": torch.equal(before, after),
        "inside": inside.tolist(),
        "shards": [getattr(t, "to_local", lambda t=t: t)().numel() for t in ema.tensors().values()],
    }


def test_the_same_bits_under_every_strategy_and_nothing_sent():
    single = run(on_given_weights).ok()[0]
    found = [
        single,
        *run(on_given_weights, ranks=2).ok(),
        *run(on_given_weights, ranks=2, config="fsdp2").ok(),
    ]
    assert all(one["ema"] == single["ema"] for one in found)
    # the shards are uneven
    assert found[3]["shards"] != found[4]["shards"] and 0 in found[4]["shards"]
    assert all(one["raw"] and not one["sent"] for one in found)
    plain = Uneven()
    plain.load_state_dict(
        {name.removeprefix("ema.ema."): torch.tensor(t) for name, t in single["ema"].items()}
    )
    expected = plain(torch.linspace(-1, 1, 15).view(3, 5))
    assert all(torch.allclose(torch.tensor(one["inside"]), expected, atol=1e-6) for one in found)


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_run_averages_evaluates_and_exports(tmp_path, ranks, config):
    from oneloop.cli import main

    (tmp_path / "r.yaml").write_text(RECIPE)
    # Saves every step, so that the closed form can use the run's own weights.
    run(
        train,
        ["r.yaml", "--save.every", "1", "--run.dir", "a"],
        ranks=ranks,
        config=config,
        folder=tmp_path,
    ).ok()
    lines = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["weights"] for line in lines if "eval/loss" in line] == ["raw", "ema"] * 3
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (
        summary["ema/eval/loss"]
        == [line for line in lines if line.get("weights") == "ema"][-1]["eval/loss"]
    )
    assert summary["ema/eval/loss"] != summary["eval/loss"]
    final = load_file(tmp_path / "a" / "final" / "ema.safetensors")
    if config == "single":
        assert (
            main(["export", str(tmp_path / "a"), "--to", str(tmp_path / "out"), "--weights", "ema"])
            == 0
        )
        exported = load_file(tmp_path / "out" / "model.safetensors")
        assert all(torch.equal(exported[name], final[name]) for name in final)
        assert (
            main(["export", str(tmp_path / "a"), "--to", str(tmp_path / "b"), "--weights", "emma"])
            == 2
        )
        weights = [
            start_weights(),
            *(saved(path, tmp_path) for path in Store(tmp_path / "a" / "checkpoints").sealed()),
        ]
        assert len(weights) == 25
        for name in final:
            closed = closed_form(
                [one[name].flatten() for one in weights],
                lambda n: 0.5 ** (8 / min(40, 0.05 * 8 * n)),
            )
            assert torch.allclose(final[name].flatten().double(), closed, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [None, 50])
def test_a_run_of_120_steps_has_the_closed_form_of_its_weights(tmp_path, left_out):
    """The test must also detect when one update in fifty is skipped."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    words = [
        "r.yaml",
        "--duration",
        "120",
        "--save.every",
        "1",
        "--save.keep",
        "999",
        "--eval.every",
        "0",
    ]
    run(_skipping_updates, left_out, [*words, "--run.dir", "a"], folder=tmp_path).ok()
    weights = [
        start_weights(),
        *(saved(path, tmp_path) for path in Store(tmp_path / "a" / "checkpoints").sealed()),
    ]
    assert len(weights) == 121
    final = load_file(tmp_path / "a" / "final" / "ema.safetensors")
    assert (apart(final, weights) < 1e-5) == (left_out is None)


def apart(average: dict[str, torch.Tensor], weights: list[dict[str, torch.Tensor]]) -> float:
    """Return the largest difference from the closed form of RECIPE's EMA, relative to the size of
    the weights."""
    largest = 0.0
    for name, values in average.items():
        keeps = lambda n: 0.5 ** (8 / min(40, 0.05 * 8 * n))  # noqa: E731
        expected = closed_form([step[name].flatten() for step in weights], keeps)
        largest = max(
            largest, float((values.flatten() - expected).abs().max() / expected.abs().max())
        )
    return largest


def _skipping_updates(every: int | None, words: list[str]) -> None:
    """Train, and skip every n-th update of the EMA weights."""
    update, count = EMA.update, 0

    def sometimes(self, amount):
        nonlocal count
        count += 1
        if every is None or count % every:
            update(self, amount)

    EMA.update = sometimes
    train(words)


def start_weights() -> dict[str, torch.Tensor]:
    from oneloop.basics.seeds import key
    from tiny import Ragged

    torch.manual_seed(key(0))
    return Ragged().model().state_dict()


def saved(checkpoint, tmp_path) -> dict[str, torch.Tensor]:
    from oneloop.tools.export.convert import export_checkpoint
    from tiny import Ragged

    export_checkpoint(checkpoint, tmp_path / "one", Ragged())
    found = load_file(tmp_path / "one" / "model.safetensors")
    shutil.rmtree(tmp_path / "one")
    return found


def test_any_width_is_mixed_after_the_run(tmp_path, capsys):
    from oneloop.cli import main

    (tmp_path / "r.yaml").write_text(
        RECIPE.replace("{half_life: 40 samples}", "{power: [0.05, 0.1, 0.07]}")
    )
    words = ["r.yaml", "--duration", "60", "--save.every", "5", "--eval.every", "0"]
    run(train, [*words, "--run.dir", "a"], folder=tmp_path).ok()
    # The mix for width 0.085 must be less than half as far from the stored 0.1 average as the raw
    # weights are.
    for path in Store(tmp_path / "a" / "checkpoints").sealed():
        assert {"ema-power-0.05", "ema-power-0.1"} <= set(
            json.loads((path / "state.json").read_text())
        )
    words = ["export", str(tmp_path / "a"), "--to"]
    assert main([*words, str(tmp_path / "mixed"), "--weights", "power:0.085"]) == 0
    assert main([*words, str(tmp_path / "kept"), "--weights", "ema-power-0.1"]) == 0
    assert main([*words, str(tmp_path / "raw")]) == 0
    mixed, kept, raw = (
        load_file(tmp_path / name / "model.safetensors") for name in ("mixed", "kept", "raw")
    )
    apart = {
        name: (mixed[name] - kept[name]).norm() / (raw[name] - kept[name]).norm() for name in kept
    }
    assert all(0 < value < 0.5 for value in apart.values())
    assert main([*words, str(tmp_path / "x"), "--weights", "power:0.5"]) == 2
    assert "below 0.289" in capsys.readouterr().err


def test_widths_that_only_later_checkpoints_have_are_mixed(tmp_path):
    from oneloop.cli import main

    saving = ["--save.every", "20", "--save.keep", "9", "--run.dir", "a"]
    for widths, more in (
        ("[0.05]", ["--duration", "40"]),
        ("[0.05, 0.1]", ["--duration", "60", "--run.accept_changes", "true"]),
    ):
        recipe = RECIPE.replace("{half_life: 40 samples}", f"{{power: {widths}}}")
        (tmp_path / "r.yaml").write_text(recipe)
        run(train, ["r.yaml", *saving, *more], folder=tmp_path).ok()
    words = ["export", str(tmp_path / "a"), "--to"]
    assert main([*words, str(tmp_path / "mixed"), "--weights", "power:0.085"]) == 0
    assert main([*words, str(tmp_path / "raw")]) == 0
    mixed, raw = (load_file(tmp_path / name / "model.safetensors") for name in ("mixed", "raw"))
    assert any(not torch.equal(mixed[name], raw[name]) for name in raw)


def test_post_hoc_mixes_come_near_the_average_that_was_not_kept():
    weights = walk(400)
    saved, values = [], []
    for upto in range(50, 401, 50):
        for width in (0.05, 0.1):
            saved.append((16.0 * upto, width))
            values.append(averaged(weights[: upto + 1], power=width))
    factors = post_hoc(saved, (16.0 * 400, 0.07))
    mixed = sum(factor * value for factor, value in zip(factors, values, strict=True))
    expected = averaged(weights, power=0.07)
    assert (mixed - expected).norm() / (averaged(weights, power=0.05) - expected).norm() < 0.1


@pytest.mark.parametrize(
    "bad",
    [{}, {"half_life": 3.0, "decay": 0.9}, {"decay": 1.0}, {"power": 0.3}],
)
def test_what_is_no_average_is_rejected(bad):
    with pytest.raises(ValueError, match="EMA|ema"):
        EMA(nn.Linear(2, 2), EMASettings(**bad))


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return list(torch.randn(steps, 16, 10, generator=generator) * 3 + 1)


def of_library(steps: int, ours: dict, update) -> float:
    """Train a model with BatchNorm, and return the largest difference from another library's EMA.

    ``update(model)`` returns a function that updates its average after step n = 1, 2, …, and the
    averaged module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ema = EMA(model, EMASettings(buffers=True, **ours))
    theirs, module = update(model)
    largest = 0.0
    for step, batch in enumerate(batches(steps), start=1):
        optimizer.zero_grad()
        model(batch.double()).square().mean().backward()
        optimizer.step()
        ema.update(16)
        theirs(step)
        expected = module.state_dict()
        for name, tensor in ema.tensors().items():
            apart = tensor - expected[name.removeprefix("ema.ema.")]
            largest = max(largest, float(apart.abs().max()))
    assert len(ema.tensors()) == 6  # with both statistics
    return largest


def timms(**how):
    from timm.utils import ModelEmaV3

    def update(model):
        average = ModelEmaV3(model, **how)
        return lambda step: average.update(model, step=step), average.module

    return update


def torchvisions(warmup: int, decay: float):
    """As train.py of torchvision's references, which copies the weights during the warm-up."""
    from torch.optim.swa_utils import AveragedModel

    def update(model):
        average = AveragedModel(
            model,
            avg_fn=lambda old, new, number: decay * old + (1 - decay) * new,
            use_buffers=True,
        )

        def one(step: int) -> None:
            average.update_parameters(model)
            if step <= warmup:
                average.n_averaged.fill_(0)

        return one, average.module

    return update


def ema_pytorchs(*, beta: float, after: int):
    """The rule of ema-pytorch, as denoising-diffusion-pytorch uses it with update_every=1."""

    def update(model):
        import copy

        average, calls = copy.deepcopy(model), 0

        def one(step: int) -> None:
            nonlocal calls
            number, calls = calls, calls + 1
            epoch = max(calls - after - 1, 0)
            decay = min(max(1 - (1 + epoch) ** -(2 / 3), 0.0), beta) if epoch else 0.0
            decay = 0.0 if number <= after else decay
            own = model.state_dict()
            for name, tensor in average.state_dict().items():
                if tensor.is_floating_point():
                    tensor.lerp_(own[name], 1 - decay)

        return one, average

    return update


def diffusers(*, decay: float, after: int, inv_gamma: float, power: float):
    """The rule of diffusers' EMAModel with use_ema_warmup; the buffers are averaged, too."""

    def update(model):
        import copy

        average = copy.deepcopy(model)

        def one(step: int) -> None:
            since = step - after - 1
            kept = min(1 - (1 + since / inv_gamma) ** -power, decay) if since > 0 else 0.0
            own = model.state_dict()
            for name, tensor in average.state_dict().items():
                if tensor.is_floating_point():
                    tensor.sub_((1 - kept) * (tensor - own[name]))

        return one, average

    return update


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            {"decay": 0.9, "start": 4, "warmup_power": 0.75, "warmup_gamma": 3.0},
            diffusers(decay=0.9, after=4, inv_gamma=3.0, power=0.75),
        ),
        ({"decay": 0.9, "warmup_power": 2 / 3}, timms(decay=0.9, use_warmup=True)),
        (
            {"decay": 0.9, "start": 7, "warmup_power": 0.75, "warmup_gamma": 2.0},
            timms(
                decay=0.9,
                use_warmup=True,
                update_after_step=7,
                warmup_gamma=2.0,
                warmup_power=0.75,
            ),
        ),
        ({"decay": 0.9, "start": 5}, timms(decay=0.9, update_after_step=5)),
        ({"decay": 0.9, "start": 6}, torchvisions(6, 0.9)),
        ({"decay": 0.9, "start": 0}, torchvisions(0, 0.9)),
        ({"decay": 0.9, "start": 10, "warmup_power": 2 / 3}, ema_pytorchs(beta=0.9, after=10)),
    ],
)
def test_a_decay_warms_up_as_in_other_libraries(ours, theirs):
    assert of_library(40, ours, theirs) < 1e-12


STATISTICS = """
import torch
from torch import nn
from torch.nn import functional as F

class Task:
    collate = staticmethod(torch.utils.data.default_collate)

    def model(self):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1), nn.Flatten(0))

    def train_set(self):
        g = torch.Generator().manual_seed(0)
        return [{"x": torch.randn(4, generator=g) * 3, "y": torch.randn((), generator=g)}
                for _ in range(64)]

    def eval_sets(self):
        return {"validation": self.train_set()[:32]}

    def weight(self, batch):
        return torch.tensor(float(len(batch["y"])))

    def loss(self, model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), {}
"""


def in_checkpoint(folder, name: str) -> torch.Tensor:
    """Return a tensor of a checkpoint that one rank wrote as a whole."""
    every = [load_file(path) for path in folder.glob("*.safetensors")]
    (found,) = [tensors[name] for tensors in every if name in tensors]
    return found


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_averaged_buffers_are_evaluated_exported_and_resumed(tmp_path, ranks, config):
    (tmp_path / "bn.py").write_text(STATISTICS)
    words = ["bn.py:Task", "--batch.size", "16", "--duration", "8", "--machine.workers", "0"]
    words += ["--save.every", "1", "--save.keep", "99", "--eval.every", "4", "--track", "none"]
    words += ["--ema.decay", "0.8", "--ema.start", "2", "--ema.warmup_power", "0.5"]
    words += ["--ema.buffers", "true", "--optimizer.lr", "0.1"]
    layout = {"ranks": ranks, "config": config, "folder": tmp_path}
    run(train, [*words, "--run.dir", "a"], **layout).ok()
    folder = tmp_path / "a"
    final = load_file(folder / "final/ema.safetensors")

    # The statistics are averages of those that the checkpoints have, of rank 0.
    checkpoints = Store(folder / "checkpoints").sealed()
    running = [in_checkpoint(path, "model.1.running_mean") for path in checkpoints]
    average = running[0]
    for number, new in enumerate(running, start=1):
        since = number - 3
        keep = min(0.8, 1 - (1 + since) ** -0.5) if since > 0 else 0.0
        average = average.lerp(new, 1 - keep)
    assert len(running) == 8 and not torch.allclose(average, running[-1], rtol=1e-3)
    assert torch.allclose(final["1.running_mean"], average, rtol=1e-5, atol=1e-6)

    # A resume from the middle gives the same bits, and the same metrics.
    shutil.copytree(folder, tmp_path / "b")
    for path in (tmp_path / "b/checkpoints").iterdir():
        if path.name.startswith("step-") and path.name > "step-00000005":
            shutil.rmtree(path)
    shutil.rmtree(tmp_path / "b/final")
    (tmp_path / "b/summary.json").unlink()
    again = run(train, [*words, "--run.dir", "b"], **layout)
    again.ok()
    assert "step-00000005" in again.output
    assert (tmp_path / "b/final/ema.safetensors").read_bytes() == (
        folder / "final/ema.safetensors"
    ).read_bytes()
    summaries = [json.loads((tmp_path / x / "summary.json").read_text()) for x in ("a", "b")]
    assert summaries[0]["ema/eval/loss"] == summaries[1]["ema/eval/loss"]
    assert summaries[0]["ema/eval/loss"] != summaries[0]["eval/loss"]


def test_a_width_that_is_mixed_later_has_its_own_buffers(tmp_path, monkeypatch):
    from oneloop.cli import main

    (tmp_path / "bn.py").write_text(STATISTICS)
    words = ["bn.py:Task", "--batch.size", "16", "--duration", "12", "--eval.every", "0"]
    words += ["--save.every", "1", "--save.keep", "99", "--track", "none", "--run.dir", "a"]
    words += ["--ema.power", "[0.1,0.2]", "--ema.buffers", "true", "--optimizer.lr", "0.1"]
    run(train, words, folder=tmp_path).ok()
    found = {}
    monkeypatch.chdir(tmp_path)
    for name in ("ema-power-0.1", "power:0.1", "raw"):
        out = tmp_path / name.replace(":", "-")
        assert main(["export", "a", "--to", str(out), "--weights", name]) == 0
        found[name] = load_file(out / "model.safetensors")
    for name in ("0.weight", "1.running_mean", "1.running_var"):
        saved, mixed, raw = (found[kind][name] for kind in found)
        assert torch.allclose(mixed, saved, atol=1e-4)
        assert not torch.allclose(mixed, raw, atol=1e-3), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ema.decay", "0.9", "--ema.start", "23"], "ema.start 23 is 23 steps of 24"),
    ],
)
def test_an_ema_that_would_be_a_copy_is_rejected(tmp_path, words, message):
    (tmp_path / "r.yaml").write_text(RECIPE)
    words = ["r.yaml", "--ema.half_life", "0", *words, "--run.dir", "a"]
    world = run(train, words, folder=tmp_path)
    assert world.codes == [2] and message in world.output, world.output
    assert not (tmp_path / "a").exists()
