"""Attention that ends at the borders of documents, for any model on transformers' attention interface.

>>> attend_within_documents(model)
>>> model(input_ids=…, position_ids=…, attention_mask=borders(documents, cuts), use_cache=False)

On CUDA in half precision it is torch's kernel for sequences of different lengths, elsewhere SDPA with a boolean mask.
What is handed over as ``attention_mask`` is 4-D, which transformers passes on as it is, without a look into it: no
forward waits for the device. Masks of padding, and none, are treated as transformers treats them for its SDPA.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

NAME = "within_documents"
"""as transformers knows it"""

_Given = Tensor | None


def attend_within_documents(model: nn.Module, *, packed: bool = False) -> None:
    """Lets the model take :func:`causal`, and :func:`borders` where it is to be ``packed``; in place, and tried.

    Raises:
        ValueError: it cannot, with the reason; it is as it was.
    """
    if reason := _why_not(model):
        raise ValueError(f"{type(model).__name__}: {reason}")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it padded prompts would be read as if they were whole
    before = model.config._attn_implementation  # type: ignore[union-attr]
    own = _logits(model, _tokens(model)) if _has_weights(model) else None
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    try:
        if own is not None:
            _try(model, own, packed=packed)
    except Exception as error:
        model.set_attn_implementation(before)  # type: ignore[operator]
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{type(model).__name__} does not take such masks: {error}") from error


def _why_not(model: nn.Module) -> str | None:
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if getattr(model, "_is_stateful", False):
        return "its layers carry a state from token to token (linear attention, a state space)"
    if not getattr(model, "_supports_attention_backend", False) or not getattr(model, "_supports_sdpa", False):
        return "its attention is its own, not on transformers' attention interface with SDPA"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention caps its logits, which SDPA cannot"
    return None


def causal(device: torch.device) -> Tensor:
    """Every token sees those before it in its row; padding, which stands behind, is seen by padding alone."""
    return torch.zeros(1, 1, 1, 0, dtype=torch.uint8, device=device)


def borders(documents: Tensor, cuts: Tensor) -> Tensor:
    """Every token sees those before it in its document.

    Args:
        documents: (rows, positions), the number of the document that each position is of; padding is one of its own.
        cuts: int32, where documents begin in all rows one after another, and the end, as often as there is room.
    """
    if cuts.device.type == "cuda":
        return cuts[None, None, None]
    length = documents.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & before)[:, None].view(torch.uint8)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Given,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """(rows, heads, positions, width) -> (rows, positions, heads, width), as transformers calls it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    unknown = [name for name in ("softcap", "s_aux") if more.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__} has what SDPA cannot do ({', '.join(unknown)})")
    if attention_mask is not None and attention_mask.dtype in (torch.uint8, torch.int32):
        window = _window(module, query.shape[2], sliding_window)
        if attention_mask.dtype is torch.int32:
            if (
                query.dtype in (torch.float16, torch.bfloat16)
                and query.is_cuda
                and not dropout
                and query.shape[3] <= 256
            ):
                return _of_different_lengths(query, key, value, attention_mask.flatten(), scaling, window), None
            attention_mask = borders(_numbered(query, attention_mask.flatten()), torch.empty(0))
        attention_mask = _mask(query, attention_mask, window)
    made: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
    )
    return made


def _window(module: nn.Module, length: int, sliding: int | None) -> int | None:
    """Return the sliding-window size of a layer, None for full attention. Raises ValueError for other patterns."""
    config: Any = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds and isinstance(layer, int) and layer < len(kinds) else "full_attention"
    chunk = getattr(config, "attention_chunk_size", None)
    if (kind == "sliding_attention" and sliding is None) or (kind == "chunked_attention" and (chunk or 0) < length):
        raise ValueError(f"{type(module).__name__}: {kind} at positions that differ from its sliding_window")
    return sliding if sliding is not None and sliding < length else None


def _mask(query: Tensor, given: Tensor, window: int | None) -> _Given:
    """A boolean mask of what :func:`causal` or :func:`borders` made; None: causal, as SDPA's own kernels can."""
    length = query.shape[2]
    if not given.numel() and window is None:
        return None
    places = torch.arange(length, device=query.device)
    seen = given.view(torch.bool) if given.numel() else (places[:, None] >= places)[None, None]
    return seen if window is None else seen & (places[:, None] - places < window)


def _numbered(query: Tensor, cuts: Tensor) -> Tensor:
    """(rows, positions), the documents' numbers; without a look at the device."""
    rows, _, length, _ = query.shape
    places = torch.arange(rows * length, device=cuts.device, dtype=cuts.dtype)
    return torch.searchsorted(cuts, places, right=True).view(rows, length)


def _of_different_lengths(
    query: Tensor, key: Tensor, value: Tensor, cuts: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """torch's variable-length kernel: the same for a document whatever stands beside it."""
    from torch.nn.attention.varlen import varlen_attn

    rows, _, length, _ = query.shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    how: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0), "scale": scaling}
    known, groups = signature(varlen_attn).parameters, query.shape[1] // key.shape[1]
    if "num_splits" in known:  # of later versions of torch
        how["num_splits"] = 1
    if "enable_gqa" in known:
        how["enable_gqa"] = groups > 1
    else:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    made: Any = varlen_attn(query, key, value, cuts, cuts, length, length, **how)
    return made.unflatten(0, (rows, length))  # type: ignore[no-any-return]


# --- tried ------------------------------------------------------------------------------------------------------------

_TRIED = 12  # tokens at most


def _has_weights(model: nn.Module) -> bool:
    return next(model.parameters()).device.type != "meta"


def _tokens(model: nn.Module) -> Tensor:
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    length = min(_TRIED, getattr(config, "max_position_embeddings", None) or _TRIED)
    entries: int = config.vocab_size
    return torch.arange(length, device=next(model.parameters()).device)[None] % entries


def _logits(model: nn.Module, tokens: Tensor, **given: Any) -> Tensor:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(input_ids=tokens, use_cache=False, **given).logits  # type: ignore[no-any-return]
    finally:
        model.train(training)


def _try(model: nn.Module, own: Tensor, *, packed: bool) -> None:
    """Run two documents in one row. Raises ValueError if the logits are not those of the model's ``own`` attention, or
    those of the second document depend on the first."""
    name, tokens = type(model).__name__, _tokens(model)
    first, whole, here = tokens.shape[1] // 2, tokens.shape[1], tokens.device
    second = tokens[:, first:]
    if not _near(_logits(model, tokens, attention_mask=causal(here)), own):
        raise ValueError(f"{name} does not attend to exactly the tokens before each token")
    if not packed:
        return
    numbers = torch.tensor([[0] * first + [1] * (whole - first)], device=here)
    places = torch.tensor([[*range(first), *range(whole - first)]], device=here)
    cuts = torch.tensor([0, first, whole], dtype=torch.int32, device=here)
    given = {"position_ids": places, "attention_mask": borders(numbers, cuts)}
    behind = _logits(model, tokens, **given)[:, first:]
    behind_another = _logits(model, torch.cat([tokens[:, :first].flip(1), second], dim=1), **given)[:, first:]
    if not _near(behind, behind_another, 2e-6):
        kinds = "linear attention, a state space, a convolution"
        raise ValueError(f"{name}: its layers carry state from one document to the next ({kinds})")
    if not _near(behind, _logits(model, second, attention_mask=causal(here))):
        raise ValueError(f"{name}: the logits of a packed document depend on the document before it")


def _near(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())
