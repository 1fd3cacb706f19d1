"""Where a model's frozen parameters were read from: a checkpoint names that, instead of holding them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oneloop.basics.hub import HUB


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
    seen: Callable[[], object] = lambda: None
    """a quick look at what lies there, which changes where it is changed"""

    def __post_init__(self) -> None:
        self.__dict__["_first"] = self.seen()

    def unchanged(self) -> None:
        """Raise ValueError if the content of the base model has changed since it was read (a new mtime is no
        change)."""
        if (now := self.seen()) == self.__dict__["_first"]:
            return
        if self.look() != self.__dict__.get("content"):
            raise ValueError(f"{self.place} was changed while this run stood on it; put back what it was")
        self.__dict__["_first"] = now

    @cached_property
    def content(self) -> dict[str, Any]:
        """What :attr:`look` finds, once."""
        self.unchanged()
        return self.look()

    @property
    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {"place": self.place, **self.content, "settings": dict(self.settings)}

    def difference(self, there: Mapping[str, Any]) -> str:
        """What is other than it was told; empty where nothing is."""
        if any(there.get(key) != value for key, value in self.content.items()):
            one, other = (short(about) for about in (there, self.told))
            return f"{one}, and not {other}"
        return self.other_settings(there.get("settings", {}))

    def other_settings(self, there: Mapping[str, Any]) -> str:
        """Which settings are others; empty where none is."""
        return "; ".join(
            f"{key} {there[key]}, and not {value}"
            for key, value in self.settings.items()
            if there.get(key, value) != value
        )

    def of_another(self, about: Mapping[str, Any], there: Mapping[str, Any] | None) -> str:
        """Return the other base model that adapters were trained on, empty if it is this one; ``about`` is their
        adapter_config.json, ``there`` the base model's entry in the manifest next to them."""
        if there:
            return self.difference({**there, "settings": {}})
        named = str(about.get("base_model_name_or_path") or "")
        here = Path(self.place.removeprefix(HUB).partition("@")[0]).name
        return f"{named}, and not {self.place}" if named and Path(named).name != here else ""


def short(about: Mapping[str, Any]) -> str:
    """An origin, for a person."""
    files = about.get("files", {})
    sums = [f"{name} {entry[1]}" for name, entry in files.items() if isinstance(entry, list)]
    return f"{about.get('place')} ({about.get('commit') or ', '.join(sums[:2]) or files.get('digest')})"
