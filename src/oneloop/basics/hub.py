"""Files of the Hugging Face hub, as they are needed."""

from __future__ import annotations

from pathlib import Path

HUB = "hf:"
"""begins the name of a repository: ``hf:ID[@REVISION]``"""


def place_of(name: str) -> tuple[str, str | None]:
    """Folder or repository, and revision."""
    if not name.startswith(HUB):
        return str(Path(name).expanduser()), None
    where, _, revision = name.removeprefix(HUB).partition("@")
    return where, revision or None


def fetched(name: str, file: str) -> Path | None:
    """Return the path of a file of a folder or hub repository, None if it has no such file. Raises ValueError if the
    repository does not exist or cannot be reached."""
    where, revision = place_of(name)
    if not name.startswith(HUB):
        path = Path(where) / file
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(where, file, revision=revision))
    except LocalEntryNotFoundError as error:
        raise ValueError(f"{name!r} cannot be fetched: {_first(error)}") from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"{name!r} cannot be fetched: {_first(error)}") from error


def _first(error: Exception) -> str:
    """What went wrong, without what a library advises."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
