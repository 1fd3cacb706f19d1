"""How a global batch is divided among processes and micro-batches."""

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a global batch: ``size = ranks x accumulate x micro`` samples.

    Args:
        size: samples of a step, on all processes.
        ranks: number of processes.
        micro: samples of one micro-batch; None: ``grain`` if set, else size / ranks.
        grain: samples of a micro-batch (leaf) for bit-identical results; size / grain and ranks are
            then powers of two.
        sharded: whether consecutive leaves are on consecutive ranks (FSDP2); else each rank has a
            contiguous range of them.

    Raises:
        ValueError: the numbers do not divide into such a layout.
    """

    size: int
    ranks: int
    micro: int | None = None
    grain: int | None = None
    sharded: bool = False
    accumulate: int = field(init=False)  # micro-batches of one step on one process

    def __post_init__(self) -> None:
        if self.grain:
            leaves = self.size // self.grain
            power_of_two = not self.ranks & (self.ranks - 1)
            if not power_of_two or self.ranks > leaves:
                raise ValueError(
                    f"batch.size {self.size} / batch.grain {self.grain} gives {leaves} "
                    f"micro-batches on {self.ranks} ranks; both must be powers of two, with at "
                    "most one process per micro-batch"
                )
        micro = self.grain or self.micro or max(1, self.size // self.ranks)
        if self.size % (self.ranks * micro):
            self._reject(micro)
        # The class is frozen: set the derived fields past its check.
        object.__setattr__(self, "micro", micro)
        object.__setattr__(self, "accumulate", self.size // (self.ranks * micro))

    def _reject(self, micro: int) -> NoReturn:
        """Raise ValueError with the nearest number that divides the batch."""
        # Suggest another batch.micro if that is possible: it does not change the results.
        share, rest = divmod(self.size, self.ranks)
        if not rest and not self.grain:
            divisors = [count for count in range(1, share + 1) if not share % count]
            fits = min(reversed(divisors), key=lambda count: abs(count - micro))
            raise ValueError(
                f"batch.size {self.size} over {self.ranks} ranks is {share} samples each; "
                f"batch.micro {micro} does not divide this number; nearest: {fits}"
            )

        # Suggest another batch.size, which does change them.
        unit = self.ranks * micro
        nearest = max(1, round(self.size / unit)) * unit
        requested = "" if self.micro is None else f" x micro {micro}"
        raise ValueError(
            f"batch.size {self.size} cannot be split over {self.ranks} ranks{requested}; "
            f"nearest size: {nearest}"
        )

    @property
    def each(self) -> int:
        """Return the samples of one micro-batch."""
        assert self.micro is not None
        return self.micro

    def leaf(self, rank: int, micro: int) -> int:
        """Return a micro-batch's index among all micro-batches of a step.

        Args:
            rank: the process.
            micro: index of the micro-batch on this process.
        """
        if self.grain and self.sharded:
            return micro * self.ranks + rank
        return rank * self.accumulate + micro

    def leaves(self, rank: int) -> list[int]:
        """Return :meth:`leaf` of each micro-batch of a process."""
        return [self.leaf(rank, micro) for micro in range(self.accumulate)]

    def offsets(self, rank: int) -> NDArray[np.int64]:
        """Return the positions of a rank's samples within a step, micro-batch after micro-batch."""
        starts = self.each * np.array(self.leaves(rank), dtype=np.int64)
        return (starts[:, None] + np.arange(self.each)).reshape(-1)

    def __str__(self) -> str:
        return (
            f"batch {self.size} = {self.ranks} ranks x {self.accumulate} micro-batches x "
            f"{self.micro}"
        )
