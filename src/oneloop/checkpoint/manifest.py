"""The manifest of a checkpoint: write, read and check it.

Needs no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from oneloop.basics.untrusted import damaged, is_plain, parsed_json, read_bytes

Entries = Mapping[str, Any]

MANIFEST = "MANIFEST.json"
FORMAT = 3  # version of the manifest

BASE = "base"  # folder of frozen parameters, in the run folder


def manifest_of(
    step: int, files: Entries, about: Entries, tensors: Entries | None = None
) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Args:
        step: its number.
        files: size and checksum of its files, by name.
        about: describes the content for readers.
        tensors: dtype (safetensors name) and global shape of all tensors, by name.
    """
    return {
        "format": FORMAT,
        "step": step,
        "files": dict(sorted(files.items())),
        "about": dict(about),
        "tensors": dict(tensors or {}),
    }


def signed(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest as JSON, with a checksum of itself."""
    return json.dumps({**manifest, "self": _of(manifest)}, indent=1).encode()


def _of(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest, in any order of its keys."""
    return xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the checkpoint's manifest.

    Raises ValueError if it is missing, damaged or of another format.
    """
    try:
        content = read_bytes(folder / MANIFEST)
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    return parsed_manifest(content)


def parsed_manifest(content: bytes) -> dict[str, Any]:
    """Return the manifest with this content.

    Raises ValueError if it is damaged, of another format, or names what is not in its folder.
    """
    # Verify the checksum. It has no key: anyone who can write the file can write it, too.
    try:
        manifest = parsed_json(content)
        recorded = manifest.pop("self", None)
        expected = _of(manifest)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    if recorded != expected:
        raise ValueError(f"{MANIFEST} is damaged: expected checksum {expected}, found {recorded}")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{MANIFEST} has format {manifest.get('format')}; this oneloop reads format {FORMAT}"
        )

    # Check what leads to other files. All else is checked where it is used.
    with damaged(MANIFEST):
        for name in dict(manifest["files"]):
            if not is_plain(name, 2) or name == MANIFEST:
                raise ValueError(f"{MANIFEST} lists the file {name!r}, which is not a plain name")
        base = base_in(manifest)
        if base and not (is_plain(base["xxh3"]) and is_plain(base["file"])):
            raise ValueError(f"{MANIFEST} names the base {base!r:.80}, which is not a plain name")
    return dict(manifest)


def base_in(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the entry of a checkpoint's frozen parameters; None if it has none.

    The manifest of trained weights has another entry of this name: their base model.
    """
    base: dict[str, Any] | None = manifest["about"].get("base")
    return base if "step" in manifest else None


def base_folder(run: Path, base: Mapping[str, Any]) -> Path:
    """Return the folder of frozen parameters with this entry in a manifest: ``base/CHECKSUM``."""
    return run / BASE / str(base["xxh3"])
