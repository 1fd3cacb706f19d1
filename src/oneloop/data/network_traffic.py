"""What training reads over a network: bytes and requests, from the footers of the files."""

from typing import Any, NamedTuple


class Traffic(NamedTuple):
    """What the samples of a data set take from the network, on average."""

    size: float  # bytes of a sample, as stored
    requests: float  # of a sample


def traffic_of(dataset: Any) -> Traffic:
    """Return the traffic of a data set; nothing if it is on a disk."""
    found: Traffic | None = getattr(dataset, "traffic", None)
    return found or Traffic(0.0, 0.0)


def traffic_line(traffic: Traffic, *, samples: int, batch: int, steps: int, hosts: int) -> str:
    """Return the line for the log and the plan about what is read over the network.

    Args:
        traffic: of a sample.
        samples: samples of an epoch.
        batch: samples of a step.
        steps: steps of the run.
        hosts: hosts that read; each row group is read by one of them or more.
    """
    step = traffic.size * batch / 1e6
    line = (
        f"network: {step:,.3g} MB per step, {traffic.size * samples / 1e6:,.1f} MB in "
        f"{traffic.requests * samples:,.0f} requests per epoch, {step * steps / 1e3:,.1f} GB in "
        f"the run; steps of one second need {step:,.3g} MB/s"
    )
    if hosts > 1:
        line += f"; each of {hosts} hosts reads at least {1 / hosts:.0%} of it"
    return line
