"""Attention within documents of a row, for models with transformers' attention interface.

>>> attend_within_documents(model)
>>> model(input_ids=…, position_ids=…, attention_mask=borders(documents, cuts), use_cache=False)

>>> check_apart(encoder, tokens)                   # in both directions
>>> encoder(input_ids=…, position_ids=…, attention_mask=document_mask(documents))

On a GPU in half precision it uses torch's variable-length kernel, elsewhere SDPA with a boolean
mask. The masks are 4-D, because transformers passes a 4-D ``attention_mask`` on without reading it
on the host (no sync). Padding masks and None work as in transformers' SDPA.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from oneloop.basics.tensors import capability
from oneloop.tasks.model_limits import first_position
from oneloop.tasks.probe import probe
from oneloop.tasks.unread_masks import unread_mask

NAME = "within_documents"  # name in transformers' attention registry

_FULL = "full_attention"
_KIND = "_oneloop_kind"  # attribute of an attention module: the kind of its layer
_VISIBLE = "_oneloop_visible"  # attribute of the starts of documents: the boolean mask they make
_FLASH = (8, 0)  # compute capability from which on a GPU has the variable-length kernel

_Mask = Tensor | None

# The kernel with one split, so that the order of sums does not depend on the other documents. Older
# versions of torch have fewer options.
_OPTIONS = set(signature(varlen_attn).parameters)
_KERNEL = partial(varlen_attn, num_splits=1) if "num_splits" in _OPTIONS else varlen_attn


def attend_within_documents(model: nn.Module, *, packed: bool = False) -> None:
    """Make the model accept the masks of this module, in place, and test it.

    Args:
        model: a model of transformers.
        packed: accept the masks of :func:`borders`, too, and not only that of :func:`causal`.

    Raises:
        ValueError: the model does not support it; it is then unchanged.
    """
    reason = _unsupported(model)
    if reason:
        raise ValueError(f"{type(model).__name__}: {reason}")
    from transformers import AttentionInterface, AttentionMaskInterface

    # Register the function; without a mask function transformers would ignore padding masks.
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, unread_mask)
    before = model.config._attn_implementation  # type: ignore[union-attr]

    # Note the kind of each layer. Compiled code that reads a layer's number is compiled again
    # for each layer; the same kind is the same code.
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _KIND, _kind_of_layer(module))

    # Compare with the model's own attention; on meta there are no logits.
    own_logits = None
    if next(model.parameters()).device.type != "meta":
        own_logits = logits_of(model, _tokens(model))
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    try:
        if own_logits is not None:
            tokens = _tokens(model)
            if not near(logits_of(model, tokens, attention_mask=causal(tokens.device)), own_logits):
                name = type(model).__name__
                raise ValueError(f"{name} does not attend to exactly the tokens before each token")
            if packed:
                check_documents(model, tokens, _visible)
    except Exception as error:
        model.set_attn_implementation(before)  # type: ignore[operator]
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{type(model).__name__} does not take such masks: {error}") from error


def _unsupported(model: nn.Module) -> str | None:
    """Return why the model cannot attend within documents; None if nothing is known."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if getattr(model, "_is_stateful", False):
        return "its layers carry a state from token to token (linear attention, a state space)"
    backend = getattr(model, "_supports_attention_backend", False)
    if not backend or not getattr(model, "_supports_sdpa", False):
        return "it does not use transformers' attention interface with SDPA"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention caps its logits, which SDPA cannot"
    return None


def causal(device: torch.device) -> Tensor:
    """Return a mask for causal attention in rows; padding at the end is visible only to padding."""
    return torch.zeros(1, 1, 1, 0, dtype=torch.uint8, device=device)


def borders(documents: Tensor, cuts: Tensor) -> Tensor:
    """Return a mask for causal attention within documents.

    Args:
        documents: the document number of each position, shape (rows, positions); padding is a
            separate document.
        cuts: int32, 1-D, the starts of the documents in all rows concatenated; the rest is filled
            with the total length.
    """
    # The variable-length kernel reads the starts, SDPA a boolean mask.
    if capability(cuts.device) >= _FLASH:
        return cuts[None, None, None]
    return _visible(documents)


def _visible(documents: Tensor) -> Tensor:
    """Return which positions each position sees, shape (rows, 1, positions, positions), uint8."""
    length = documents.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    same = documents[:, :, None] == documents[:, None, :]
    return (same & before)[:, None].view(torch.uint8)


def document_mask(documents: Tensor) -> Tensor:
    """Return a mask with which no document attends to another.

    Its shape (rows, 1, positions, positions) makes transformers pass it on without reading it on
    the host (no sync).

    Args:
        documents: the document number of each position, shape (rows, positions); padding is a
            separate document.
    """
    return documents[:, None, :, None] == documents[:, None, None, :]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention, as a function of transformers' interface.

    ``query``, ``key`` and ``value`` have the shape (rows, heads, positions, width), the result
    (rows, positions, heads, width).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Convert the masks of this module; transformers' masks are boolean or floating point.
    if attention_mask is not None and attention_mask.dtype in (torch.uint8, torch.int32):
        window = _window(module, query.shape[2], sliding_window)
        if attention_mask.dtype is torch.int32:
            # The kernel for half precision skips the work between documents; SDPA masks it.
            dtype = _kernel_dtype(query, value)
            if dtype is not None and not dropout:
                output = _of_different_lengths(
                    query.to(dtype),
                    key.to(dtype),
                    value.to(dtype),
                    attention_mask.flatten(),
                    scaling,
                    window,
                )
                return output, None
            attention_mask = _from_starts(query, attention_mask)
        attention_mask = _mask(query, attention_mask, window)
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return result


def _kernel_dtype(query: Tensor, value: Tensor) -> torch.dtype | None:
    """Return the dtype in which the variable-length kernel computes; None: it cannot.

    Under autocast it is autocast's, as in SDPA. The query may be float32 there, because rotary
    embeddings have the dtype of the hidden states.
    """
    device = query.device.type
    dtype = query.dtype
    if dtype is not torch.float64 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if dtype not in (torch.float16, torch.bfloat16):
        return None

    # Some GPUs cannot train with widths from 193 to 224: there, SDPA does not use the kernel, too.
    width = query.shape[3]
    known = width <= 192 or 224 < width <= 256
    if not known or width % 8 or value.shape[3] != width:
        return None
    return dtype


def _window(module: nn.Module, length: int, sliding: int | None) -> int | None:
    """Return the sliding-window size of a layer, None for full attention.

    Raise ValueError for other patterns.
    """
    config: Any = getattr(module, "config", None)
    kind = getattr(module, _KIND, _FULL)

    # A chunk that is longer than the row changes nothing.
    chunk = getattr(config, "attention_chunk_size", None) or 0
    no_window = kind == "sliding_attention" and sliding is None
    if no_window or (kind == "chunked_attention" and chunk < length):
        raise ValueError(
            f"{type(module).__name__}: {kind} at positions that differ from its sliding_window"
        )
    return sliding if sliding is not None and sliding < length else None


def _kind_of_layer(module: Any) -> str:
    """Return the kind of attention of a layer, as the config names it."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    layer = module.layer_idx
    if kinds and isinstance(layer, int) and layer < len(kinds):
        return str(kinds[layer])
    return _FULL


def _mask(query: Tensor, mask: Tensor, window: int | None) -> _Mask:
    """Return a boolean mask for a mask of :func:`causal` or :func:`borders`.

    None: use SDPA's causal kernel.
    """
    if not mask.numel() and window is None:
        return None
    positions = torch.arange(query.shape[2], device=query.device)
    if mask.numel():
        visible = mask.view(torch.bool)
    else:
        visible = (positions[:, None] >= positions)[None, None]
    if window is None:
        return visible
    return visible & (positions[:, None] - positions < window)


def _from_starts(query: Tensor, starts: Tensor) -> Tensor:
    """Return the mask of SDPA for the starts of documents; no host sync.

    All layers of a forward share it. Compiled blocks, which cannot keep it, make it in each layer.
    """
    compiling = torch.compiler.is_compiling()
    made: Tensor | None = None if compiling else getattr(starts, _VISIBLE, None)
    if made is not None:
        return made
    rows, _, length, _ = query.shape
    cuts = starts.flatten()
    positions = torch.arange(rows * length, device=cuts.device, dtype=cuts.dtype)
    documents = torch.searchsorted(cuts, positions, right=True).view(rows, length)
    made = _visible(documents)
    if not compiling:
        setattr(starts, _VISIBLE, made)
    return made


def _of_different_lengths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cuts: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Call torch's variable-length kernel; no other document of a row changes its results."""
    # The kernel takes all rows concatenated: (positions of all rows, heads, width).
    rows, _, length, _ = query.shape
    query = query.transpose(1, 2).flatten(0, 1)
    key = key.transpose(1, 2).flatten(0, 1)
    value = value.transpose(1, 2).flatten(0, 1)

    # Several query heads may share a key head, which older versions of torch do not know.
    groups = query.shape[1] // key.shape[1]
    kernel = _KERNEL
    if groups > 1 and "enable_gqa" in _OPTIONS:
        kernel = partial(_KERNEL, enable_gqa=True)
    elif groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    output: Any = kernel(
        query,
        key,
        value,
        cuts,
        cuts,
        length,
        length,
        window_size=(-1 if window is None else window - 1, 0),
        scale=scaling,
    )
    return output.unflatten(0, (rows, length))  # type: ignore[no-any-return]


_TEST_TOKENS = 12  # maximum number of tokens


def _tokens(model: nn.Module) -> Tensor:
    """Return one row of different tokens for the test."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    length = min(_TEST_TOKENS, getattr(config, "max_position_embeddings", None) or _TEST_TOKENS)
    entries: int = config.vocab_size
    return torch.arange(length, device=next(model.parameters()).device)[None] % entries


def logits_of(model: nn.Module, tokens: Tensor, **inputs: Any) -> Tensor:
    """Return the logits of a model in eval mode.

    Args:
        model: a model of transformers.
        tokens: rows of tokens.
        inputs: more inputs of the model.
    """
    logits: Tensor = probe(model, tokens, use_cache=False, **inputs).logits
    return logits


def check_documents(
    model: nn.Module, tokens: Tensor, mask: Callable[[Tensor], Tensor], *, first: int = 0
) -> None:
    """Raise ValueError if two documents of a row do not get the logits that they get alone.

    Args:
        model: a model of transformers.
        tokens: one row of tokens, (1, positions).
        mask: returns the mask for the document number of each position, (1, positions).
        first: number of a text's first position.
    """
    name = type(model).__name__
    length = tokens.shape[1]
    start = length // 2
    numbers = torch.arange(length, device=tokens.device)
    documents = (numbers >= start).long()[None]
    before = tokens[:, :start]
    second = tokens[:, start:]

    # Run the second document after two different first ones.
    def logits_after(before: Tensor) -> Tensor:
        row = torch.cat([before, second], dim=1)
        positions = numbers - start * documents + first
        return logits_of(model, row, position_ids=positions, attention_mask=mask(documents))

    both = logits_after(before)
    other = logits_after(before.flip(1))
    if not near(both[:, start:], other[:, start:], 2e-6):
        raise ValueError(
            f"{name}: its layers carry state from one document to the next (linear attention, a "
            "state space, a convolution)"
        )

    # Run each document alone.
    alone = torch.cat([logits_of(model, before), logits_of(model, second)], dim=1)
    if not near(both, alone):
        raise ValueError(
            f"{name}: the logits of a packed document depend on the document before it"
        )


def check_apart(model: nn.Module, tokens: Tensor) -> None:
    """Raise ValueError if documents of a row do not get the logits that they get alone.

    Args:
        model: a model of transformers with a head for masked tokens.
        tokens: as many ordinary tokens as a row has, shape (positions,).
    """
    name = type(model).__name__
    row = tokens[None]
    try:
        # Attention to a window of the row differs from that with a mask of the whole row.
        masked = logits_of(model, row, attention_mask=document_mask(torch.zeros_like(row)))
        if not near(masked, logits_of(model, row)):
            raise ValueError(f"{name}: its logits differ with a mask of the whole row")
        check_documents(model, row, document_mask, first=first_position(model)[0])
    except Exception as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{name} does not take masks of documents: {error}") from error


def near(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> bool:
    """Return whether logits are equal, up to this share of the largest one."""
    return bool((one - other).abs().max() <= tolerance * other.abs().max())
