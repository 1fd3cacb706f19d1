"""Text generation; all rows have one length, so that all processes call the model equally often."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Choose = Callable[[Tensor], Tensor]  # (rows, entries) logits -> (rows,) tokens


def greedy(logits: Tensor) -> Tensor:
    """Return the most likely token of each row."""
    return logits.argmax(-1)


def written(
    model: nn.Module,
    prompts: Sequence[Tensor],
    count: int,
    *,
    ends: Sequence[int] = (),
    choose: Choose = greedy,
) -> Tensor:
    """Generate tokens of shape (prompts, count) after each prompt, with a model of transformers.

    Prompts are padded on the left. Padding is masked and positions start at each prompt, so that
    the answer to a prompt does not depend on the other prompts.

    Args:
        model: in eval mode, sharded or not.
        prompts: 1-D token tensors, each with at least one token.
        count: number of tokens of each answer.
        ends: end tokens; after one, the rest of the row repeats it.
        choose: function from logits, shape (prompts, vocabulary), to tokens, shape (prompts,).
    """
    # Pad the prompts on the left.
    device = prompts[0].device
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    mask = torch.zeros(len(prompts), longest + count, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    # Generate: the first pass reads the prompts, each later one a token. Also finished rows go on.
    generated = list[Tensor]()
    past = None
    stops = torch.tensor(ends, dtype=torch.int64, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for stop in range(longest, longest + count):
        output = model(
            input_ids=tokens,
            attention_mask=mask[:, :stop],
            position_ids=positions[:, stop - tokens.shape[1] : stop],
            past_key_values=past,
            use_cache=True,
        )
        past = output.past_key_values
        token = choose(output.logits[:, -1].float())
        token = torch.where(done, tokens[:, -1], token)
        done |= torch.isin(token, stops)
        generated.append(token)
        tokens = token[:, None]
    return torch.stack(generated, dim=1)
