"""Models of transformers from a folder or hub repository.

Only safetensors are loaded. If the classes differ, the head is new.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import HUB, fetched, place_of
from oneloop.tasks.model_limits import config_of, loading
from oneloop.tasks.rows.cache import content_of


def is_transformers(name: str) -> bool:
    """Whether the name is a hub repository, or a folder saved by transformers (not by oneloop)."""
    config = Path(name).expanduser() / "config.json"
    own = b'"oneloop": "image_classification"'
    return name.startswith(HUB) or (config.is_file() and own not in config.read_bytes())


def auto_model(
    kind: str,
    name: str,
    classes: Sequence[str] | None,
    *,
    pretrained: bool = True,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[nn.Module, list[str]]:
    """Load a transformers model; return it and lines for the log.

    Args:
        kind: name of its Auto class.
        name: a folder, or ``hf:ID[@REVISION]``.
        classes: names of the outputs; None: a language model.
        pretrained: load the weights; False: only the configuration.
        trust_remote_code: run Python code stored with the weights.
        options: more options of ``from_pretrained``; the default dtype is float32.

    Raises:
        ValueError: it has no safetensors, or more than the head is missing.
    """
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # otherwise every rank shows a bar
    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_load_report)
    auto_class = getattr(transformers, kind)
    path, revision = place_of(name)

    # The configuration of a classifier names its outputs.
    config = config_of(name, trust_remote_code=trust_remote_code, whole=True)
    if classes is not None:
        config.id2label = dict(enumerate(classes))
        config.label2id = {label: number for number, label in enumerate(classes)}
    with loading(f"task.model {name!r} cannot be loaded"):
        if not pretrained:
            model = auto_class.from_config(
                config, trust_remote_code=trust_remote_code, dtype=torch.float32
            )
            return model, []
        options.setdefault("dtype", torch.float32)
        model, info = auto_class.from_pretrained(
            path,
            config=config,
            revision=revision,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )

    # Some versions of transformers list the shapes next to the name.
    mismatched = set()
    for entry in info["mismatched_keys"]:
        mismatched.add(entry[0] if isinstance(entry, tuple) else entry)
    notes = _check_loaded(model, info["missing_keys"], info["unexpected_keys"], mismatched, path)
    return model.train(), notes


def _is_no_load_report(record: logging.LogRecord) -> bool:
    """Return whether a record is not the table of new and unused weights, which notes name.

    An error in a conversion of weights refers to the table, which is then logged.
    """
    message = record.getMessage()
    return "LOAD REPORT" not in message or "CONVERSION" in message


def commit_of(name: str) -> str | None:
    """Return the hub commit from which a model was loaded; None for a folder."""
    config = fetched(name, "config.json") if name.startswith(HUB) else None
    return None if config is None else config.parent.name


def content_of_model(name: str, commit: str | None) -> dict[str, Any]:
    """Return the content key of a model: the hub commit, or checksums of weights and config."""
    if commit is not None:
        return {"commit": commit}
    folder = Path(place_of(name)[0])
    return content_of([*sorted(folder.glob("*.safetensors")), folder / "config.json"], folder)


def file_stats(name: str) -> object:
    """Return name, inode, size and mtime of the files of :func:`content_of_model`.

    Return None for a hub model.
    """
    if name.startswith(HUB):
        return None
    folder = Path(place_of(name)[0])
    stats = []
    for file in (*sorted(folder.glob("*.safetensors")), folder / "config.json"):
        if file.exists():
            stat = file.stat()
            stats.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return stats


def tokenizer_of(name: str, *, trust_remote_code: bool = False, fast: bool = True) -> Any:
    """Return the tokenizer next to a model.

    Args:
        name: a folder, or ``hf:ID[@REVISION]``.
        trust_remote_code: run Python code stored with it.
        fast: whether it must be a fast one, which knows the words and characters of its tokens.

    Raises:
        ValueError: there is none, or it is not a fast tokenizer.
    """
    from transformers import AutoTokenizer

    # Otherwise it warns in every DataLoader worker.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path, revision = place_of(name)
    with loading(f"task.model {name!r}: no tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    # If no tokenizer file exists, transformers builds one from nothing.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            f"task.model {name!r}: no tokenizer: its vocabulary is empty; save it next to the "
            "weights"
        )
    if fast and not tokenizer.is_fast:
        raise ValueError(
            f"task.model {name!r}: its tokenizer is not a fast tokenizer (tokenizer.json)"
        )
    return tokenizer


def _check_loaded(
    model: nn.Module,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[str],
    where: str,
) -> list[str]:
    """Return lines about new and ignored layers.

    Raise ValueError if weights other than the head (and the pooler, which some checkpoints lack)
    are missing, unexpected or of another shape.
    """
    # Find the prefix of the base model. A model that does not tell it: its largest submodule.
    base = f"{getattr(model, 'base_model_prefix', '')}."
    if not any(name.startswith(base) for name, _ in model.named_parameters()):
        sizes = {}
        for name, module in model.named_children():
            sizes[name] = sum(p.numel() for p in module.parameters())
        base = f"{max(sizes, key=lambda name: sizes[name])}."

    def is_head(name: str) -> bool:
        return not name.startswith(base) or name.startswith(f"{base}pooler.")

    # Reject other weights than those of the head.
    errors = {
        "missing": sorted(filterfalse(is_head, missing)),
        "unexpected": sorted(filterfalse(is_head, unexpected)),
        "shape mismatch": sorted(filterfalse(is_head, mismatched)),
    }
    if any(errors.values()):
        raise ValueError(
            f"{where}: the weights do not fit this model ({listed(errors)}); set task.model to "
            "match"
        )

    # Report what is new, and what is not used.
    notes = []
    new = sorted({name.rpartition(".")[0] for name in (*missing, *mismatched)})
    if new:
        why = "the classes differ" if mismatched else "the weights have none"
        notes.append(f"the last layer ({', '.join(new)}) is re-initialized: {why}")
    ignored = sorted({name.partition(".")[0] for name in unexpected})
    if ignored:
        notes.append(f"left out of the weights: {', '.join(ignored)}")
    return notes


def listed(wrong: dict[str, list[str]]) -> str:
    """Return the first three names of each kind as text."""
    kinds = []
    for what, names in wrong.items():
        if names:
            more = ", …" if len(names) > 3 else ""
            kinds.append(f"{what}: {', '.join(names[:3])}{more}")
    return "; ".join(kinds)
