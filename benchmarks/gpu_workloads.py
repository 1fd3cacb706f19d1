"""What the loops of ``gpu_loops.py`` and ``gpu_rivals.py`` train: models, and data in memory.

A language model gets the same batches from every loop: a short list of them, over and over. Loops
that are timed in turns therefore train on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from oneloop.data.order import StoredOrder
from oneloop.tasks.language import attention, chunked_loss
from oneloop.tasks.language.sequences import Samples, collated, cut_blocks, cut_texts
from oneloop.tasks.rows.cached_arrays import Ragged

ENDLESS = 10**6  # batches of a data set: no loop reaches its end

# A base of Llama in bf16 and adapters of rank 16 on all linear layers but the head.
LORA_RANK = 16
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Text:
    """A language model and random tokens, distributed as words are (Zipf's law)."""

    name: str
    architecture: str  # gpt2 or llama
    layers: int
    heads: int
    width: int
    vocabulary: int
    length: int  # tokens per row
    rows: int  # per step
    kv_heads: int | None = None
    mlp: int | None = None
    tied: bool = True
    packed: bool = False  # several documents per row, none of which attends to another
    lora: bool = False
    compile: str = "whole"  # the model (by hand with its loss), or regional: each block
    fused_loss: bool | str = "auto"  # oneloop's task.fused_loss
    texts: int = 4_000  # of the data set
    batches: int = 43  # different ones; every loop gets them in the same order, over and over

    unit = "tokens"

    @property
    def per_step(self) -> int:
        """Tokens per step."""
        return self.rows * self.length

    @cached_property
    def tokens(self) -> Ragged:
        """Texts of 20 to 4,000 tokens, about 650 on average."""
        random = np.random.default_rng(0)
        lengths = np.clip(random.lognormal(6.0, 1.0, self.texts), 20, 4_000).astype(np.int64)
        values = np.minimum(random.zipf(1.2, int(lengths.sum())), self.vocabulary) - 1
        return Ragged(values.astype(np.int32), np.cumsum(lengths))

    @cached_property
    def rows_of_texts(self) -> Samples:
        """All rows, as oneloop's language tasks make them."""
        if self.packed:
            return cut_texts(self.tokens, self.length, "split", room=self.length)
        return cut_blocks(self.tokens, self.length, whole=True, content=None)

    @cached_property
    def samples(self) -> Repeated:
        """The training set: the rows of the batches, in the order in which they are trained."""
        random = np.random.default_rng(1)
        count = min(self.batches * self.rows, len(self.rows_of_texts))
        chosen = random.permutation(len(self.rows_of_texts))[:count]
        return Repeated(self.rows_of_texts, chosen.tolist())

    def batch(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return samples as one batch, as oneloop's language tasks do."""
        return collated(samples, width=self.length, most=self.rows_of_texts.most)

    def build(self, device: torch.device) -> nn.Module:
        """Return the model that is trained, with weights drawn on the device."""
        base = self.base(device)
        return with_adapters(base, device) if self.lora else base

    def base(self, device: torch.device) -> nn.Module:
        """Return the model without adapters; under LoRA its weights are bfloat16."""
        import transformers

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.lora else before)
        try:
            with torch.device(device):
                if self.architecture == "gpt2":
                    return transformers.GPT2LMHeadModel(self.config())
                return transformers.LlamaForCausalLM(self.config())
        finally:
            torch.set_default_dtype(before)

    def config(self) -> Any:
        """Return the configuration of the model."""
        import transformers

        if self.architecture == "gpt2":
            return transformers.GPT2Config(
                vocab_size=self.vocabulary,
                n_positions=self.length,
                n_embd=self.width,
                n_layer=self.layers,
                n_head=self.heads,
                n_inner=self.mlp,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
            )
        return transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            intermediate_size=self.mlp or 4 * self.width,
            max_position_embeddings=self.length,
            tie_word_embeddings=self.tied,
            use_cache=False,
        )

    @property
    def flops_per_unit(self) -> float:
        """Floating-point operations of training on one token; attention counts as full.

        6 N + 12 L d T for N weights in matrix products (Kaplan et al. 2020; PaLM, appendix B). The
        frozen weights of LoRA have no gradient: 4 N.
        """
        return self._flops_of_weights + self._flops_of_attention

    @property
    def causal_flops_per_unit(self) -> float:
        """The same with causal attention: half of it (6 L d T)."""
        return self._flops_of_weights + self._flops_of_attention / 2

    @cached_property
    def _flops_of_weights(self) -> float:
        trained = frozen = 0
        for module in self.build(torch.device("meta")).modules():
            if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
                continue
            if module.weight.requires_grad:
                trained += module.weight.numel()
            else:
                frozen += module.weight.numel()
        return float(6 * trained + 4 * frozen)

    @property
    def _flops_of_attention(self) -> float:
        return 12 * self.layers * self.width * self._context

    @cached_property
    def _context(self) -> float:
        """Tokens that a token can attend to if attention counts as full, on average."""
        if not self.packed:
            return float(self.length)
        chosen = self.samples.indices
        documents = [len(span) - 1 for index in chosen for span in self.rows_of_texts[index]]
        lengths = np.array(documents, dtype=np.float64)
        return float((lengths**2).sum() / lengths.sum())


class Repeated:
    """Some rows of a data set, over and over, in this order.

    Args:
        rows: all rows.
        indices: of the rows that are used.
    """

    def __init__(self, rows: Any, indices: Sequence[int]) -> None:
        self.rows = rows
        self.indices = indices

    def __len__(self) -> int:
        return ENDLESS * len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.rows[self.indices[index % len(self.indices)]]

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> StoredOrder:
        """Return the order in which oneloop trains on the rows: as they are stored."""
        return StoredOrder(len(self))


def with_adapters(base: nn.Module, device: torch.device) -> nn.Module:
    """Add float32 adapters to a model in place, freeze all other weights, and return the model."""
    import peft

    settings = peft.LoraConfig(r=LORA_RANK, lora_alpha=32, target_modules=LORA_TARGETS)
    with torch.device(device):
        model = peft.inject_adapter_in_model(settings, base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


@contextmanager
def untested(text: Text) -> Iterator[None]:
    """Leave out oneloop's tests of a model in bf16: they compare kernels, whose rounding differs.

    A run loads such a model on the CPU and tests it there; here it is drawn on the device.
    """
    if not text.lora:
        yield
        return
    with (
        patch.object(attention, "_test_run", lambda *given, **more: None),
        patch.object(chunked_loss, "_test_run", lambda *given: None),
    ):
        yield


@dataclass(frozen=True)
class Images:
    """An image classifier, and images of random pixels in host memory."""

    name: str
    library: str  # timm or torchvision
    model: str
    side: int  # pixels
    rows: int  # images per step
    options: tuple[tuple[str, Any], ...] = ()
    channels_last: bool = False
    compile: str = "whole"
    classes: int = 1_000
    images: int = 2_048  # of the data set
    workers: int = 8

    unit = "images"

    @property
    def per_step(self) -> int:
        """Images per step."""
        return self.rows

    @cached_property
    def samples(self) -> ImageRows:
        """The training set."""
        return ImageRows(self.images, self.side, self.classes)

    def build(self, device: torch.device) -> nn.Module:
        """Return the model, with weights drawn on the device; it takes pixels from 0 to 255."""
        with torch.device(device):
            if self.library == "timm":
                import timm

                inner = timm.create_model(
                    self.model, num_classes=self.classes, **dict(self.options)
                )
            else:
                import torchvision

                inner = getattr(torchvision.models, self.model)(num_classes=self.classes)
            return Normalized(inner)

    @cached_property
    def flops_per_unit(self) -> float:
        """Floating-point operations of training on one image: three times those of its forward."""
        model = self.build(torch.device("meta"))
        pixels = torch.zeros(1, 3, self.side, self.side, dtype=torch.uint8, device="meta")
        with FlopCounterMode(display=False) as counter:
            model(pixels)
        return 3.0 * counter.get_total_flops()

    @property
    def causal_flops_per_unit(self) -> float:
        """The same: attention between the parts of an image is not causal."""
        return self.flops_per_unit


class ImageRows:
    """Images of random pixels with random labels."""

    def __init__(self, count: int, side: int, classes: int) -> None:
        random = torch.Generator().manual_seed(0)
        shape = (count, 3, side, side)
        self.pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        self.labels = torch.randint(0, classes, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.pixels[index], "label": self.labels[index]}


class Normalized(nn.Module):
    """A model of normalized images, for pixels from 0 to 255."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor) -> Tensor:
        return self.inner(image.float() / 127.5 - 1)  # type: ignore[no-any-return]


Workload = Text | Images
