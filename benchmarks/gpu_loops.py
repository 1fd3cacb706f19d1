"""Loops that ``gpu_speed.py`` times: plain PyTorch, Accelerate by hand, and oneloop.

All loops use the same model, drawn on the device, the same data, fused AdamW with weight decay on
matrices, gradient clipping and a learning rate per step. The plain loop also has what oneloop's
tasks use: the same compiled transformers model and attention kernel. Loops of other libraries are
in ``gpu_rivals.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils.data import DataLoader, RandomSampler, default_collate

from gpu_pacer import LOG_EVERY, Pacer, Setting
from gpu_trace import FORWARD
from gpu_workloads import Images, Repeated, Text, Workload, untested
from oneloop import fit
from oneloop.tasks.language.attention import borders, causal
from oneloop.tasks.language.language_model import LanguageModel
from oneloop.tasks.language.models import prepare_attention
from oneloop.tasks.language.sequences import IGNORE, cut_blocks

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARMUP = 100  # steps
FOREVER = 1_000_000  # steps; the other process ends the loop


# The plain loop: without host waits, and nothing that training does not need.


def by_hand(setting: Setting, pacer: Pacer) -> None:
    """Train with a plain loop, and the same compiled model as oneloop."""
    workload = setting.workload
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = isinstance(workload, Images)
    model = workload.build(setting.device)
    if isinstance(workload, Images):
        loss_of = _image_loss(workload, model, setting)
        batches = _image_batches(workload, setting)
    else:
        loss_of = _text_loss(workload, model, setting)
        batches = _text_batches(workload, setting)
    if setting.compiled and workload.compile == "whole":
        loss_of = torch.compile(loss_of)
    elif setting.compiled:
        for block in model.model.layers:  # type: ignore[union-attr]
            block.compile(fullgraph=True)  # an error instead of a block that silently runs eager

    pacer.knows(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(trained)
    gc.collect()
    gc.disable()
    total = torch.zeros((), device=setting.device)
    for number, batch in enumerate(batches):
        pacer.step()

        # Forward and backward.
        with record_function(FORWARD):
            loss = loss_of(**batch)
        loss.backward()

        # Clip, update, and add up the loss on the device.
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if number % LOG_EVERY == LOG_EVERY - 1:
            total.item()  # host wait


def adamw(trained: list[nn.Parameter]) -> torch.optim.AdamW:
    """Return fused AdamW, with weight decay on matrices."""
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def _autocast(setting: Setting) -> Any:
    if setting.mixed_precision == "no":
        return nullcontext()
    return torch.autocast(setting.device.type, torch.bfloat16)


def _text_loss(workload: Text, model: Any, setting: Setting) -> Callable[..., Tensor]:
    # As oneloop: a ready 4-D mask. Without one, transformers builds a dense mask in a compiled
    # graph, which rules out flash attention, or asks the device about padding (host wait).
    with untested(workload):
        masked = prepare_attention(model, packed=workload.packed, router_loss="refuse")
    assert masked
    mean_loss = _mean_loss
    if setting.compiled and workload.compile == "regional":
        mean_loss = torch.compile(_mean_loss)

    def loss_of(
        input: Tensor,
        target: Tensor,
        position: Tensor | None = None,
        document: Tensor | None = None,
        cuts: Tensor | None = None,
    ) -> Tensor:
        more: dict[str, Any] = {"attention_mask": causal(input.device)}
        if document is not None and cuts is not None:
            more = {"position_ids": position, "attention_mask": borders(document, cuts)}
        with _autocast(setting):
            logits = model(input_ids=input, use_cache=False, **more).logits
        return mean_loss(logits, target)

    return loss_of


def _mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORE)


def _text_batches(workload: Text, setting: Setting) -> Iterator[dict[str, Tensor]]:
    """Yield batches on the device; the copy of the next one is queued before it is needed."""
    samples = workload.samples
    upcoming = None
    for start in range(0, len(samples), workload.rows):
        current = upcoming
        batch = workload.batch([samples[start + row] for row in range(workload.rows)])
        kept = ("input", "target", "position", "document", "cuts")
        upcoming = {name: _sent(batch[name], setting) for name in kept if name in batch}
        if current is not None:
            yield current


def _sent(tensor: Tensor, setting: Setting) -> Tensor:
    if setting.device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(setting.device, non_blocking=True)


def _image_loss(workload: Images, model: nn.Module, setting: Setting) -> Callable[..., Tensor]:
    if workload.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss_of(image: Tensor, label: Tensor) -> Tensor:
        with _autocast(setting):
            logits = model(image)
        return F.cross_entropy(logits.float(), label)

    return loss_of


def _image_batches(workload: Images, setting: Setting) -> Iterator[dict[str, Tensor]]:
    loader = DataLoader(
        workload.samples,  # type: ignore[arg-type]
        batch_size=workload.rows,
        sampler=RandomSampler(workload.samples, replacement=True, num_samples=10**8),
        num_workers=workload.workers,
        pin_memory=setting.device.type == "cuda",
        drop_last=True,
    )
    if setting.device.type != "cuda":
        yield from loader
        return

    # Copy the next batch on a stream of its own, while the device computes with this one.
    side = torch.cuda.Stream()
    ready = None
    for batch in loader:
        with torch.cuda.stream(side):
            upcoming = {
                name: value.to(setting.device, non_blocking=True) for name, value in batch.items()
            }
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(side)
        for value in upcoming.values():
            value.record_stream(torch.cuda.current_stream())
        ready = upcoming


# Accelerate by hand.


class LabelledRows:
    """Rows for loops whose model computes its loss from ``labels``.

    A model of transformers shifts the labels itself, and takes no borders between documents: it
    gets full rows of the concatenated texts.
    """

    def __init__(self, workload: Workload) -> None:
        self._images = isinstance(workload, Images)
        self._rows = workload.samples
        if isinstance(workload, Images):  # no loop reaches the end, where loaders start again
            self._rows = Repeated(workload.samples, range(len(workload.samples)))
        if isinstance(workload, Text) and workload.packed:
            full = cut_blocks(workload.tokens, workload.length, whole=True, content=None)
            count = min(workload.batches * workload.rows, len(full))
            self._rows = Repeated(full, range(count))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._images:
            sample = self._rows[index]
            return {"image": sample["image"], "labels": sample["label"]}
        tokens: NDArray[np.int64] = self._rows[index].documents[0][:-1].astype(np.int64)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(tokens)}


class WithLoss(nn.Module):
    """An image model that returns its loss, as transformers' models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(image)
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def by_accelerate(setting: Setting, pacer: Pacer) -> None:
    """Train with a loop as in Accelerate's documentation, around the model and its own loss."""
    from accelerate import Accelerator

    workload = setting.workload
    accelerator = Accelerator(
        mixed_precision=setting.mixed_precision,
        cpu=setting.device.type == "cpu",
        dynamo_backend="inductor" if setting.compiled else "no",
    )
    model = workload.build(setting.device)
    if isinstance(workload, Images):
        model = WithLoss(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(trained)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP)
    )
    loader = DataLoader(
        LabelledRows(workload),  # type: ignore[arg-type]
        batch_size=workload.rows,
        num_workers=workload.workers if isinstance(workload, Images) else 2,
        pin_memory=setting.device.type == "cuda",
    )
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    pacer.knows(model)
    total = torch.zeros((), device=setting.device)
    model.train()
    for number, batch in enumerate(loader):
        pacer.step()
        with accelerator.accumulate(model):
            with record_function(FORWARD):
                loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.detach()
        if number % LOG_EVERY == LOG_EVERY - 1:
            total.item()  # host wait


# oneloop: tasks around the same models and data. fit() needs classes without arguments; the process
# of a loop sets what they are about.

NOW: dict[str, Any] = {}


def at_step(progress: Any, model: nn.Module) -> None:
    """Call the pacer at a step, when a task's loss is called for it.

    The checks before training call the loss, too, and so do repeats of a micro-batch.
    """
    if progress.total > 1:
        NOW["pacer"].knows(model)
        NOW["pacer"].step(progress.step)


class RandomText(LanguageModel):
    """oneloop's language modelling on a :class:`Text`."""

    progress: Any = None  # set by oneloop when training begins, after its checks

    def __init__(self) -> None:
        text: Text = NOW["setting"].workload
        self.text = text
        super().__init__(
            packed=text.packed,
            length=text.length,
            architecture="gpt2" if text.architecture == "gpt2" else "llama",
            layers=text.layers,
            heads=text.heads,
            width=text.width,
            padded_vocab=text.vocabulary,
            fused_loss=text.fused_loss,  # type: ignore[arg-type]
        )
        self.sample_weight = None if text.packed else float(text.length)

    @property
    def entries(self) -> int:
        return self.text.vocabulary

    def bare_model(self) -> nn.Module:
        return self.text.build(NOW["setting"].device)

    def model(self) -> nn.Module:
        with untested(self.text):
            return super().model()

    def train_set(self) -> Any:
        return self.text.samples

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return self.text.batch(samples)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        at_step(self.progress, model)
        with record_function(FORWARD):
            return super().loss(model, batch)


class RandomImages:
    """Image classification on :class:`Images`."""

    progress: Any = None
    sample_weight = 1.0

    def model(self) -> nn.Module:
        setting: Setting = NOW["setting"]
        return setting.workload.build(setting.device)

    def train_set(self) -> Any:
        return NOW["setting"].workload.samples

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return default_collate(samples)  # type: ignore[no-any-return]

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["label"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        at_step(self.progress, model)
        with record_function(FORWARD):
            loss = F.cross_entropy(model(batch["image"]).float(), batch["label"], reduction="sum")
        return loss, {}


def by_oneloop(
    setting: Setting,
    pacer: Pacer,
    task: type[LanguageModel] | None = None,
    machine: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
) -> None:
    """Train with oneloop's loop.

    Args:
        setting: what is trained, and where.
        pacer: of this process.
        task: in place of :class:`RandomText`.
        machine: more keys of ``machine``.
        recipe: other groups of keys in place of those below, such as ``schedule`` and ``save``.
    """
    NOW["setting"] = setting
    NOW["pacer"] = pacer
    workload = setting.workload
    images = isinstance(workload, Images)
    keys: dict[str, Any] = {
        "duration": FOREVER,
        "batch": {"size": workload.rows},
        "optimizer": {
            "name": "adamw",
            "lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "clip": CLIP,
            "betas": [0.9, 0.95],
        },
        "schedule": {"name": "constant", "warmup": WARMUP},
        "machine": {
            "compile": workload.compile if setting.compiled else "none",
            "matmul": "high",
            "cudnn_benchmark": images,
            "workers": workload.workers if isinstance(workload, Images) else "auto",
            **(machine or {}),
        },
        "eval": {"every": 0, "samples": 0},
        "save": {"every": 0},
        "log": {"every": LOG_EVERY},
        "watch": {"output": "quiet"},
        "track": [],
        "run": {"dir": str(setting.folder / "run"), "resume": "never"},
    }
    fit(
        RandomImages if images else task or RandomText,
        mixed_precision=setting.mixed_precision,
        **{**keys, **(recipe or {})},
    )


# Without the repeats of micro-batches and the comparisons of replicas, which take time in the first
# log lines of a run, and once in 1,000 steps later.
by_oneloop_unchecked = partial(by_oneloop, machine={"check_every": 0})


def by_oneloop_with_logits(setting: Setting, pacer: Pacer) -> None:
    """Train with oneloop's loop, with the loss on logits that are in memory."""
    assert isinstance(setting.workload, Text)
    workload = replace(setting.workload, fused_loss=False)
    by_oneloop(replace(setting, workload=workload), pacer)
