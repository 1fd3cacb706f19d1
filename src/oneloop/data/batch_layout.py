"""How a global batch is divided among processes and micro-batches."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a global batch: ``size = ranks x accumulate x micro`` samples, else
    ValueError."""

    size: int
    ranks: int
    # samples of one micro-batch (None: ``grain`` if set, else size / ranks)
    micro: int | None = None
    grain: int | None = None
    """samples of a micro-batch (leaf) for bit-identical results; size / grain and ranks are then
    powers of two"""
    sharded: bool = False
    """whether consecutive leaves are on consecutive ranks (FSDP2); else each rank has a contiguous
    range of them"""
    accumulate: int = field(init=False)  # micro-batches of one step on one process

    def __post_init__(self) -> None:
        if self.grain and (self.ranks & (self.ranks - 1) or self.ranks > self.size // self.grain):
            counts = (
                f"batch.size {self.size} / batch.grain {self.grain} gives "
                f"{self.size // self.grain} micro-batches"
            )
            needs = "both must be powers of two, with at most one process per micro-batch"
            raise ValueError(f"{counts} on {self.ranks} ranks; {needs}")
        micro = self.grain or self.micro or max(1, self.size // self.ranks)
        if self.size % (self.ranks * micro):
            unit = self.ranks * micro
            nearest = max(1, round(self.size / unit)) * unit
            share, rest = divmod(self.size, self.ranks)
            # batch.micro does not change the results, batch.size does
            if not rest and not self.grain:
                fits = min(
                    (n for n in range(1, share + 1) if not share % n),
                    key=lambda n: (abs(n - micro), -n),
                )
                each = f"batch.size {self.size} over {self.ranks} ranks is {share} samples each"
                raise ValueError(
                    f"{each}; batch.micro {micro} does not divide this number; nearest: {fits}"
                )
            requested = "" if self.micro is None else f" x micro {micro}"
            message = f"{self.ranks} ranks{requested}; nearest size: {nearest}"
            raise ValueError(f"batch.size {self.size} cannot be split over {message}")
        object.__setattr__(self, "micro", micro)
        object.__setattr__(self, "accumulate", self.size // (self.ranks * micro))

    @property
    def each(self) -> int:
        """Return the samples of one micro-batch."""
        assert self.micro is not None
        return self.micro

    def leaf(self, rank: int, micro: int) -> int:
        """Return the index, among all micro-batches of a step, of the ``micro``-th one of
        ``rank``."""
        return (
            micro * self.ranks + rank
            if self.grain and self.sharded
            else rank * self.accumulate + micro
        )

    def __str__(self) -> str:
        return (
            f"batch {self.size} = {self.ranks} ranks x {self.accumulate} micro-batches x "
            f"{self.micro}"
        )
