"""What ``oneloop plan`` is asked to plan."""

from dataclasses import dataclass

from oneloop.tools.plan.gpus import ANY


@dataclass(frozen=True)
class Asked:
    """What to plan."""

    training: tuple[str, ...]  # recipe and keys
    config_file: str
    processes: int
    nodes: int = 1
    mixed_precision: str | None = None  # None: that of the config file
    capability: tuple[int, int] = ANY  # compute capability of the GPU, whose kernels are planned

    def options(self) -> list[str]:
        """Return the options of accelerate's launcher."""
        options = ["--config_file", self.config_file]
        if self.mixed_precision is not None:
            options += ["--mixed_precision", self.mixed_precision]
        return options

    def words(self) -> list[str]:
        """Return the words that follow ``oneloop plan``."""
        return [
            *self.training,
            *self.options(),
            "--processes",
            str(self.processes),
            "--nodes",
            str(self.nodes),
        ]
