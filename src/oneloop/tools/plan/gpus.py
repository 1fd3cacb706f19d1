"""The GPUs that ``oneloop plan`` knows."""

from typing import NamedTuple

GIB = 2.0**30  # bytes
ANY = (8, 0)  # compute capability that is planned for without --gpu


class Gpu(NamedTuple):
    """One GPU."""

    memory: float  # GiB, as torch reports it
    capability: tuple[int, int]  # compute capability

    def holds(self, total: float) -> bool:
        """Return whether its memory is enough for so many bytes."""
        return total <= self.memory * GIB


GPUS = {
    "b200": Gpu(178.4, (10, 0)),
    "h200": Gpu(139.8, (9, 0)),
    "h100": Gpu(79.1, (9, 0)),
    "a100-80": Gpu(79.1, (8, 0)),
    "l40s": Gpu(44.4, (8, 9)),
    "a100-40": Gpu(39.4, (8, 0)),
    "v100-32": Gpu(31.7, (7, 0)),
    "4090": Gpu(23.5, (8, 9)),
    "3090": Gpu(23.6, (8, 6)),
    "a10g": Gpu(22.1, (8, 6)),
    "l4": Gpu(22.0, (8, 9)),
    "t4": Gpu(14.6, (7, 5)),
}
