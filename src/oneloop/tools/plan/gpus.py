"""The GPUs that ``oneloop plan`` knows."""

from typing import NamedTuple

GIB = 2.0**30  # bytes
_SHARE = 0.5  # of the peak FLOP/s, which a run is assumed to reach
ANY = (8, 0)  # compute capability that is planned for without --gpu


class Gpu(NamedTuple):
    """One GPU and its link to the next one."""

    memory: float  # GiB, as torch reports it
    name: str  # in PEAKS
    link: float  # bytes/s to the next GPU, in one direction
    capability: tuple[int, int]  # compute capability

    def holds(self, total: float) -> bool:
        """Return whether its memory is enough for so many bytes."""
        return total <= self.memory * GIB

    @property
    def flops(self) -> float:
        """FLOP/s that a run is assumed to reach."""
        from oneloop.measure.flops import PEAKS  # imports torch

        return max(PEAKS[self.name]) * 1e12 * _SHARE


# The links are those of the data sheets: NVLink, or PCIe 4.0 x16.
GPUS = {
    "b200": Gpu(178.4, "B200", 900e9, (10, 0)),
    "h200": Gpu(139.8, "H200", 450e9, (9, 0)),
    "h100": Gpu(79.1, "H100", 450e9, (9, 0)),
    "a100-80": Gpu(79.1, "A100", 300e9, (8, 0)),
    "l40s": Gpu(44.4, "L40S", 32e9, (8, 9)),
    "a100-40": Gpu(39.4, "A100", 300e9, (8, 0)),
    "v100-32": Gpu(31.7, "V100", 150e9, (7, 0)),
    "4090": Gpu(23.5, "4090", 32e9, (8, 9)),
    "3090": Gpu(23.6, "3090", 32e9, (8, 6)),
    "a10g": Gpu(22.1, "A10G", 32e9, (8, 6)),
    "l4": Gpu(22.0, "L4", 32e9, (8, 9)),
    "t4": Gpu(14.6, "T4", 32e9, (7, 5)),
}
