"""What training reads over a network: bytes and requests, from the footers of the files."""

from typing import NamedTuple


class Traffic(NamedTuple):
    """What the samples of a data set take from the network, on average."""

    size: float  # bytes of a sample, as stored
    requests: float  # of a sample

    def line(self, samples: int, *, batch: int, steps: int, hosts: int) -> str:
        """Return what is read over the network, for the log and the plan.

        Args:
            samples: of the data set.
            batch: samples of a step.
            steps: steps of the run.
            hosts: hosts that read; each row group is read by one of them or more.
        """
        step = self.size * batch / 1e6
        epoch = self.size * samples / 1e6
        line = (
            f"network: {step:,.3g} MB per step, {epoch:,.1f} MB in "
            f"{self.requests * samples:,.0f} requests per epoch, "
            f"{step * steps / 1e3:,.1f} GB in the run; steps of one second need {step:,.3g} MB/s"
        )
        if hosts > 1:
            line += f"; each of {hosts} hosts reads at least {1 / hosts:.0%} of it"
        return line
