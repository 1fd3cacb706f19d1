"""Small programs of the shape of public ones: nanoGPT, a VAE, an LSTM, a siamese network, and
denoising diffusion. Each is a task for oneloop, and a module for a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate


class Port:
    """A task whose module returns the summed loss of a batch."""

    net: type[nn.Module]
    collate = staticmethod(default_collate)

    def model(self) -> nn.Module:
        return self.net()

    def train_set(self) -> list[dict[str, Tensor]]:
        raise NotImplementedError

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(next(iter(batch.values())))))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict]:
        return model(batch), {}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class GPT(nn.Module):
    """Token and position embeddings, one causal block, and a head that is tied to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(17, 16), nn.Embedding(12, 16)
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        x = self.tokens(ids[:, :-1]) + self.positions.weight
        q, k, v = self.qkv(self.first(x)).view(len(ids), 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(len(ids), 12, 16))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


class NanoGPT(Port):
    net = GPT

    def train_set(self) -> list[dict[str, Tensor]]:
        ids = torch.randint(0, 17, (40, 13), generator=generator())
        return [{"ids": one} for one in ids]

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(12 * len(batch["ids"])))


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(16, 3), nn.Linear(16, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.encoder(batch["x"])
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.exp(0.5 * log_variance) * batch["noise"]
        rebuilt = F.binary_cross_entropy_with_logits(
            self.decoder(code), batch["x"], reduction="sum"
        )
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return rebuilt + divergence


class VAE(Port):
    net = VariationalAutoencoder

    def train_set(self) -> list[dict[str, Tensor]]:
        x = (torch.rand(48, 20, generator=generator()) > 0.6).float()
        noise = torch.randn(48, 3, generator=generator())
        return [{"x": a, "noise": b} for a, b in zip(x, noise, strict=True)]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden, _ = self.lstm(batch["x"])
        return F.mse_loss(self.head(hidden[:, -1])[:, 0], batch["y"], reduction="sum")


class LSTM(Port):
    net = Recurrent

    def train_set(self) -> list[dict[str, Tensor]]:
        x = torch.randn(48, 9, 2, generator=generator())
        return [{"x": one, "y": one[:, 0].sum()} for one in x]


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        apart = F.pairwise_distance(self.embed(batch["a"]), self.embed(batch["b"]))
        close = batch["same"] * apart.square()
        far = (1 - batch["same"]) * F.relu(1.0 - apart).square()
        return (close + far).sum()


class Siamese(Port):
    net = Pairs

    def train_set(self) -> list[dict[str, Tensor]]:
        a, b = torch.randn(2, 48, 6, generator=generator())
        same = (torch.arange(48) % 2).float()
        b = torch.where(same[:, None] > 0, a + 0.1 * b, b)
        return [{"a": a[n], "b": b[n], "same": same[n]} for n in range(48)]


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.BatchNorm1d(32))
        self.head = nn.Linear(32, 2)
        kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 20), 0)
        self.register_buffer("kept", kept)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        kept = self.kept[batch["time"]][:, None]
        noisy = kept.sqrt() * batch["x"] + (1 - kept).sqrt() * batch["noise"]
        made = self.head(self.layers(torch.cat([noisy, batch["time"][:, None] / 20], 1)))
        return F.mse_loss(made, batch["noise"], reduction="sum")


class Diffusion(Port):
    net = Denoiser

    def train_set(self) -> list[dict[str, Tensor]]:
        x, noise = torch.randn(2, 48, 2, generator=generator())
        time = torch.randint(0, 20, (48,), generator=generator())
        return [{"x": x[n], "noise": noise[n], "time": time[n]} for n in range(48)]
