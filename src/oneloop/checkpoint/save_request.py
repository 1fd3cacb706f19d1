"""One save of a checkpoint by all ranks: the request to a rank's writing process, and its answer.

Needs no torch.
"""

from dataclasses import dataclass, field
from typing import Any

from oneloop.checkpoint.store import Keep


@dataclass(frozen=True)
class SaveRequest:
    """A request to write one rank's shard of a checkpoint."""

    root: str  # the run's checkpoints folder
    step: int
    attempt: int  # number of earlier saves; makes the names of drafts unique
    rank: int
    ranks: int

    header: str  # the safetensors header: name, dtype, shape and offset of every tensor, as JSON
    size: int  # bytes of tensor data
    # dtypes and global shapes of all tensors, for the manifest
    tensors: dict[str, Any] = field(default_factory=dict)

    # state other than tensors; rank 0 writes it
    state: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)  # for the manifest

    keep: Keep = field(default_factory=Keep)
    bad: list[int] = field(default_factory=list)  # steps of damaged checkpoints in the mirror
    # other files that must be on disk before it is complete
    flush: list[str] = field(default_factory=list)

    @classmethod
    def parsed(cls, values: dict[str, Any]) -> "SaveRequest":
        """Return the request with these values, which are the JSON of its ``asdict``."""
        values["keep"] = Keep(**values["keep"])
        return cls(**values)


@dataclass(frozen=True)
class Answer:
    """A message of a writing process: the answer to a request, or news of its uploads."""

    step: int | None = None  # of the save; None: of the end of the uploads
    error: str | None = None
    mirrored: int = 0  # newest step in the mirror
    is_news: bool = False  # of a copy to the mirror, without a request


def padded(header: str) -> bytes:
    """Return the beginning of a safetensors file: the length of its header, and the header."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
