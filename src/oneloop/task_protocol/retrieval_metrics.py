"""Retrieval metrics: recall@k and mean reciprocal rank of the right document."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oneloop.basics.row_blocks import row_blocks
from oneloop.basics.wide_sums import WideSum, widest

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
        # Number the distinct texts from 0.
        distinct, self._query = torch.unique(queries, return_inverse=True)
        kinds, self._document, copies = torch.unique(
            documents, return_inverse=True, return_counts=True
        )
        self._kinds = len(kinds)

        # The first of several equal documents stands for all. (scatter_reduce would find it, too,
        # but has no deterministic kernel on a GPU.)
        index = torch.arange(len(documents), device=documents.device)
        sorted_ = self._document.argsort(stable=True)
        earlier = copies.cumsum(0) - copies
        first = sorted_[earlier]
        self._is_first: Tensor = first[self._document] == index

        # The right documents of each query, and where those of a query begin.
        number = self._query * self._kinds + self._document
        pairs = torch.unique(number)
        self._right = pairs % self._kinds
        numbers = torch.arange(len(distinct) + 1, device=pairs.device)
        least = numbers * self._kinds
        self._begin = torch.searchsorted(pairs, least)

    def counted(self, rows: slice) -> Tensor:
        """Return which documents count as wrong for the queries of these rows, as booleans."""
        query = self._query[rows]
        begin = self._begin[query]
        count = self._begin[query + 1] - begin
        rows_here = torch.arange(len(query), device=query.device)
        row = torch.repeat_interleave(rows_here, count)
        earlier = count.cumsum(0) - count
        numbers = torch.arange(len(row), device=row.device)
        within = numbers - earlier[row]
        right = torch.zeros(len(query), self._kinds, dtype=torch.bool, device=query.device)
        place = begin[row] + within
        kind = self._right[place]
        right[row, kind] = True
        return self._is_first & ~right[:, self._document]


class Retrieval:
    """Recall@1, 5 and 10 and mean reciprocal rank of the right document in the whole set.

    The same is computed in the other direction (``reverse_…``). A document that is as similar as
    the right one counts as more similar.

    Args:
        group: rank distinct documents. Copies of a document count once, and each document that
            belongs to an equal query is right. False: only the documents of samples with the same
            number as the query are left out, and each copy counts.
    """

    def __init__(self, *, group: bool = False) -> None:
        self.group = group
        self.higher_is_better: dict[str, bool | None] = {}
        for direction in ("", "reverse_"):
            for name in _NAMES:
                self.higher_is_better[direction + name] = True
        self._sums = [WideSum(5), WideSum(5)]
        """by direction: the sum of each metric, in this order, and the number of queries"""

    def to(self, device: torch.device) -> "Retrieval":
        self._sums = [sums.to(device) for sums in self._sums]
        return self

    def update(self, queries: Tensor, documents: Tensor, *, ids: Sequence[Tensor] = ()) -> None:
        """Add a set of pairs: query and right document have the same index.

        Call it with the whole set.

        Args:
            queries: (samples, width).
            documents: (samples, width); the similarity is the scalar product.
            ids: integers (samples,). Documents of samples with the same number are not counted as
                wrong. With ``group`` there are two: equal texts of queries, and of documents, have
                equal numbers.
        """
        self._add(self._sums[0], queries, documents, ids)
        reverse = [*ids][::-1]
        self._add(self._sums[1], documents, queries, reverse)

    def _add(
        self, sums: WideSum, queries: Tensor, documents: Tensor, ids: Sequence[Tensor]
    ) -> None:
        """Add the pairs to the ``sums`` of one direction, in place."""
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
            found = []
            for k in (1, 5, 10):
                found.append((rank <= k).sum())
            found.append((1 / rank).sum())
            found.append(rank.new_full((), len(rank)))
            sums.add(torch.stack(found))

    def sums(self) -> Sequence[Tensor]:
        return [sums.parts for sums in self._sums]

    def compute(self) -> dict[str, float]:
        sums = torch.stack([sums.value() for sums in self._sums])
        queries = sums[:, 4:]
        means = sums[:, :4] / queries
        values = means.flatten().tolist()
        return dict(zip(self.higher_is_better, values, strict=True))
