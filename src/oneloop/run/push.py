"""Weights to the Hugging Face hub: what ``oneloop export`` wrote, with a model card, as one commit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oneloop.basics.errors import BadInput
from oneloop.checkpoint.store import MANIFEST, read_manifest
from oneloop.show.card import model_card

_REPLACED = (".safetensors", ".json", ".jinja", "recipe.yaml")
"""ends of files that an earlier push may have left, and that this one replaces"""


def check_push(name: str) -> None:
    """Raise BadInput if there is no token for the hub, or if ``name`` cannot be the name of a repository."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise BadInput(f"--push {name!r} is no name of a repository (ORG/NAME): {error}") from error
    if not get_token():
        raise BadInput(f"--push {name} needs a token that may write to the hub: hf auth login, or HF_TOKEN=…")


def push(run: Path, folder: Path, name: str, *, licence: str | None, public: bool) -> str:
    """Commit what ``oneloop export`` wrote to ``folder`` to the repository ORG/NAME, which is created if it is missing.

    Return a line with the commit's address. Raise BadInput if the hub rejects the push, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    manifest = read_manifest(folder)
    loadable = any((folder / file).is_file() for file in ("config.json", "adapter_config.json"))
    card = model_card(run, name, manifest["about"], licence=licence, language_model=loadable)
    files: dict[str, Any] = {file: folder / file for file in (*manifest["files"], MANIFEST)}
    files |= {"README.md": card.encode(), "recipe.yaml": run / "recipe.yaml"}
    api = HfApi()
    with _told(name):
        api.create_repo(name, private=not public, exist_ok=True)
        there = api.list_repo_files(name)
        stale = [file for file in there if file.endswith(_REPLACED) and "/" not in file and file not in files]
        operations: list[Any] = [CommitOperationDelete(file) for file in stale]
        operations += [CommitOperationAdd(file, content) for file, content in files.items()]
        done = api.create_commit(name, operations, commit_message=f"oneloop: {run.name}, {_what(manifest['about'])}")
    return f"{name}: {done.commit_url}"


def _what(about: dict[str, Any]) -> str:
    place = about.get("checkpoint") or f"step {about.get('step')}"
    return f"{place}{'' if about.get('weights') in ('raw', None) else ', ' + str(about['weights'])}"


@contextmanager
def _told(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    below: Any = HfHubHTTPError.__bases__[0]  # of the library that it speaks HTTP with, which changes

    try:
        yield
    except HfHubHTTPError as error:
        raise BadInput(f"--push {name}: the hub refuses it: {_first(error)}") from error
    except (below, OSError) as error:
        raise BadInput(f"--push {name}: the hub cannot be reached: {_first(error)}") from error


def _first(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
