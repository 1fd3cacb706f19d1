"""The manifest of a checkpoint, and the headers of its files: write, read and check them.

Needs no torch.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from oneloop.basics.untrusted import (
    COUNT,
    HEX16,
    HEX32,
    STEP,
    check_form,
    is_plain,
    parsed_json,
    read_bytes,
)

Entries = Mapping[str, Any]

MANIFEST = "MANIFEST.json"
FORMAT = 2  # version of the manifest

# What a manifest must look like, as check_form reads it.
_SIZE = range(1 << 60)
_MOST_DIMENSIONS = 64  # of a tensor, as in torch
_STORED = {"size": _SIZE, "xxh3": HEX32, "blocks?": [HEX16]}
_FROZEN = {  # in a checkpoint: the folder with the frozen parameters
    "folder": re.compile(r"base(-\d+)?"),
    "file?": re.compile(r"origin\.json"),
    "size": _SIZE,
    "xxh3": HEX32,
}
_BASE_MODEL = {"place": str, "settings?": dict, "files?": dict}  # next to trained weights
_ABOUT = {"ranks?": COUNT, "step?": STEP, "end?": STEP, "named?": [str]}


def _is_shape(value: object) -> bool:
    """Return whether a value can be the shape of a tensor."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(size) is int and size in STEP for size in value)


_FOLDER = {  # of final weights or frozen parameters
    "attempt?": re.compile(r"\d{1,9}-[0-9a-z]{1,32}"),
    "files": {None: _STORED},
    "about": {**_ABOUT, "base?": _BASE_MODEL},
}
_CHECKPOINT = {
    **_FOLDER,
    "step": STEP,
    "about": {**_ABOUT, "base?": _FROZEN},
    "tensors": {None: (str, _is_shape)},  # dtype and shape
}

# What the header of a safetensors file must look like.
_MOST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_TENSOR = {"dtype": str, "shape": _is_shape, "data_offsets": (_SIZE, _SIZE)}
_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""bytes of an element, for the dtypes that a checkpoint supports"""


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

    # Check names, types and bounds.
    check_form(manifest, _CHECKPOINT if "step" in manifest else _FOLDER, MANIFEST)
    for name in manifest["files"]:
        if not is_plain(name, 2) or name == MANIFEST:
            raise ValueError(f"{MANIFEST} lists the file {name!r}, which is not a plain name")
    return dict(manifest)


def base_in(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the entry of a checkpoint's frozen parameters; None if it has none.

    The manifest of trained weights has another entry of this name: their base model.
    """
    return manifest["about"].get("base") if "step" in manifest else None


def header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, without reading its data.

    Raises:
        ValueError: there is none, or it does not describe the data of the file.
        OSError: the file cannot be read.
    """
    data = file.stat().st_size - 8
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        check_header_length(length, data)
        content: dict[str, Any] = parsed_json(stream.read(length))
    data -= length

    # Tensors follow each other without gaps, from the first to the last byte.
    spans = []
    for name, entry in content.items():
        if name == "__metadata__":
            check_form(entry, {None: str}, name)
            continue
        check_form(entry, _TENSOR, f"{name!r}")
        start, end = entry["data_offsets"]
        size = math.prod(entry["shape"]) * _BYTES.get(entry["dtype"], 0)
        if entry["dtype"] in _BYTES and size != end - start:
            raise ValueError(f"{name!r} has {end - start} bytes in its header, expected {size}")
        spans.append((start, end))
    last = 0
    for start, end in sorted(spans):
        if start != last:
            raise ValueError(f"byte {last} of its data belongs to no tensor, or to several")
        last = end
    if last != data:
        raise ValueError(f"its header describes {last} bytes, and {data} follow it")
    return content


def check_header_length(length: int, data: int) -> None:
    """Raise ValueError if a header of this length cannot be in a file.

    Args:
        length: as the beginning of the file says, in bytes.
        data: bytes of the file after its first eight.
    """
    if not 0 < length <= min(data, _MOST_HEADER):
        raise ValueError(f"its header cannot have {length} bytes")


def _inside(offset: Sequence[int], shard: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a shard of this offset and shape is inside a tensor of shape ``whole``."""
    if not len(shard) == len(whole) == len(offset):
        return False
    dimensions = zip(offset, shard, whole, strict=True)
    return all(at >= 0 and at + size <= length for at, size, length in dimensions)


def tensor_problems(
    folder: Path, files: Mapping[str, Any], tensors: Mapping[str, Any]
) -> list[str]:
    """List the tensors that the files of a checkpoint do not hold exactly once.

    Args:
        folder: the checkpoint.
        files: the manifest's entries of its files.
        tensors: dtype and global shape of each tensor, by name.
    """
    # Read the headers.
    wrong = []
    shards = defaultdict[str, list[Any]](list)  # offset and shape, by tensor
    for name in files:
        if not name.endswith(".safetensors"):
            continue
        try:
            entries = header(folder / name)
            about = parsed_json(entries.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
            check_form(about, {None: {"saved_offsets": [STEP]}})
            for tensor, entry in entries.items():
                shape = tuple(entry["shape"])
                offset = tuple(about[tensor]["saved_offsets"])
                if tensor in tensors and entry["dtype"] != tensors[tensor][0]:
                    wrong.append(
                        f"{tensor} is {entry['dtype']} in {name}, and {tensors[tensor][0]} in "
                        "the manifest"
                    )
                shards[tensor].append((offset, shape))
        except (OSError, ValueError, KeyError) as error:
            wrong.append(f"{name}: its header cannot be read ({type(error).__name__}: {error})")
    if wrong:
        return wrong

    # The shards of a tensor are inside it, start at different offsets, and have all its elements.
    for tensor, (_, shape) in tensors.items():
        held = shards.pop(tensor, [])
        inside = all(_inside(offset, shard, shape) for offset, shard in held)
        count = sum(math.prod(shard) for _, shard in held)
        whole = inside and count == math.prod(shape)
        if not whole or len({offset for offset, _ in held}) < len(held):
            wrong.append(
                f"{tensor} of shape {tuple(shape)} is not whole: {count} of {math.prod(shape)} "
                "elements"
            )
    return wrong + [f"{tensor} is not in the manifest" for tensor in shards]
