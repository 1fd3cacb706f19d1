"""Where a model's frozen parameters were read from: a checkpoint names that, instead of holding them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Origin:
    """A model of somebody's, on which a few parameters of a run's own stand."""

    place: str
    """for a person: a folder, or hf:ID"""
    names: frozenset[str]
    """what of the model's state was read from there"""
    look: Callable[[], dict[str, Any]]
    """tells what lies there from anything else: checksums of its files, or the hub's commit"""
    file: str
    """of the other weights, where they are taken elsewhere"""
    outside: Callable[[str], str]
    """the name in there of a tensor of the model"""
    settings: Mapping[str, Any]
    """what the other weights mean nothing without, by its names in adapter_config.json"""

    @cached_property
    def content(self) -> dict[str, Any]:
        """What :attr:`look` finds, once."""
        return self.look()

    @property
    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {"place": self.place, **self.content}

    def difference(self, there: dict[str, Any]) -> str:
        """What is other than it was told; empty where nothing is."""
        if all(there.get(key) == value for key, value in self.content.items()):
            return ""
        one, other = (short(about) for about in (there, self.told))
        return f"{one}, and not {other}"


def short(about: dict[str, Any]) -> str:
    """An origin, for a person."""
    files = about.get("files", {})
    sums = [f"{name} {entry[1]}" for name, entry in files.items() if isinstance(entry, list)]
    return f"{about.get('place')} ({about.get('commit') or ', '.join(sums[:2]) or files.get('digest')})"
