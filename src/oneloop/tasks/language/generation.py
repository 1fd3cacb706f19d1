"""Text generation; all rows have one length, and all processes call the model equally often."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from oneloop.basics.tensors import is_alone

TIES = "near_ties"
"""entry of what is generated: (samples,), whether rounding could change the sample's text"""
_ROUNDING = 64  # a near tie: the two largest logits differ by less than so many units of rounding
_CHECK_EVERY = 8  # tokens after which generation ends if all rows have ended (a host sync)

Choose = Callable[[Tensor], Tensor]  # (rows, entries) logits -> (rows,) tokens


class NearTies:
    """Counts texts with a near tie: a token whose choice rounding could change.

    Other sums of floating-point numbers, on another parallel layout, can choose the other token.
    It is also a logits processor of transformers, for greedy decoding.

    Args:
        ends: end tokens; later tokens of a text do not count.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = torch.tensor(ends, dtype=torch.int64)
        self._done: Tensor | None = None
        self.found: Tensor | None = None  # (texts,), whether a text has a near tie

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Look at the next logits, and return them unchanged.

        Args:
            tokens: the texts so far; not used.
            logits: (texts, vocabulary).
        """
        if self._done is None or self.found is None:
            self._ends = self._ends.to(logits.device)
            self._done = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            self.found = torch.zeros_like(self._done)

        # Rounding is relative to the largest size of a logit. Excluded tokens have -inf.
        largest, chosen = logits.topk(2)
        size = logits.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().amax(1)
        rounding = _ROUNDING * torch.finfo(logits.dtype).eps * size
        near = largest[:, 0] - largest[:, 1] <= rounding
        self.found |= near & ~self._done
        self._done |= torch.isin(chosen[:, 0], self._ends)
        return logits


def written(
    model: nn.Module,
    prompts: Sequence[Tensor],
    count: int,
    *,
    ends: Sequence[int] = (),
    choose: Choose = partial(torch.argmax, dim=-1),
    ties: NearTies | None = None,
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
        ties: looks at the logits of each token.
    """
    # Pad the prompts on the left.
    tokens = pad_sequence([*prompts], batch_first=True, padding_value=-1, padding_side="left")
    device = tokens.device
    longest = tokens.shape[1]
    mask = F.pad((tokens >= 0).long(), (0, count), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    tokens = tokens.clamp(min=0)

    # Only the last logits are read. Those of all tokens of long prompts would need much memory.
    next_logits = partial(model, use_cache=True)
    parameters = signature(model.forward).parameters
    if "logits_to_keep" in parameters:
        next_logits.keywords["logits_to_keep"] = 1
    # Newer versions of transformers have another name for the keys and values of earlier tokens.
    cache = "cache" if "cache" in parameters else "past_key_values"

    # Generate: the first pass reads the prompts, each later one a token. Finished rows continue.
    generated = list[Tensor]()
    stops = torch.tensor(ends, dtype=torch.int64, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for stop in range(longest, longest + count):
        output = next_logits(
            input_ids=tokens,
            attention_mask=mask[:, :stop],
            position_ids=positions[:, stop - tokens.shape[1] : stop],
        )
        next_logits.keywords[cache] = getattr(output, cache)
        logits = output.logits[:, -1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if ties is not None:
            ties(tokens, logits)
        token = choose(logits)
        token = torch.where(done, tokens[:, -1], token)
        done |= torch.isin(token, stops)
        generated.append(token)
        tokens = token[:, None]

        # End early if all rows have ended; their last tokens are repeated.
        if ends and len(generated) % _CHECK_EVERY == 0 and _all_done(done, model):
            generated += [token] * (count - len(generated))
            break
    return torch.stack(generated, dim=1)


def _all_done(done: Tensor, model: nn.Module) -> bool:
    """Return whether all rows are done: of this rank, or under FSDP2 of all ranks.

    A host sync; under FSDP2 also collective.

    Args:
        done: (rows,), bool.
        model: sharded or not.
    """
    open_rows = (~done).sum()
    if isinstance(model, FSDPModule) and not is_alone():
        dist.all_reduce(open_rows)
    return not int(open_rows)


def check_answer(count: int, config: Any) -> None:
    """Raise ValueError if a model lets no generated text end within ``count`` tokens.

    ``config``: its generation_config.
    """
    # A text begins with a token that min_length counts, and min_new_tokens does not.
    for key, most in (("min_length", count), ("min_new_tokens", count - 1)):
        least = getattr(config, key, None)
        if least and least > most:
            raise ValueError(
                f"task.answer {count} lets no generated text end, because the model has {key} "
                f"{least}; raise task.answer, or lower {key} in its generation_config.json (or "
                "config.json)"
            )
