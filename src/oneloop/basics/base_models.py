"""Base models: files in a folder or on the Hugging Face hub, which checkpoints only refer to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from oneloop.basics.untrusted import damaged

HUB = "hf:"  # prefix of a repository: ``hf:ID[@REVISION]``


def place_of(name: str) -> tuple[str, str | None]:
    """Split a model's name into folder or repository, and revision."""
    if not name.startswith(HUB):
        return str(Path(name).expanduser()), None
    where, _, revision = name.removeprefix(HUB).partition("@")
    return where, revision or None


def fetched(name: str, file: str) -> Path | None:
    """Return the path of a file in a folder or hub repository, or None if it is missing.

    Args:
        name: the folder, or ``hf:ID[@REVISION]``.
        file: its name there.

    Raises:
        ValueError: if the repository does not exist or cannot be reached.
    """
    where, revision = place_of(name)
    if not name.startswith(HUB):
        path = Path(where) / file
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(where, file, revision=revision))
    except (EntryNotFoundError, OSError, ValueError) as error:
        # The repository lacks the file, unless that is only what a copy in the cache lacks.
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        # Show the first two lines, without the library's advice.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = " ".join(lines[:2]) or type(error).__name__
        raise ValueError(f"{name!r} cannot be fetched: {why}") from error


@dataclass
class BaseModel:
    """A pretrained model of which a run trains only a few parameters.

    Checkpoints do not store its tensors.
    """

    place: str  # for messages: a folder, or hf:ID
    names: frozenset[str]  # tensors of the model that were read from the base model
    # identifies the current content: checksums of the files, or the hub's commit
    look: Callable[[], dict[str, Any]]
    file: str  # name of the exported file of the other (trained) weights
    outside: Callable[[str], str]  # maps the model's tensor names to names in that file
    # settings that the trained weights require, as in adapter_config.json
    settings: Mapping[str, Any]
    seen: Callable[[], object] = lambda: None  # a cheap stamp that changes with the content

    def __post_init__(self) -> None:
        self._stamp = self.seen()  # of the content that was read

    def unchanged(self) -> None:
        """Raise ValueError if the content of the base model has changed since it was read.

        A change of the files' times alone is ignored.
        """
        now = self.seen()
        if now == self._stamp:
            return
        # The stamp differs: compare the content, which takes longer.
        if self.look() != vars(self).get("content"):
            raise ValueError(
                f"{self.place}, the base model, changed since the start; restore the original files"
            )
        self._stamp = now

    @cached_property
    def content(self) -> dict[str, Any]:
        """The result of :attr:`look`, computed once."""
        self.unchanged()
        return self.look()

    @property
    def description(self) -> dict[str, Any]:
        """The base model as JSON data, for manifests."""
        return {"place": self.place, **self.content, "settings": dict(self.settings)}

    @damaged("the description of the base model")
    def difference(self, there: Mapping[str, Any]) -> str:
        """Return how this base model differs from a recorded one; empty if it does not."""
        if any(there.get(key) != value for key, value in self.content.items()):
            return f"{short(there)}, expected {short(self.description)}"
        return self.other_settings(there.get("settings", {}))

    def other_settings(self, there: Mapping[str, Any]) -> str:
        """Return the settings that differ; empty if none does."""
        apart = []
        for key, value in self.settings.items():
            other = there.get(key, value)
            if other != value:
                apart.append(f"{key} {other}, expected {value}")
        return "; ".join(apart)

    def of_another(self, about: Mapping[str, Any], there: Mapping[str, Any] | None) -> str:
        """Return the other base model that adapters were trained on; empty if it is this one.

        Args:
            about: their adapter_config.json.
            there: the base model's entry in the manifest next to them.
        """
        if there:
            return self.difference({**there, "settings": {}})
        named = str(about.get("base_model_name_or_path") or "")
        here = Path(place_of(self.place)[0]).name
        return f"{named}, expected {self.place}" if named and Path(named).name != here else ""


def short(about: Mapping[str, Any]) -> str:
    """Return a short description of a base model for messages."""
    files = about.get("files", {})
    sums = [f"{name} {entry[1]}" for name, entry in files.items() if isinstance(entry, list)]
    content = about.get("commit") or ", ".join(sums[:2]) or files.get("digest")
    return f"{about.get('place')} ({content})"
