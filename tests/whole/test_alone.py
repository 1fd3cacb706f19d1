"""Promise 6: every component works alone in a plain Accelerate script. Each test is such a
script."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.duration",
    "oneloop.basics.seeds",
    "oneloop.checkpoint.checkpoints",
    "oneloop.checkpoint.weights",
    "oneloop.checks.replicas",
    "oneloop.checks.state",
    "oneloop.data.batch_layout",
    "oneloop.data.order",
    "oneloop.data.step_batches",
    "oneloop.ema",
    "oneloop.evaluation",
    "oneloop.machine.compile",
    "oneloop.machine.recompute",
    "oneloop.machine.reduction",
    "oneloop.machine.torch_settings",
    "oneloop.measure.clock",
    "oneloop.basics.tensor_hash",
    "oneloop.measure.meter",
    "oneloop.measure.noise_scale",
    "oneloop.measure.profiling",
    "oneloop.measure.stragglers",
    "oneloop.optim.adamw",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.bad_step_policy",
    "oneloop.optim.clip",
    "oneloop.optim.optimizers",
    "oneloop.optim.schedule",
    "oneloop.run.final_weights",
    "oneloop.show.metrics_file",
    "oneloop.task_protocol.contract",
    "oneloop.tasks.language.chunked_loss",
    "oneloop.train",
)


def test_order_and_groups_feed_a_plain_loop():
    from oneloop.data.batch_layout import BatchLayout
    from oneloop.data.order import Order
    from oneloop.data.step_batches import CollateWithWeight, groups

    accelerator = Accelerator()
    data = [(torch.randn(3), torch.randn(1)) for _ in range(20)]
    collate = CollateWithWeight(
        lambda pairs: {
            "x": torch.stack([x for x, _ in pairs]),
            "y": torch.stack([y for _, y in pairs]),
        },
        lambda batch: torch.tensor(float(len(batch["x"]))),
    )
    stream = groups(
        data,
        collate,
        Order(20, seed=0),
        BatchLayout(8, 1, 4),
        rank=0,
        seed=0,
        start=0,
        device=accelerator.device,
    )
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for group, _ in zip(stream, range(5)):
        for batch in group.batches:
            accelerator.backward((model(batch["x"]) - batch["y"]).square().sum() / group.weight)
        optimizer.step()
        optimizer.zero_grad()


def test_norm_clip_and_guard_in_a_plain_loop():
    from oneloop.optim.bad_step_guard import Guard
    from oneloop.optim.bad_step_policy import Fault
    from oneloop.optim.clip import clip_, global_norm

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = Guard(optimizer, device=accelerator.device)
    for x in (torch.ones(4, 3), torch.full((4, 3), torch.nan)):
        accelerator.backward(model(x).sum())
        norm = global_norm(model.parameters())
        clip_(model.parameters(), 1.0, norm)
        guard.step(norm)
        step = guard.resolve()
        optimizer.zero_grad()
    assert step.fault is Fault.NONFINITE and torch.isfinite(model.weight).all()


def test_the_guard_of_a_prepared_optimizer_keeps_bad_gradients_out():
    """accelerate wraps an optimizer: a flag that is set on the wrapper has no effect."""
    from oneloop.optim.bad_step_guard import Guard
    from oneloop.optim.bad_step_policy import Fault
    from oneloop.optim.clip import global_norm

    accelerator = Accelerator()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    guard = Guard(optimizer, device=accelerator.device)
    accelerator.backward(model(torch.full((4, 3), torch.nan)).sum())
    guard.step(global_norm(model.parameters()))
    assert guard.resolve().fault is Fault.NONFINITE and torch.isfinite(model.weight).all()


def test_evaluate_in_a_plain_script():
    from oneloop.evaluation import evaluate

    class MeanOfSquares:
        def collate(self, samples):
            return {"x": torch.tensor(samples)}

        def weight(self, batch):
            return torch.tensor(float(len(batch["x"])))

        def loss(self, model, batch):
            return model(batch["x"][:, None]).square().sum(), {}

    accelerator = Accelerator()
    found = evaluate(
        MeanOfSquares(),
        accelerator.prepare(nn.Identity()),
        [1.0, 2.0, 3.0],
        accelerator=accelerator,
        micro=2,
    )
    assert found == {"loss": 14 / 3}


def test_meter_in_a_plain_loop():
    from oneloop.measure.meter import Meter

    meter = Meter(Accelerator())
    with pytest.raises(RuntimeError, match="there is nothing to read: call step"):
        meter.read()
    for value in (1.0, 2.0, 3.0):
        meter.step(loss=torch.tensor(value), weight=2.0, samples=2, norm=torch.tensor(value))
    metrics = meter.read()
    assert (
        metrics["train/loss"] == 1.0
        and metrics["train/grad_norm"] == 3.0
        and metrics["train/samples_per_second"] > 0
    )


def test_muon_and_learning_rate_in_a_plain_loop():
    from oneloop.basics.duration import Duration, Scale
    from oneloop.optim.optimizers import build, muon, set_lr
    from oneloop.optim.schedule import cosine, learning_rate

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = build(muon, model, lr=0.05, weight_decay=0.0)
    rate = learning_rate(
        cosine, 0.05, warmup=Duration("10%"), final=0.0, options={}, scale=Scale(8, 80), total=100
    )
    x = torch.randn(64, 4)
    losses = []
    for step in range(100):
        set_lr(optimizer, rate(step))
        losses.append((model(x)[:, 0] - x.sum(1)).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]


def test_weights_in_a_plain_script(tmp_path):
    from oneloop.checkpoint.weights import load_weights
    from oneloop.run.final_weights import write_final

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    write_final(tmp_path / "final", model, object())
    other = nn.Linear(3, 1)
    load_weights(other, str(tmp_path))
    assert torch.equal(other.weight, model.weight)


def test_checkpoints_in_a_plain_loop(tmp_path):
    from oneloop.checkpoint.checkpoints import Checkpoints

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path, accelerator)
    for step in range(1, 4):
        accelerator.backward(model(torch.ones(4, 3)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, model, optimizer, {"step": step})
    checkpoints.finish()
    checkpoints.close()
    other = nn.Linear(3, 1)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    assert checkpoints.load(checkpoints.newest(), other, fresh)["step"] == 3
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(
        fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_ema_in_a_plain_loop():
    from oneloop.ema import EMA, EMASettings

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    ema = EMA(model, EMASettings(half_life=64))
    expected = model.weight.detach().clone()
    for step in range(1, 6):
        with torch.no_grad():
            model.weight += 1.0
        ema.update(16)
        expected.lerp_(model.weight.detach(), 1 - 0.5 ** (16 / min(64, 0.05 * 16 * step)))
    raw = model.weight.detach().clone()
    with ema.swapped():
        assert torch.allclose(model.weight, expected)
    assert torch.equal(model.weight, raw)


def test_recompute_and_compile_in_a_plain_script():
    from oneloop.machine.compile import compile_
    from oneloop.machine.recompute import recompute

    torch.manual_seed(0)
    models = [
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    recompute(models[1], "full", names=["GELU"])
    compile_(models[1], "whole", backend="eager")
    accelerator = Accelerator()
    for model in map(accelerator.prepare, models):
        accelerator.backward(model(torch.ones(2, 4)).square().sum())
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(one.grad, other.grad)


def test_noise_scale_in_a_plain_loop():
    from oneloop.measure.noise_scale import NoiseScale, Sensor
    from oneloop.optim.clip import global_norm

    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = accelerator.prepare(nn.Linear(30, 1, bias=False))
    sensor, noise = Sensor(accelerator, model), NoiseScale(window=300)
    for _ in range(300):
        with sensor.measuring():
            for _ in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(
                        (model.weight - 2 - torch.randn(8, 30)).square().sum() / 2 / 32 * 4
                    )
                sensor.micro_batch(8)
        noise.add(*sensor.read(32, 32), norm=float(global_norm(model.parameters())))
        model.zero_grad()
    expected = 30 / (model.weight - 2).square().sum()  # of N(weight - 2, 1) in 30 dimensions
    assert abs(noise.value / float(expected) - 1) < 0.1


def test_stragglers_in_a_plain_loop():
    from oneloop.measure.stragglers import Stragglers, product_seconds

    accelerator = Accelerator()
    stragglers = Stragglers(["here", "there"])
    reported = []
    for log in range(3):
        # gather them from all ranks; here the second one is twice as slow
        seconds = product_seconds(accelerator.device)
        times = [(0.0, seconds), (0.0, 2 * seconds)]
        reported += stragglers.judge(times, step_seconds=0.1, now=2.0 * log)
    assert len(reported) == 1 and reported[0].startswith("rank 1 on there slows down all ranks")


def test_policy_and_guard_skip_in_a_plain_loop():
    from oneloop.optim.bad_step_guard import Guard
    from oneloop.optim.bad_step_policy import BadSteps, Fault
    from oneloop.optim.clip import global_norm

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = Guard(optimizer, device=accelerator.device)
    bad, faults = BadSteps("skip", patience=3), []
    for x in (1.0, float("nan"), 1.0):
        accelerator.backward(model(torch.full((4, 3), x)).sum())
        guard.step(global_norm(model.parameters()))
        faults.append(guard.resolve().fault)
        optimizer.zero_grad()
    assert (
        faults == [Fault.NONE, Fault.NONFINITE, Fault.NONE] and bad.answer(faults[1])[0] == "skip"
    )
    assert optimizer.state[model.weight]["step"] == 2


def test_replica_check_garbage_and_switches_in_a_plain_loop():
    import gc

    from oneloop.checks.replicas import check_replicas
    from oneloop.machine.torch_settings import channels_last, float32_products, scheduled_garbage

    accelerator = Accelerator()
    float32_products("highest")
    model = nn.Conv2d(3, 8, 3)
    assert channels_last(model, True, device="cpu")
    model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with scheduled_garbage():
        for step in range(4):
            accelerator.backward(model(torch.ones(2, 3, 8, 8)).sum())
            optimizer.step()
            check_replicas(model, optimizer, step=step)
            assert not gc.isenabled()
    assert gc.isenabled() and model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_loss_without_logits_in_a_plain_script():
    from transformers import GPT2Config, GPT2LMHeadModel

    from oneloop.tasks.language.chunked_loss import without_logits

    model = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    ).eval()
    tokens, target = torch.randint(0, 50, (2, 7)), torch.randint(0, 50, (2, 7))
    target[0, :3] = -100
    expected = nn.functional.cross_entropy(
        model(input_ids=tokens).logits.flatten(0, 1), target.flatten(), reduction="sum"
    )
    gradients = torch.autograd.grad(expected, [*model.parameters()], allow_unused=True)
    without_logits(model)
    accelerator = Accelerator()
    loss = accelerator.prepare(model)(input_ids=tokens, target=target).total
    accelerator.backward(loss)
    assert torch.allclose(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients):
        assert gradient is None or torch.allclose(parameter.grad, gradient, atol=1e-5)


def test_meter_clock_and_profiling_in_a_plain_loop(tmp_path):
    from oneloop.measure.meter import Meter
    from oneloop.measure.profiling import Profiling

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = Meter(accelerator, model.parameters())
    with Profiling(tmp_path, accelerator.device, profile="2-3") as profiling:
        for step in range(1, 5):
            profiling.advance(step)
            meter.clock.mark("data")
            loss = model(torch.ones(4, 3)).sum()
            accelerator.backward(loss)
            meter.clock.mark("compute")
            meter.before_update()
            optimizer.step()
            meter.clock.lap("update")
            meter.step(loss=loss.detach(), weight=4, samples=4, norm=loss.detach())
    metrics = meter.read()
    assert (
        metrics["train/update_ratio"] > 0
        and abs(sum(v for k, v in metrics.items() if "share/" in k) - 1) < 1e-6
    )
    assert (tmp_path / "trace.json.gz").exists()


def test_contract_lines_and_sums_in_a_plain_script(tmp_path):
    from oneloop.basics.exit_codes import BadInput
    from oneloop.measure.meter import Sums
    from oneloop.show.metrics_file import Lines
    from oneloop.task_protocol.contract import Contract

    class Points:
        def collate(self, samples):
            return {"x": torch.tensor(samples)[:, None]}

        def weight(self, batch):
            return torch.tensor(float(len(batch["x"])))

        def loss(self, model, batch):
            return model(batch["x"]).square().mean(), {"half": torch.tensor(0.5)}

    class Numbers(Points):
        def weight(self, batch):
            return float(len(batch["x"]))

    contract, model = Contract(Points()), torch.nn.Linear(1, 1)
    one, two = contract.collated([1.0]), contract.collated([1.0, 1.0])
    assert 2 * contract.weight(one, samples=1) == contract.weight(two, samples=2)
    with pytest.raises(BadInput, match="Numbers.weight returned .* return a 0-dim tensor"):
        Contract(Numbers()).weight(one, samples=1)
    sums, lines = Sums(("half",)), Lines(tmp_path / "metrics.jsonl")
    for weight in (1.0, 3.0):
        sums.add(*contract.loss(model, one), weight=weight)
    lines.append({"step": 1, "train/half": float(sums.metrics[0]) / 4})
    state = lines.state_dict()
    lines.append({"step": 2})
    lines.back_to(state, kept=b"event")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/half": 0.5}\n'


def _trained_with_a_tree() -> str:
    """Train with the tree of micro-batch gradients; return the hash of the weights."""
    from accelerate.utils import GradientAccumulationPlugin

    from oneloop.basics.seeds import reseed
    from oneloop.basics.tensor_hash import fingerprint
    from oneloop.data.batch_layout import BatchLayout
    from oneloop.data.order import Order
    from oneloop.data.step_batches import CollateWithWeight, groups
    from oneloop.machine.reduction import Tree
    from oneloop.optim.adamw import AdamW
    from oneloop.optim.clip import clip_, global_norm

    torch.manual_seed(0)
    torch.set_num_threads(1)  # on a CPU, the number of threads changes the rounding of sums
    accumulation = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=accumulation)
    data = [(torch.tensor([x / 100]), torch.tensor([x / 50 + 1])) for x in range(100)]
    collate = CollateWithWeight(
        lambda pairs: {
            "x": torch.stack([x for x, _ in pairs]),
            "y": torch.stack([y for _, y in pairs]),
        },
        lambda batch: torch.tensor(float(len(batch["x"]))),
    )
    # eight micro-batches of two samples
    layout = BatchLayout(16, accelerator.num_processes, grain=2)
    accelerator.gradient_accumulation_steps = layout.accumulate
    model = accelerator.prepare(nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=0.01)
    optimizer.elementwise = True  # no fused kernel: sharding cannot change the rounding
    tree = Tree(model, parameters, ranks=layout.ranks, accumulate=layout.accumulate)
    where = {"rank": accelerator.process_index, "device": accelerator.device}
    stream = groups(data, collate, Order(len(data), seed=0), layout, seed=0, start=0, **where)
    for step, group in zip(range(100), stream, strict=False):
        for micro, batch in enumerate(group.batches):
            reseed(accelerator.device, 0, step, layout.leaf(accelerator.process_index, micro))
            # after the last micro-batch, .grad is the sum
            with accelerator.accumulate(model), tree:
                loss = (model(batch["x"]) - batch["y"]).square().sum()
                accelerator.backward(loss * tree.factor / layout.size)
        clip_(parameters, 1.0, global_norm(parameters, exact=True))
        optimizer.step()
        optimizer.zero_grad()
    bare = accelerator.unwrap_model(model)
    return fingerprint(dict(bare.named_parameters()))["bits"]


def test_a_tree_of_gradients_is_bit_identical_on_one_process_and_on_two():
    (one,), two = run(_trained_with_a_tree).ok(), run(_trained_with_a_tree, ranks=2).ok()
    assert two == [one, one]
