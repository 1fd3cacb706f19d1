"""Masks of padding that models of transformers make on the device, without a wait of the host.

>>> leave_masks_unread(model)                            # before it is wrapped

With SDPA, transformers reads each mask in each forward, to leave out a mask that hides nothing. On
a GPU, the host then waits for all work that is queued.
"""

from typing import Any

import torch
from torch import Tensor, nn

from oneloop.tasks.probe import probe

NAME = "sdpa_unread"  # name in transformers' attention registry
_TOKENS = 8  # of the test


def leave_masks_unread(model: nn.Module) -> None:
    """Let a model make its masks without reading them, in place, if all of it uses SDPA.

    A model stays as it is if its outputs then differ, if it does not take another function, or if
    it cannot be tried with tokens alone.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    parts: list[Any] = [one for one in model.modules() if isinstance(one, PreTrainedModel)]
    for one in parts:
        if one.config._attn_implementation != "sdpa" or not one._can_set_attn_implementation():
            return
    if not parts:
        return
    try:
        before = _outputs(model)
    except Exception:  # it needs other inputs: it works as before, with a wait in each forward
        return
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, unread_mask)

    # A model may compute something else for the name of SDPA.
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    after = _outputs(model)
    if before is not None and not torch.allclose(after, before, rtol=1e-4, atol=1e-4):
        model.set_attn_implementation("sdpa")  # type: ignore[operator]


def unread_mask(*given: Any, attention_mask: Tensor | None = None, **named: Any) -> Tensor | None:
    """Return transformers' mask for SDPA, also if the padding hides nothing.

    Args:
        given: of ``transformers.masking_utils.sdpa_mask``.
        attention_mask: (rows, positions), 0 for padding; None: nothing is padded.
        named: of ``sdpa_mask``, too.
    """
    from transformers.masking_utils import sdpa_mask

    if attention_mask is not None:
        named["allow_is_causal_skip"] = False
        named["allow_is_bidirectional_skip"] = False
    mask: Tensor | None = sdpa_mask(*given, attention_mask=attention_mask, **named)
    return mask


def _outputs(model: Any) -> Any:
    """Return the outputs for two texts, one of them padded; None: there are none (meta)."""
    parameter = next(model.parameters())
    if parameter.device.type == "meta":
        return None
    entries = model.config.get_text_config().vocab_size
    tokens = torch.arange(2 * _TOKENS, device=parameter.device).view(2, -1) % entries
    mask = torch.ones_like(tokens)
    mask[1, _TOKENS // 2 :] = 0
    inputs = {"attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    outputs: Tensor = probe(model, tokens, **inputs)[0]
    # What a padded position has is not used.
    return outputs if outputs.ndim < 3 else outputs[:, : _TOKENS // 2]
