"""The config files of accelerate: those of oneloop by a short name, and the user's own."""

from pathlib import Path
from typing import Any

import yaml

from oneloop.basics.exit_codes import BadInput

_PACKAGE = Path(__file__).parents[1]

_FOLDERS = (_PACKAGE / "accelerate_configs", _PACKAGE.parents[1] / "accelerate_configs")
"""folders in an installed package, and in a checkout"""


def config_files() -> dict[str, Path]:
    """Return the packaged config files of accelerate by name."""
    folder = next(folder for folder in _FOLDERS if folder.is_dir())
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def config_file(asked: str) -> str:
    """Return the path of a config file by its short name.

    An existing file of that name takes precedence. An unknown name is returned as it is.
    """
    if Path(asked).is_file():
        return asked
    return str(config_files().get(asked, asked))


def read_config(asked: str) -> dict[str, Any]:
    """Return the settings of a config file, given by its short name or path. Raise BadInput."""
    try:
        settings = yaml.safe_load(Path(config_file(asked)).read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(config_files())
        raise BadInput(
            f"--config_file {asked} cannot be read: {error.strerror}; known: {known}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError):
        settings = None
    if not isinstance(settings, dict):
        raise BadInput(f"--config_file {asked} is not an accelerate config file")
    return settings
