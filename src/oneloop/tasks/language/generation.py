"""Texts that a language model writes, all rows equally long: so every process calls the model equally often."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Choose = Callable[[Tensor], Tensor]
"""(rows, entries) logits -> (rows,) tokens"""


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row."""
    return logits.argmax(-1)


def written(
    model: nn.Module, prompts: Sequence[Tensor], count: int, *, ends: Sequence[int] = (), choose: Choose = greedy
) -> Tensor:
    """What a model of transformers writes after each prompt: (prompts, count) tokens.

    Prompts are padded to the left; the padding is masked, and positions count from each one's beginning, so that each
    is answered as alone.

    Args:
        model: in eval mode, whole or sharded.
        prompts: 1-D each, with a token at least.
        count: tokens of each answer.
        ends: tokens after which the rest of a row is the same token.
        choose: a token from logits.
    """
    device, longest = prompts[0].device, max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    mask = torch.zeros(len(prompts), longest + count, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    places = (mask.cumsum(1) - 1).clamp(min=0)
    generated, past = list[Tensor](), None
    stops = torch.tensor(ends, dtype=torch.int64, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for at in range(longest, longest + count):
        here = places[:, at - tokens.shape[1] : at]
        given = {"input_ids": tokens, "attention_mask": mask[:, :at], "position_ids": here}
        made = model(**given, past_key_values=past, use_cache=True)
        past, token = made.past_key_values, choose(made.logits[:, -1].float())
        token = torch.where(done, tokens[:, -1], token)
        done |= torch.isin(token, stops)
        generated.append(token)
        tokens = token[:, None]
    return torch.stack(generated, dim=1)
