"""Models that transformers knows by a folder or a hub repository: safetensors only, a new head where classes differ."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import HUB, fetched, place_of
from oneloop.data.rows.cache import content_of


def is_transformers(name: str) -> bool:
    """Whether the name leads to a folder, or hub repository, of transformers."""
    return name.startswith(HUB) or (Path(name).expanduser() / "config.json").is_file()


def auto_model(
    kind: str,
    name: str,
    classes: Sequence[str] | None,
    *,
    pretrained: bool = True,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[nn.Module, list[str]]:
    """Load a transformers model by its Auto class ``kind``; return it and a line for the log. ``classes`` names its
    outputs (None: a language model); without ``options`` the weights are float32. Raises ValueError if it has no
    safetensors or lacks more than its head."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # which knows nothing of ranks
    made = getattr(transformers, kind)
    where, revision = place_of(name)
    known: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    labels: dict[str, Any] = {}
    if classes is not None:
        labels = {"id2label": dict(enumerate(classes)), "label2id": {label: i for i, label in enumerate(classes)}}
    try:
        config = transformers.AutoConfig.from_pretrained(where, **known, **labels)
        if not pretrained:
            return made.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32), []
        common = {"config": config, "use_safetensors": True, "dtype": torch.float32, **options}
        common |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = made.from_pretrained(where, **known, **common)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"task.model {name!r} cannot be loaded: {' '.join(str(error).split())}") from error
    other = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
    return model.train(), _judged(model, info["missing_keys"], info["unexpected_keys"], other, where)


def commit_of(name: str) -> str | None:
    """The hub's commit that a model was loaded at; None of one that lies in a folder."""
    config = fetched(name, "config.json") if name.startswith(HUB) else None
    return None if config is None else config.parent.name


def content_of_model(name: str, commit: str | None) -> dict[str, Any]:
    """What tells a model from any other: the hub's commit, or checksums of its weights and its config."""
    if commit is not None:
        return {"commit": commit}
    folder = Path(place_of(name)[0])
    return content_of([*sorted(folder.glob("*.safetensors")), folder / "config.json"], folder)


def seen(name: str) -> object:
    """A quick look at the files of :func:`content_of_model`: another, where one was changed. None of the hub's."""
    if name.startswith(HUB):
        return None
    folder = Path(place_of(name)[0])
    files = [*sorted(folder.glob("*.safetensors")), folder / "config.json"]
    return [(file.name, about.st_ino, about.st_size, about.st_mtime_ns) for file in files if (about := _stat(file))]


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def tokenizer_of(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer next to a model. Raises ValueError unless it is a fast one."""
    from transformers import AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # which would warn of every worker
    where, revision = place_of(name)
    try:
        made = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"task.model {name!r}: no tokenizer: {' '.join(str(error).split())}") from error
    if len(made) <= len(made.all_special_tokens):  # made of nothing, where no file of it lies there
        raise ValueError(f"task.model {name!r}: no tokenizer: its vocabulary is empty; save it next to the weights")
    if not made.is_fast:
        raise ValueError(f"task.model {name!r}: its tokenizer is not a fast tokenizer (tokenizer.json)")
    return made


def _judged(
    model: nn.Module, missing: Iterable[str], strange: Iterable[str], other: Iterable[str], where: str
) -> list[str]:
    """Rejects weights in which more is missing than a head (and a pooler, which some are saved without), or that hold
    more than one of another task."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    if not any(name.startswith(base) for name, _ in model.named_parameters()):  # then its largest part is
        sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
        base = f"{max(sizes, key=lambda name: sizes[name])}."

    def of_a_head(name: str) -> bool:
        return not name.startswith(base) or name.startswith(f"{base}pooler.")

    found = {"missing": missing, "unexpected": strange, "of another shape": other}
    wrong = {what: sorted(name for name in names if not of_a_head(name)) for what, names in found.items()}
    if any(wrong.values()):
        raise ValueError(f"{where}: the weights are of another model ({listed(wrong)}); name the model they are of")
    notes = []
    if new := sorted({name.rpartition(".")[0] for name in (*missing, *other)}):
        why = "are of other classes" if other else "have none"
        notes.append(f"the last layer ({', '.join(new)}) is new: the weights {why}")
    if left := sorted({name.partition(".")[0] for name in strange}):
        notes.append(f"left out of the weights: {', '.join(left)}")
    return notes


def listed(wrong: dict[str, list[str]]) -> str:
    """The first few names of each kind."""
    kinds = ((what, names) for what, names in wrong.items() if names)
    return "; ".join(f"{what}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" for what, names in kinds)
