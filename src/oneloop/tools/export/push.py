"""The model card of an export, and its push to the Hugging Face hub."""

from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.checkpoint.manifest import MANIFEST, read_manifest
from oneloop.tools.export.model_card import model_card

_REPLACED = (".safetensors", ".json", ".jinja", "recipe.yaml")
"""suffixes of files from an earlier push, which a push replaces"""


def write_card(run: Path, folder: Path, name: str, *, licence: str | None = None) -> str:
    """Write the model card of an export to its README.md.

    Args:
        run: the run folder.
        folder: the export.
        name: of the repository (ORG/NAME).
        licence: its identifier on the hub.

    Returns:
        The card.
    """
    # Does transformers load it: adapters, or a model with a type that transformers knows?
    config = folder / "config.json"
    loadable = (folder / "adapter_config.json").is_file()
    if not loadable and config.is_file():
        loadable = b'"model_type"' in config.read_bytes()

    about = read_manifest(folder)["about"]
    card = model_card(run, name, about, licence=licence, language_model=loadable)
    (folder / "README.md").write_text(card, encoding="utf-8")
    return card


def check_push(name: str) -> None:
    """Raise BadInput if a push to the hub cannot work.

    The token is missing, or ``name`` is not a valid repository name.
    """
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise BadInput(f"--push {name!r} is not a repository name (ORG/NAME): {error}") from error
    if not get_token():
        raise BadInput(
            f"--push {name} needs a token that may write to the hub: hf auth login, or HF_TOKEN=…"
        )


def push(run: Path, folder: Path, name: str, *, licence: str | None, public: bool) -> str:
    """Commit what ``oneloop export`` wrote to a repository, which is created if it is missing.

    Args:
        run: the run folder.
        folder: the export.
        name: of the repository (ORG/NAME).
        licence: its identifier on the hub.
        public: whether a repository that is created here is public.

    Returns:
        A line with the commit's address.

    Raises:
        BadInput: the hub rejects the push, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    # the HTTP library's error class, which differs between versions
    base_error: Any = HfHubHTTPError.__bases__[0]

    # Collect the files of the export, with the model card and the recipe.
    manifest = read_manifest(folder)
    card = write_card(run, folder, name, licence=licence)
    files: dict[str, Any] = {}
    for file in (*manifest["files"], MANIFEST):
        files[file] = folder / file
    files["README.md"] = card.encode()
    files["recipe.yaml"] = run / "recipe.yaml"

    # Describe the weights in the commit message.
    about = manifest["about"]
    what = about.get("checkpoint") or f"step {about.get('step')}"
    if about.get("weights") not in ("raw", None):
        what += f", {about['weights']}"

    # Replace the files of an earlier push in one commit.
    api = HfApi()
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        operations: list[Any] = []
        for file in api.list_repo_files(name):
            if file.endswith(_REPLACED) and "/" not in file and file not in files:
                operations.append(CommitOperationDelete(file))
        for file, content in files.items():
            operations.append(CommitOperationAdd(file, content))
        done = api.create_commit(name, operations, commit_message=f"oneloop: {run.name}, {what}")
    except HfHubHTTPError as error:
        raise BadInput(f"--push {name}: the hub rejects it: {_first(error)}") from error
    except (base_error, OSError) as error:
        raise BadInput(f"--push {name}: the hub cannot be reached: {_first(error)}") from error
    return f"{name}: {done.commit_url}"


def _first(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
