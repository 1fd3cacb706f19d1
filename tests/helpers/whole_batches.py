"""Tasks with a loss over the whole batch, and the gradient of one step of them in a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 32


class Tower(nn.Module):
    """A block, which recompute finds, and a projection."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Layer(dropout) for _ in range(2)))
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.out(self.blocks(x)), dim=1)


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Towers(nn.Module):
    """Two encoders, with scale and bias of CLIP and SigLIP as 0-dim parameters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.a, self.b = Tower(dropout), Tower(dropout)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.b(y), self.scale.exp(), self.bias * 1.0


class Pairs(torch.utils.data.Dataset):
    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(number, 8, generator=generator)
        self.y = self.x + 0.5 * torch.randn(number, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Contrast:
    """One of four contrastive losses; ``fault`` breaks a rule."""

    batch_columns = ("label",)

    def __init__(
        self, loss: str = "clip", dropout: float = 0.0, lora: bool = False, fault: str = ""
    ) -> None:
        self.table = F.normalize(torch.randn(BATCH, 6), dim=1)
        self.kind, self.dropout, self.lora, self.fault = loss, dropout, lora, fault

    def model(self) -> nn.Module:
        model = Towers(self.dropout)
        if self.fault == "norm":
            model.a.norm = nn.BatchNorm1d(8)
            model.a.register_forward_pre_hook(lambda tower, given: (tower.norm(*given),))
        if self.fault == "private generator":
            model.a.register_forward_hook(_noisy)
        if self.fault == "noise":
            model.a.register_forward_hook(
                lambda *given: given[2] + torch.rand((), generator=PRIVATE)
            )
        if self.lora:
            from peft import LoraConfig, inject_adapter_in_model

            scalars = [model.scale, model.bias]
            inject_adapter_in_model(
                LoraConfig(r=2, target_modules=["linear", "out"], init_lora_weights=False), model
            )
            for scalar in scalars:
                scalar.requires_grad_(True)
        if self.kind != "siglip":
            model.bias.requires_grad_(False)
        if self.kind == "supcon":
            model.b.requires_grad_(False)
            model.scale.requires_grad_(False)
        return model

    def train_set(self) -> Pairs:
        return Pairs(128, 1)

    def eval_sets(self) -> dict[str, Pairs]:
        return {"validation": Pairs(41, 2)}

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        x, y = (torch.stack(values) for values in zip(*samples, strict=True))
        return {"x": x, "y": y, "label": (4 * x[:, 0]).long() % 5}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["x"])))

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.net = model
        if self.fault == "changes the batch":
            batch["x"].mul_(2.0)
        a, b, scale, bias = model(batch["x"], batch["y"])
        if self.fault == "order":
            a = a[a[:, 0].argsort()]
        elif self.fault == "others":
            a = a - a.mean(0)
        elif self.fault == "constant":
            a = a + torch.arange(len(a))[:, None]
        elif self.fault == "table":
            a = self.table[: len(a)] + 0 * a.sum()
        elif self.fault == "scalar of batch":
            scale = a.mean()
        elif self.fault == "scalar of batch in training" and model.training:
            scale = scale + a.var(0).sum()
        elif self.fault == "others in training" and model.training:
            a = a - a.mean(0)
        elif self.fault == "complex":
            a = torch.complex(a, a)
        elif self.fault == "ragged":
            a = a[:, : len(a) + 1]
        elif self.fault == "random scalar" and model.training:
            scale = scale * (1 + torch.rand(()))
        elif self.fault == "one row":
            scale = scale.reshape(1)
        return {"a": a, "b": b, "scale": scale, "bias": bias}

    def batch_loss(
        self, parts: dict[str, Tensor], columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from oneloop.tasks.contrastive import info_nce, sigmoid_loss, supervised

        a, b, scale = parts["a"], parts["b"], parts["scale"]
        if self.fault == "parameter in the loss":
            scale = self.net.scale.exp()
        if self.fault == "no outputs":
            return scale  # type: ignore[return-value]
        if self.fault == "column":
            columns["x"]
        if self.kind == "infonce":
            loss = info_nce(a, b, scale)
        elif self.kind == "clip":
            loss = (info_nce(a, b, scale) + info_nce(b, a, scale)) / 2
        elif self.kind == "siglip":
            loss = sigmoid_loss(a, b, scale, parts["bias"])
        else:
            loss = supervised(a, columns["label"], 4.0)
        return loss / len(a) if self.fault == "mean" else loss, {"near": (a * b).sum(1).mean()}

    def metrics(self) -> Any:
        from oneloop.tasks.retrieval_metrics import Retrieval

        return Retrieval()

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        if self.fault == "update":
            batch["x"]
        metrics.update(outputs["a"], outputs["b"])


PRIVATE = torch.Generator().manual_seed(7)


def _noisy(module: nn.Module, given: object, output: Tensor) -> Tensor:
    return output + torch.rand((), generator=PRIVATE) if torch.is_grad_enabled() else output


def plain_loss(
    kind: str, a: Tensor, b: Tensor, scale: Tensor, bias: Tensor, label: Tensor
) -> Tensor:
    """Return the loss as the papers write it, without blocks."""
    target, similarity = torch.arange(len(a)), a @ b.T
    if kind == "infonce":
        return F.cross_entropy(scale * similarity, target, reduction="sum")
    if kind == "clip":
        both = F.cross_entropy(scale * similarity, target, reduction="sum")
        return (both + F.cross_entropy(scale * similarity.T, target, reduction="sum")) / 2
    if kind == "siglip":
        z = 2 * torch.eye(len(a), dtype=a.dtype) - 1
        return -F.logsigmoid(z * (scale * similarity + bias)).sum()
    total = a.new_zeros(())
    for i in range(len(a)):
        others = [j for j in range(len(a)) if j != i]
        shares = (4.0 * a[i] @ a[others].T).log_softmax(0)
        right = [n for n, j in enumerate(others) if label[j] == label[i]]
        if right:
            total = total - shares[right].mean()
    return total


def gradients(cases: Sequence[tuple[str, list[str]]]) -> dict[str, tuple[float, float, float]]:
    """Return for each case (loss, further words of the recipe) on rank 0: the loss, the largest
    difference of the step's gradient from the reference, and from one forward of the whole batch;
    both relative to the largest value."""
    from oneloop.checks.preflight import preflight
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.loop.gradients import Gradients
    from oneloop.measure.meter import Meter
    from oneloop.recipe.parse import read
    from oneloop.train import accumulate

    run, found = start(), {}
    for kind, words in cases:
        recipe = read(
            [
                f"{__file__}:Contrast",
                "--duration",
                "4",
                "--task.loss",
                kind,
                "--batch.size",
                str(BATCH),
                *words,
            ]
        )
        job = build_job(recipe, ranks=run.ranks, sharded=run.sharded)
        run.accelerator.gradient_accumulation_steps = job.layout.accumulate
        initial = {name: value.detach().clone() for name, value in job.model.state_dict().items()}
        model = run.prepare(job.model, blocks=job.built.blocks)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made = Gradients(job, run, model, parameters, preflight(job, run, model))
        samples = [job.train_set[index] for index in range(BATCH)]
        group = group_of(job, run, samples)
        accumulate(run, made, group, Meter(run.accelerator), position=0, measured=True)
        loss = float(made.total(torch.as_tensor(made.sums.loss))) / BATCH
        whole = [
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters
        ]
        places = [
            (rank, micro) for rank in range(run.ranks) for micro in range(job.layout.accumulate)
        ]
        by_leaf = sorted((job.layout.leaf(*place), place) for place in places)
        each = job.layout.each
        micros = [
            ((leaf,) if job.exact else place, samples[leaf * each : (leaf + 1) * each])
            for leaf, place in by_leaf
        ]
        differences = []
        for pieces in (micros, [((0, 0), samples)]):
            reference = _reference(job, initial, pieces)
            size = max(float(value.abs().max()) for value in reference)
            apart = [
                float((a.reshape(b.shape) - b).abs().max())
                for a, b in zip(whole, reference, strict=True)
            ]
            differences.append(max(apart) / size)
        found[f"{kind} {' '.join(words)}"] = (loss, *differences)
    return found


def group_of(job: Any, run: Any, samples: list[Any]) -> Any:
    from oneloop.data.step_batches import Group

    each, batches, weights = job.layout.each, [], []
    for micro in range(job.layout.accumulate):
        start = job.layout.leaf(run.rank, micro) * each
        batch, weight = job.collate([*enumerate(samples)][start : start + each])
        batches.append(batch)
        weights.append(weight)
    return Group(iter(batches), weights, apart=job.exact, total=float(len(samples)))


def _reference(
    job: Any, initial: dict[str, Tensor], micros: Sequence[tuple[tuple[int, ...], list[Any]]]
) -> list[Tensor]:
    """Return the gradient of the mean loss: the same micro-batches and seeds, concatenated, one
    loss, one backward."""
    from oneloop.basics.seeds import reseed

    model = job.task.model().double()
    model.load_state_dict(
        {name: value.reshape(model.state_dict()[name].shape) for name, value in initial.items()}
    )
    parts = []
    for own, samples in micros:
        reseed(torch.device("cpu"), job.recipe.seed, 0, *own, others=True)
        x, y = (torch.stack(values).double() for values in zip(*samples, strict=True))
        parts.append((*model(x, y), job.task.collate(samples)["label"]))
    a, b = (torch.cat([part[at] for part in parts]) for at in (0, 1))
    label = torch.cat([part[4] for part in parts])
    (plain_loss(job.task.kind, a, b, parts[0][2], parts[0][3], label) / len(a)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
