"""The packages of oneloop's extras, which an installation may lack."""

EXTRAS = {
    "sklearn": "vision",
    "torchvision": "vision",
    "datasets": "text",
    "pyarrow": "text",
    "tokenizers": "text",
    "transformers": "text",
    "bitsandbytes": "lora",
    "peft": "lora",
}
"""Module: the extra of pyproject.toml that installs it."""


def how_to_install(error: BaseException) -> str:
    """Return the end of a message: the extra with the module that an import misses; else empty."""
    missing = isinstance(error, ModuleNotFoundError) and error.name
    extra = EXTRAS.get(str(missing).partition(".")[0])
    return f"; oneloop's extra {extra!r} has it: pip install 'oneloop[{extra}]'" if extra else ""
