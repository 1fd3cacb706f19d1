"""How a global batch is divided among processes and micro-batches."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch is divided: ``size = ranks x accumulate x micro``.

    Raises:
        ValueError: it does not divide.
    """

    size: int
    ranks: int
    micro: int | None = None
    """samples of one micro-batch (None: size / ranks; with leaves their samples)"""
    grain: int | None = None
    """samples of a leaf, where the same bits are wanted for any number of ranks; both are then powers of two"""
    sharded: bool = False
    """whether neighbouring leaves stand on neighbouring ranks, as under FSDP2; else each rank has a row of them"""
    accumulate: int = field(init=False)
    """micro-batches of one step on one process"""

    def __post_init__(self) -> None:
        if self.grain and (self.ranks & (self.ranks - 1) or self.ranks > self.size // self.grain):
            leaves = f"batch.size {self.size} / batch.grain {self.grain} gives {self.size // self.grain} micro-batches"
            needs = "both must be powers of two, with at most one process per micro-batch"
            raise ValueError(f"{leaves} on {self.ranks} ranks; {needs}")
        micro = self.grain or self.micro or max(1, self.size // self.ranks)
        if self.size % (self.ranks * micro):
            unit = self.ranks * micro
            nearest = max(1, round(self.size / unit)) * unit
            share, rest = divmod(self.size, self.ranks)
            if not rest and not self.grain:  # another micro-batch trains the same model, another size does not
                fits = min((n for n in range(1, share + 1) if not share % n), key=lambda n: (abs(n - micro), -n))
                each = f"batch.size {self.size} over {self.ranks} ranks is {share} samples each"
                raise ValueError(f"{each}, which batch.micro {micro} does not divide; nearest: {fits}")
            asked = "" if self.micro is None else f" x micro {micro}"
            nearest_ = f"{self.ranks} ranks{asked}; nearest size: {nearest}"
            raise ValueError(f"batch.size {self.size} cannot be split over {nearest_}")
        object.__setattr__(self, "micro", micro)
        object.__setattr__(self, "accumulate", self.size // (self.ranks * micro))

    @property
    def each(self) -> int:
        """Samples of one micro-batch."""
        assert self.micro is not None
        return self.micro

    def leaf(self, rank: int, micro: int) -> int:
        """Which of a step's micro-batches it is that a rank takes as its ``micro``-th."""
        return micro * self.ranks + rank if self.grain and self.sharded else rank * self.accumulate + micro

    def __str__(self) -> str:
        return f"batch {self.size} = {self.ranks} ranks x {self.accumulate} micro-batches x {self.micro}"
