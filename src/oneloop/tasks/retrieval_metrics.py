"""Retrieval metrics: recall@k and mean reciprocal rank of the right document."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from oneloop.basics.wide_sums import widest
from oneloop.tasks.light_metrics import Means
from oneloop.tasks.row_blocks import row_blocks

_NAMES = (
    "recall@1",
    "recall@5",
    "recall@10",
    "mrr",
)


class Retrieval(Means):
    """Recall@1, 5 and 10 and mean reciprocal rank of the right document in the whole set.

    The same is computed in the other direction (``reverse_…``). A document that is as similar as
    the right one counts as more similar.

    Args:
        group: rank distinct documents. Copies of a document count once, and each document that
            belongs to an equal query is right. False: only the documents of samples with the same
            number as the query are left out, and each copy counts.
    """

    def __init__(self, *, group: bool = False) -> None:
        names = [*_NAMES, *(f"reverse_{name}" for name in _NAMES)]
        super().__init__(dict.fromkeys(names, True))
        self.group = group

    def update(  # type: ignore[override]
        self, queries: Tensor, documents: Tensor, *, ids: Sequence[Tensor] = ()
    ) -> None:
        """Add a set of pairs: query and right document have the same index.

        Call it with the whole set.

        Args:
            queries: (samples, width).
            documents: (samples, width); the similarity is the scalar product.
            ids: integers (samples,). Documents of samples with the same number are not counted as
                wrong. With ``group`` there are two: equal texts of queries, and of documents, have
                equal numbers.
        """
        blocks = self._ranked(queries, documents, ids)
        reverse = self._ranked(documents, queries, [*ids][::-1], prefix="reverse_")
        for of_block, of_reverse in zip(blocks, reverse, strict=True):
            super().update({**of_block, **of_reverse})

    def _ranked(
        self, queries: Tensor, documents: Tensor, ids: Sequence[Tensor], *, prefix: str = ""
    ) -> Iterator[Mapping[str, tuple[Tensor, Tensor]]]:
        """Yield the values and weights of a block of queries, by metric."""
        for rows in row_blocks(len(queries), len(documents)):
            # Find the documents that are more similar than the right one, or as similar, or NaN.
            similarity = queries[rows] @ documents.T
            diagonal = similarity.diagonal(rows.start)
            right = diagonal[:, None]
            before = ~(similarity < right)

            # Leave out duplicates of the right document, and the right one.
            for id_ in ids:
                before &= id_[rows, None] != id_
            before.diagonal(rows.start).fill_(False)
            if self.group:
                before &= _wrong(rows, *ids)
            rank = widest(1 + before.sum(1))
            values = {f"{prefix}recall@{k}": rank <= k for k in (1, 5, 10)}
            values[f"{prefix}mrr"] = 1 / rank
            yield {name: (value, torch.ones_like(rank)) for name, value in values.items()}


def _wrong(rows: slice, queries: Tensor, documents: Tensor) -> Tensor:
    """Return which documents count as wrong for the queries of these rows, as booleans.

    Of documents of equal texts only one counts. The documents of all equal queries are right.

    Args:
        rows: of a block of queries.
        queries: integers (samples,), equal for equal queries.
        documents: likewise.
    """
    # Number the distinct texts from 0; the first of several equal documents stands for all.
    kinds = torch.unique(documents, return_inverse=True)[1]
    order = kinds.argsort(stable=True)
    steps = kinds[order].diff(prepend=order.new_tensor([-1]))
    is_first = torch.empty_like(steps, dtype=torch.bool)
    is_first[order] = steps > 0

    # A document is right for a query if it belongs to an equal one.
    equal = (queries[rows, None] == queries).int()
    right = torch.zeros_like(equal).index_add_(1, kinds, equal) > 0
    return is_first & ~right[:, kinds]
