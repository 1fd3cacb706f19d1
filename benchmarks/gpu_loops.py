"""The loops that ``gpu_speed.py`` compares: hand-written, oneloop, and transformers' Trainer.

A loop runs in a process of its own, which stays alive, so that loops alternate without building and
compiling a model again. It calls ``Pacer.step`` at the start of each step. The pacer runs the
phases that the other process asks for (warm up, time, trace, count waits), and waits between them,
with the device's cache released. All loops use the same model, drawn on the device, the same data,
fused AdamW with weight decay on matrices, gradient clipping and a learning rate per step.
"""

from __future__ import annotations

import cProfile
import gc
import os
import pstats
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, RandomSampler, default_collate
from torch.utils.flop_counter import FlopCounterMode

from gpu_lines import FORK
from gpu_trace import FORWARD, events_of, reduce
from oneloop import fit
from oneloop.tasks.language import attention, chunked_loss
from oneloop.tasks.language.attention import borders, causal
from oneloop.tasks.language.language_model import LanguageModel
from oneloop.tasks.language.models import prepare_attention
from oneloop.tasks.language.sequences import IGNORE, Packed, collated, spans
from oneloop.tasks.language.tokens import Blocks
from oneloop.tasks.rows.cached_arrays import Ragged

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
CLIP = 1.0
LOG_EVERY = 20  # steps; each loop reads its loss then. Timed phases are multiples of it
SKIPPED = 3  # steps after a pause that are not timed: the cache of the device fills again
FUNCTIONS = 40  # of a profile of the host
FOREVER = 1_000_000  # steps; the other process ends the loop

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
    def samples(self) -> Any:
        """The training set, as oneloop's language tasks make it."""
        if self.packed:
            return Packed(spans(self.tokens, self.length, "split"), None)
        return Blocks(self.tokens, self.length, whole=True, content=None)

    def batch(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return samples as one batch, as oneloop's language tasks do."""
        if self.packed:
            return collated(samples, width=self.length, most=self.samples.most)
        return collated(samples)

    def build(self, device: torch.device) -> nn.Module:
        """Return the model, with weights drawn on the device."""
        import transformers

        with torch.device(device):
            if self.architecture == "gpt2":
                config = transformers.GPT2Config(
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
                return transformers.GPT2LMHeadModel(config)
            config = transformers.LlamaConfig(
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
            if not self.lora:
                return transformers.LlamaForCausalLM(config)
            return _with_adapters(config)

    @cached_property
    def flops_per_unit(self) -> float:
        """Floating-point operations of training on one token; attention counts as full.

        6 N + 12 L d T for N weights in matrix products (Kaplan et al. 2020; PaLM, appendix B). The
        frozen weights of LoRA have no gradient: 4 N.
        """
        trained = frozen = 0
        for module in self.build(torch.device("meta")).modules():
            if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
                continue
            if module.weight.requires_grad:
                trained += module.weight.numel()
            else:
                frozen += module.weight.numel()
        attention = 12 * self.layers * self.width * self._context
        return float(6 * trained + 4 * frozen + attention)

    @property
    def _context(self) -> float:
        """Tokens that a token can attend to if attention counts as full, on average."""
        if not self.packed:
            return float(self.length)
        lengths = self.samples.spans.lengths.astype(np.float64)
        return float((lengths**2).sum() / lengths.sum())


def _with_adapters(config: Any) -> nn.Module:
    """Return a frozen Llama in bf16 with float32 adapters, on the current device."""
    import peft
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        base = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    settings = peft.LoraConfig(r=LORA_RANK, lora_alpha=32, target_modules=LORA_TARGETS)
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


class Pacer:
    """Runs the phases that another process asks for, at the steps of a loop."""

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self._device = device
        self._began = time.perf_counter()
        self._phases = self._run()
        # Frozen weights: they are in host memory while the loop is paused.
        self._frozen: list[nn.Parameter] = []
        self._copies: list[Tensor] = []

    def knows(self, model: nn.Module) -> None:
        """Take the frozen weights of the model out of the device's memory in pauses."""
        if not self._frozen:
            self._frozen = [one for one in model.parameters() if not one.requires_grad]

    def step(self) -> None:
        """Call it at the start of each step."""
        next(self._phases)

    def _run(self) -> Iterator[None]:
        """Do what is asked, and yield when a step is to be made."""
        while True:
            kind, count = self._connection.recv()
            self._resume()
            if kind in ("time", "last"):
                answer = yield from self._timed(count)
            elif kind == "trace":
                answer = yield from self._traced(count)
            elif kind == "host":
                answer = yield from self._profiled(count)
            else:
                answer = yield from self._waited(count)
            if kind != "last":
                self._release()
            self._connection.send(answer)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _release(self) -> None:
        """Leave the device's memory to the other loop: the cache, and all frozen weights."""
        self._synchronize()
        on_gpu = self._device.type == "cuda"
        for parameter in self._frozen[len(self._copies) :]:  # once: they never change
            copy = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=on_gpu)
            self._copies.append(copy.copy_(parameter.data))
        for parameter, copy in zip(self._frozen, self._copies):
            parameter.data = copy
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _resume(self) -> None:
        for parameter, copy in zip(self._frozen, self._copies):
            parameter.data = copy.to(self._device, non_blocking=True)

    def _skip(self) -> Iterator[None]:
        for _ in range(SKIPPED):
            yield

    def _timed(self, count: int) -> Iterator[None]:
        """Time ``count`` steps."""
        yield from self._skip()
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(count):
            yield
        self._synchronize()
        over = time.perf_counter()
        answer = {"seconds": over - began, "since_start": over - self._began}
        if self._device.type == "cuda":
            answer["allocated"] = torch.cuda.max_memory_allocated()
            answer["reserved"] = torch.cuda.max_memory_reserved()
        return answer  # type: ignore[return-value]

    def _traced(self, count: int) -> Iterator[None]:
        """Reduce a trace of ``count`` steps."""
        yield from self._skip()
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profile(activities=kinds):  # the first profile of a process starts slowly
            yield
            self._synchronize()
        with profile(activities=kinds) as profiler:
            for _ in range(count):
                yield
            self._synchronize()
        full = reduce(events_of(profiler), steps=count)
        if self._device.type != "cuda":
            return full  # type: ignore[return-value]

        # Without the operations of the CPU, which slow down the host: when is the device idle?
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(count):
                yield
            self._synchronize()
        light = reduce(events_of(profiler), steps=count)
        gaps = "longest gaps of the device"
        tables = {**full.tables, gaps: light.tables[gaps]}
        return replace(full, idle_share=light.idle_share, tables=tables)  # type: ignore[return-value]

    def _profiled(self, count: int) -> Iterator[None]:
        """Return the functions in which the host spends its time."""
        yield from self._skip()
        self._synchronize()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(count):
            yield
        profiler.disable()
        self._synchronize()
        functions = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        rows = [
            {
                "ms per step": 1e3 * own / count,
                "with callees": 1e3 * whole / count,
                "calls per step": calls / count,
                "function": f"{name} ({'/'.join(Path(file).parts[-2:])}:{line})",
            }
            for (file, line, name), (_, calls, own, whole, _) in functions.items()
        ]
        rows.sort(key=lambda row: -row["ms per step"])
        return rows[:FUNCTIONS]  # type: ignore[return-value]

    def _waited(self, count: int) -> Iterator[None]:
        """Count the warnings of torch about operations that wait for the device."""
        yield from self._skip()
        if self._device.type != "cuda":
            for _ in range(count):
                yield
            return {"waits": 0, "steps": count}  # type: ignore[return-value]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(count):
                yield
            torch.cuda.set_sync_debug_mode("default")
        messages = [str(one.message) for one in caught]
        waits = sum("called a synchronizing CUDA operation" in message for message in messages)
        return {"waits": waits, "steps": count}  # type: ignore[return-value]


@dataclass(frozen=True)
class Setting:
    """How a loop runs."""

    workload: Workload
    device: torch.device
    mixed_precision: str  # bf16 or no
    compiled: bool
    folder: Path


Loop = Callable[[Setting, Pacer], None]


class Contender:
    """A loop in its own process, which is paused unless a phase runs."""

    def __init__(self, loop: Loop, setting: Setting) -> None:
        self._connection, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_contend, args=(loop, setting, theirs))
        self._process.start()
        theirs.close()

    def ask(self, kind: str, count: int) -> Any:
        """Run a phase of ``count`` steps; return its answer. Raise RuntimeError if the loop
        fails."""
        self.request(kind, count)
        return self.answer()

    def request(self, kind: str, count: int) -> None:
        """Begin a phase of ``count`` steps."""
        self._connection.send((kind, count))

    def answer(self) -> Any:
        """Wait for the end of the phase, and return its answer."""
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process of a loop ended with code {code}") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        """End the process, and wait until its memory is free."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._connection.close()


def _contend(loop: Loop, setting: Setting, connection: Connection) -> None:
    setting.folder.mkdir(parents=True, exist_ok=True)
    # No loop finds the compiled kernels of another one.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(setting.folder / "inductor")
    try:
        # After the fork: torch must see the device before the loop asks for it.
        pacer = Pacer(connection, setting.device)
        torch.manual_seed(0)
        loop(setting, pacer)
        connection.send("the loop ended by itself")
    except BaseException as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {error}"[:400])
    os._exit(1)


# The best hand-written loops: without host waits, and nothing that training does not need.


def by_hand(setting: Setting, pacer: Pacer) -> None:
    """Train with a hand-written loop."""
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
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
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
            group["lr"] = LEARNING_RATE * min(1.0, (number + 1) / 100)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if number % LOG_EVERY == LOG_EVERY - 1:
            total.item()  # host wait


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
    random = np.random.default_rng(1)
    upcoming = None
    while True:
        current = upcoming
        indices = random.integers(0, len(workload.samples), workload.rows).tolist()
        batch = workload.batch([workload.samples[index] for index in indices])
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


# oneloop: tasks around the same models and data. fit() needs classes without arguments; the process
# of a loop sets what they are about.

_NOW: dict[str, Any] = {}


class RandomText(LanguageModel):
    """oneloop's language modelling on a :class:`Text`."""

    progress: Any = None  # set by oneloop when training begins, after its checks

    def __init__(self) -> None:
        text: Text = _NOW["setting"].workload
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
        return self.text.build(_NOW["setting"].device)

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
        if self.progress.total > 1:
            _NOW["pacer"].knows(model)
            _NOW["pacer"].step()
        with record_function(FORWARD):
            return super().loss(model, batch)


class RandomImages:
    """Image classification on :class:`Images`."""

    progress: Any = None
    sample_weight = 1.0

    def model(self) -> nn.Module:
        setting: Setting = _NOW["setting"]
        return setting.workload.build(setting.device)

    def train_set(self) -> Any:
        return _NOW["setting"].workload.samples

    def eval_sets(self) -> dict[str, Any]:
        return {}

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return default_collate(samples)  # type: ignore[no-any-return]

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["label"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.progress.total > 1:
            _NOW["pacer"].step()
        with record_function(FORWARD):
            loss = F.cross_entropy(model(batch["image"]).float(), batch["label"], reduction="sum")
        return loss, {}


def by_oneloop(setting: Setting, pacer: Pacer) -> None:
    """Train with oneloop's loop."""
    _NOW["setting"] = setting
    _NOW["pacer"] = pacer
    workload = setting.workload
    images = isinstance(workload, Images)
    fit(
        RandomImages if images else RandomText,
        mixed_precision=setting.mixed_precision,
        duration=FOREVER,
        batch={"size": workload.rows},
        optimizer={
            "name": "adamw",
            "lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "clip": CLIP,
            "betas": [0.9, 0.95],
        },
        schedule={"name": "constant", "warmup": 100},
        machine={
            "compile": workload.compile if setting.compiled else "none",
            "matmul": "high",
            "cudnn_benchmark": images,
            "workers": workload.workers if isinstance(workload, Images) else "auto",
        },
        eval={"every": 0, "samples": 0},
        save={"every": 0},
        log={"every": LOG_EVERY},
        watch={"quiet": True},
        track=[],
        run={"dir": str(setting.folder / "run"), "resume": "never"},
    )


def by_oneloop_with_logits(setting: Setting, pacer: Pacer) -> None:
    """Train with oneloop's loop, with the loss on logits that are in memory."""
    assert isinstance(setting.workload, Text)
    workload = replace(setting.workload, fused_loss=False)
    by_oneloop(replace(setting, workload=workload), pacer)


# transformers' Trainer.


class _Rows:
    """Samples for transformers' Trainer; its models shift the labels themselves."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._blocks = workload.samples
        if isinstance(workload, Text) and workload.packed:  # the Trainer gets no borders
            self._blocks = Blocks(workload.tokens, workload.length, whole=True, content=None)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if isinstance(self._workload, Images):
            sample = self._workload.samples[index]
            return {"image": sample["image"], "labels": sample["label"]}
        tokens: NDArray[np.int64] = self._blocks[index][:-1].astype(np.int64)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(tokens)}


class _WithLoss(nn.Module):
    """An image model that returns its loss, as the Trainer wants it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.inner(image)
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


def by_trainer(setting: Setting, pacer: Pacer) -> None:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Paced(TrainerCallback):
        def on_step_begin(self, *given: Any, **more: Any) -> None:
            pacer.step()

    workload = setting.workload
    on_gpu = setting.device.type == "cuda"
    model = workload.build(setting.device)
    if isinstance(workload, Images):
        model = _WithLoss(model)
    arguments = TrainingArguments(
        output_dir=str(setting.folder / "trainer"),
        per_device_train_batch_size=workload.rows,
        max_steps=FOREVER,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=100,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        logging_nan_inf_filter=False,  # it would wait for the device in every step
        dataloader_num_workers=workload.workers if isinstance(workload, Images) else 2,
        bf16=setting.mixed_precision == "bf16",
        torch_compile=setting.compiled,
        use_cpu=not on_gpu,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=_Rows(workload), callbacks=[Paced()]
    )
    trainer.train()
