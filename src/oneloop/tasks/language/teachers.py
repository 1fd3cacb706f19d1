"""Teachers: models of transformers that only compute outputs. Safetensors, without remote code."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from oneloop.basics.base_models import HUB, place_of
from oneloop.tasks.model_limits import check_sizes, config_of, shorter_length
from oneloop.tasks.transformers_models import (
    auto_model,
    commit_of,
    content_of_model,
    is_transformers,
    tokenizer_of,
)


@contextmanager
def _about_teacher(name: str) -> Iterator[None]:
    """Let the messages of errors name ``task.teacher``."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"task.teacher {name!r} needs Python code stored with its weights, which is never "
                "run; give a teacher whose class is in transformers"
            ) from error
        raise ValueError(str(error).replace("task.model", "task.teacher", 1)) from error


def checked_teacher(name: str, *, entries: int = 0, length: int = 0) -> Any:
    """Return the tokenizer of a teacher, of which only the configuration is read.

    Args:
        name: a folder, or hf:ID[@REVISION].
        entries: vocabulary size that it needs.
        length: positions that it needs.

    Raises:
        ValueError: it is missing, quantized, not in safetensors, or too small.
    """
    if not (name and is_transformers(name)):
        raise ValueError(
            f"task.teacher {name!r} is not a folder saved by transformers; give one, such as "
            "final/ of a run, or hf:ID"
        )
    folder = Path(place_of(name)[0])
    if not name.startswith(HUB) and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"task.teacher {name!r} has no safetensors; save its weights with save_pretrained"
        )

    # Read the sizes from its configuration.
    with _about_teacher(name):
        config = config_of(name, whole=True)
        if getattr(config, "quantization_config", None):
            raise ValueError(f"task.teacher {name!r} is quantized; give the unquantized model")
        vocabulary = config.get_text_config().vocab_size
        if entries > vocabulary:
            raise ValueError(
                f"task.teacher {name!r} has a vocabulary of {vocabulary:,} entries, and the "
                f"student's tokenizer {entries:,}; give a teacher with the student's vocabulary"
            )
        if length:
            positions, _ = shorter_length(name, length, key="length")
            if positions < length:
                raise ValueError(
                    f"task.teacher {name!r} has {positions:,} positions; set task.length "
                    f"{positions}"
                )
        return tokenizer_of(name)


def load_teacher(name: str, *, entries: int, length: int) -> nn.Module:
    """Load a teacher, in the dtype of its files.

    Args:
        name: a folder, or hf:ID[@REVISION].
        entries: vocabulary size of the tokenizer.
        length: tokens per sample.

    Raises:
        ValueError: it cannot be loaded.
    """
    with _about_teacher(name):
        model, notes = auto_model("AutoModelForCausalLM", name, None, dtype="auto")
        check_sizes(model, name, entries=entries, length=length, key="length")
        if notes:
            raise ValueError(f"task.teacher {name!r} is not a whole language model: {notes[0]}")
    return model


def teacher_content(name: str) -> dict[str, Any]:
    """Return what identifies a teacher: checksums of its files, or the commit on the hub."""
    return content_of_model(name, commit_of(name))
