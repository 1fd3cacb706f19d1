"""Contrastive losses over all samples of a batch, for ``batch_loss``: sums, not means.

They are computed in blocks of rows with a fixed number of similarities, again in the backward, so
that memory does not grow with the batch.

>>> loss = info_nce(anchors, positives, 20.0)  # (samples, width) each

Normalize them for cosine similarities.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from oneloop.tasks.row_blocks import row_blocks


def _summed(loss: Callable[[slice], Tensor], rows: int, columns: int) -> Tensor:
    """Return the sum of ``loss`` over the blocks of rows."""
    from torch.utils.checkpoint import checkpoint

    blocks = row_blocks(rows, columns)
    if len(blocks) == 1:
        return loss(blocks[0])
    # Compute each block again in the backward: memory does not grow with the batch.
    losses = [checkpoint(loss, block, use_reentrant=False) for block in blocks]
    return torch.stack(losses).sum()  # type: ignore[arg-type]


def info_nce(
    queries: Tensor,
    keys: Tensor,
    scale: Tensor | float,
    *,
    ids: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Return the InfoNCE loss: the sum of -log softmax(scale x similarity) at the query's own key.

    The own key has the same index (van den Oord et al. 2018; the loss of multiple-negatives
    ranking). CLIP's loss (Radford et al. 2021) is the mean of both directions:
    ``(info_nce(a, b, s) + info_nce(b, a, s)) / 2``.

    Args:
        queries: (samples, width).
        keys: (samples or more, width); the rest are further negatives.
        scale: 1 / temperature.
        ids: pairs of integers (samples,) and (keys,). A key with the same number as the query is a
            duplicate of the right key, and does not count.
    """

    def loss(rows: slice) -> Tensor:
        logits = scale * queries[rows] @ keys.T

        # Leave out duplicates of the right key, which is on the diagonal of these rows.
        same = torch.zeros_like(logits, dtype=torch.bool)
        for own, others in ids:
            same |= own[rows, None] == others
        same.diagonal(rows.start).fill_(False)
        logits = logits.masked_fill(same, -torch.inf)
        right = torch.arange(rows.start, rows.stop, device=logits.device)
        return F.cross_entropy(logits, right, reduction="sum")

    return _summed(loss, len(queries), len(keys))


def sigmoid_loss(
    queries: Tensor, keys: Tensor, scale: Tensor | float, bias: Tensor | float
) -> Tensor:
    """Return SigLIP's loss: the sum over all pairs of -log sigmoid(z (scale x similarity + bias)).

    z is 1 for a query and its own key, and -1 otherwise (Zhai et al. 2023).

    Args:
        queries: (samples, width).
        keys: (samples, width).
        scale: multiplies the similarities.
        bias: is added to them.
    """

    def loss(rows: slice) -> Tensor:
        logits = scale * queries[rows] @ keys.T + bias
        sign = -torch.ones_like(logits)
        sign.diagonal(rows.start).fill_(1.0)
        return -F.logsigmoid(sign * logits).sum()

    return _summed(loss, len(queries), len(keys))


def supervised(embeddings: Tensor, labels: Tensor, scale: Tensor | float) -> Tensor:
    """Return the sum over samples of the supervised contrastive loss.

    The loss of a sample is the mean over the other samples with the same label of -log
    softmax(scale x similarity) among all others (Khosla et al. 2020, equation 2). A sample without
    such others adds 0.

    Args:
        embeddings: (samples, width).
        labels: (samples,).
        scale: 1 / temperature.
    """

    def loss(rows: slice) -> Tensor:
        logits = scale * embeddings[rows] @ embeddings.T
        right = labels[rows, None] == labels
        right.diagonal(rows.start).fill_(False)

        # Take the log of the softmax over all others.
        others = logits.clone()
        others.diagonal(rows.start).fill_(-torch.inf)
        log_shares = logits - others.logsumexp(1, keepdim=True)
        total = log_shares.masked_fill(~right, 0.0).sum(1)
        return -(total / right.sum(1).clamp(min=1)).sum()

    return _summed(loss, len(embeddings), len(embeddings))
