"""The manifest of a checkpoint, and the headers of its files: write, read and check them.

Needs no torch.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from xxhash import xxh3_128_hexdigest

from oneloop.basics.untrusted import damaged, is_plain, parsed_json, read_bytes

Entries = Mapping[str, Any]

MANIFEST = "MANIFEST.json"
FORMAT = 2  # version of the manifest

_BASE = re.compile(r"base(-\d+)?")  # folders of frozen parameters, in the run folder
_MOST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def manifest_of(
    step: int, files: Entries, about: Entries, tensors: Entries | None = None
) -> dict[str, Any]:
    """Return the manifest of a checkpoint; see :meth:`Store.seal`."""
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
        if base and not (_BASE.fullmatch(base["folder"]) and is_plain(base["xxh3"])):
            raise ValueError(f"{MANIFEST} names the base {base!r:.80}, which is not a plain name")
    return dict(manifest)


def base_in(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the entry of a checkpoint's frozen parameters; None if it has none.

    The manifest of trained weights has another entry of this name: their base model.
    """
    base: dict[str, Any] | None = manifest["about"].get("base")
    return base if "step" in manifest else None


def header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, without reading its data.

    Raises:
        ValueError: there is none, or it does not describe the data of the file.
        OSError: the file cannot be read.
    """
    # The library compares shapes, dtypes and offsets with the size of the file.
    with damaged(file.name), safe_open(file, "np"), file.open("rb") as stream:
        content: dict[str, Any] = parsed_json(stream.read(int.from_bytes(stream.read(8), "little")))
        return content


def check_header_length(length: int, data: int) -> None:
    """Raise ValueError if a header of this length cannot be in a file.

    Args:
        length: as the beginning of the file says, in bytes.
        data: bytes of the file after its first eight.
    """
    if not 0 < length <= min(data, _MOST_HEADER):
        raise ValueError(f"its header cannot have {length} bytes")
