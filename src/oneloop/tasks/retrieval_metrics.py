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


class _Groups:
    """Documents of equal texts, of which only one counts, and the right ones of equal queries.

    Args:
        queries: integers (samples,), equal for equal queries.
        documents: likewise.
    """

    def __init__(self, queries: Tensor, documents: Tensor) -> None:
        self.queries = queries
        # Number the distinct texts from 0; the first of several equal documents stands for all.
        self.kinds = torch.unique(documents, return_inverse=True)[1]
        order = self.kinds.argsort(stable=True)
        steps = self.kinds[order].diff(prepend=order.new_tensor([-1]))
        self.is_first = torch.empty_like(steps, dtype=torch.bool)
        self.is_first[order] = steps > 0

    def counted(self, rows: slice) -> Tensor:
        """Return which documents count as wrong for the queries of these rows, as booleans."""
        equal = (self.queries[rows, None] == self.queries).int()
        right = torch.zeros_like(equal).index_add_(1, self.kinds, equal) > 0
        return self.is_first & ~right[:, self.kinds]


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
        groups = _Groups(*ids) if self.group else None
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
            if groups is not None:
                before &= groups.counted(rows)
            rank = widest(1 + before.sum(1))
            values = {f"{prefix}recall@{k}": rank <= k for k in (1, 5, 10)}
            values[f"{prefix}mrr"] = 1 / rank
            yield {name: (value, torch.ones_like(rank)) for name, value in values.items()}
