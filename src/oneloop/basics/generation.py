"""Call a task's ``generate`` on every parallel layout.

It gets the bare model, and may call ``model.generate`` of transformers. This calls nothing but the
model's own forward, which has the run's precision; under FSDP2 all ranks call it equally often, and
the weights stay sharded.

>>> made = generated(task, model, batch)  # collective under FSDP2
>>> made["texts"]
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from oneloop.basics.heartbeats import BEATS, GENERATION
from oneloop.basics.tensors import is_alone

TEXTS = "texts"  # entry of what a task generates: a list of one text for each sample


def generated(task: Any, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a task generates for a batch, by name. Under FSDP2 collective.

    Args:
        task: its ``generate`` returns a dict, or a list of texts.
        model: in eval mode; ``generate`` gets it without the DDP wrapper.
        batch: on the device.
    """
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model

    # Each forward is a sign of life: a long text takes long. With compiled code, each length of
    # the text would be another compilation.
    beats = inner.register_forward_pre_hook(lambda *_: BEATS.beat())
    eager = torch.compiler.set_stance("force_eager")
    try:
        with BEATS.phase(GENERATION), eager, only_forward(inner):
            result = task.generate(inner, batch)
    finally:
        beats.remove()
    if isinstance(result, Mapping):
        return dict(result)
    return {TEXTS: result}


@contextmanager
def only_forward(model: nn.Module) -> Iterator[None]:
    """Let ``model.generate`` of transformers call only the model's forward in this context.

    Only this forward is what a run wraps: mixed precision would leave out an encoder that is called
    alone, and under FSDP2 the encoder would see shards. Under FSDP2, a rank that ends early
    continues until the others end. Models without ``generate`` are not changed.

    Args:
        model: without the DDP wrapper.
    """
    if not hasattr(model, "generate"):
        yield
        return
    whole: Any = model
    if isinstance(model, FSDPModule):
        whole.generate = partial(whole.generate, synced_gpus=not is_alone())
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        encoder = _EncoderThroughModel(model, whole.get_encoder())
        whole.get_encoder = lambda *_, **__: encoder
    try:
        yield
    finally:
        for name in ("generate", "get_encoder"):
            vars(model).pop(name, None)


class _EncoderThroughModel:
    """Stands for the encoder of a model: calls it through the forward of the whole model."""

    def __init__(self, model: Any, encoder: Any) -> None:
        self._model = model
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        # transformers reads from the signature of ``forward`` which inputs the encoder takes.
        return getattr(self._encoder, name)

    def __call__(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        # The decoder reads one token; its output is dropped.
        values = [value for value in inputs.values() if isinstance(value, Tensor)]
        start = values[0].new_zeros(len(values[0]), 1, dtype=torch.int64)
        outputs = self._model(**inputs, decoder_input_ids=start, use_cache=False)
        return BaseModelOutput(
            last_hidden_state=outputs.encoder_last_hidden_state,
            hidden_states=outputs.encoder_hidden_states,
            attentions=outputs.encoder_attentions,
        )
