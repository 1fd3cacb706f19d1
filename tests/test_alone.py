"""Promise 6: every part works alone in someone else's plain Accelerate script. Each test is such a script."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn


def test_order_and_groups_feed_a_plain_loop():
    from oneloop.data.groups import Split, Weighed, groups
    from oneloop.data.order import Order

    accelerator = Accelerator()
    data = [(torch.randn(3), torch.randn(1)) for _ in range(20)]
    collate = Weighed(lambda pairs: {"x": torch.stack([x for x, _ in pairs]), "y": torch.stack([y for _, y in pairs])},
                      lambda batch: torch.tensor(float(len(batch["x"]))))  # fmt: skip
    stream = groups(
        data, collate, Order(20, seed=0), Split(8, 1, 4), rank=0, seed=0, start=0, device=accelerator.device
    )
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for group, _ in zip(stream, range(5)):
        for batch in group.batches:
            accelerator.backward((model(batch["x"]) - batch["y"]).square().sum() / group.weight)
        optimizer.step()
        optimizer.zero_grad()


def test_norm_clip_and_guard_in_a_plain_loop():
    from oneloop.optim.clip import clip_, global_norm
    from oneloop.optim.guard import Guard
    from oneloop.optim.policy import Verdict

    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = Guard(optimizer, device=accelerator.device)
    for x in (torch.ones(4, 3), torch.full((4, 3), torch.nan)):
        accelerator.backward(model(x).sum())
        norm = global_norm(model.parameters())
        clip_(model.parameters(), 1.0, norm)
        guard.step(norm)
        optimizer.zero_grad()
    assert guard.verdict(wait=True) is Verdict.NONFINITE and torch.isfinite(model.weight).all()


def test_evaluate_in_a_plain_script():
    from oneloop.evaluate import evaluate

    class MeanOfSquares:
        def collate(self, samples):
            return {"x": torch.tensor(samples)}

        def weight(self, batch):
            return torch.tensor(float(len(batch["x"])))

        def loss(self, model, batch):
            return model(batch["x"][:, None]).square().sum(), {}

    accelerator = Accelerator()
    found = evaluate(
        MeanOfSquares(), accelerator.prepare(nn.Identity()), [1.0, 2.0, 3.0], accelerator=accelerator, micro=2
    )
    assert found == {"loss": 14 / 3}


def test_meter_in_a_plain_loop():
    from oneloop.watch.meter import Meter

    meter = Meter(Accelerator())
    for value in (1.0, 2.0, 3.0):
        meter.step(loss=torch.tensor(value), weight=2.0, samples=2, norm=torch.tensor(value))
    figures = meter.read()
    assert (
        figures["train/loss"] == 1.0 and figures["train/grad_norm"] == 3.0 and figures["train/samples_per_second"] > 0
    )


def test_muon_and_learning_rate_in_a_plain_loop():
    from oneloop.duration import Duration, Scale
    from oneloop.optim.build import build, muon, set_lr
    from oneloop.optim.schedule import cosine, learning_rate

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = build(muon, model, lr=0.05, weight_decay=0.0)
    rate = learning_rate(cosine, 0.05, warmup=Duration("10%"), final=0.0, options={}, scale=Scale(8, 80), total=100)
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
    from oneloop.checkpoint.export import load_weights, write_final

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
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
