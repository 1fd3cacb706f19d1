"""What the safetensors files of a checkpoint say they hold, against what its manifest says. Needs no torch."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, without reading its data. Raises ValueError if there is none."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 1 << 28:
            raise ValueError("its header is too long")
        content = json.loads(stream.read(length))
    if not isinstance(content, dict):
        raise ValueError("its header is none")
    return content


def tensor_problems(folder: Path, files: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[str]:
    """List the tensors of a manifest (dtype and global shape by name) that the files do not hold exactly once."""
    wrong, rows = [], defaultdict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]](list)
    for name in (name for name in files if name.endswith(".safetensors")):
        try:
            entries = header(folder / name)
            about = json.loads(entries.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
            for tensor, entry in entries.items():
                shape = tuple(entry["shape"])
                offset = tuple(about[tensor]["saved_offsets"])
                if tensor in tensors and entry["dtype"] != tensors[tensor][0]:
                    wrong.append(f"{tensor} is {entry['dtype']} in {name}, and {tensors[tensor][0]} in the manifest")
                rows[tensor].append((offset, shape))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            wrong.append(f"{name}: its header cannot be read ({type(error).__name__}: {error})")
    if wrong:
        return wrong
    for tensor, (_, shape) in tensors.items():
        held = rows.pop(tensor, [])
        inside = all(
            len(piece) == len(shape) == len(offset)
            and all(at >= 0 and at + size <= whole for at, size, whole in zip(offset, piece, shape, strict=True))
            for offset, piece in held
        )
        count = sum(math.prod(piece) for _, piece in held)
        if not inside or count != math.prod(shape) or len({offset for offset, _ in held}) < len(held):
            wrong.append(f"{tensor} of shape {tuple(shape)} is not whole: {count} of {math.prod(shape)} elements")
    return wrong + [f"{tensor} is not in the manifest" for tensor in rows]
