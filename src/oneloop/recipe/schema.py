"""The recipe as typed, frozen dataclasses; :mod:`oneloop.recipe.parse` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from oneloop.basics.bucket import check_address, is_address
from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import yaml_text
from oneloop.recipe import run_keys, training_keys


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A resolved recipe; ``resolved`` holds the same keys as plain data, as in recipe.yaml."""

    name: str
    seed: int = 0
    """seed of everything random"""
    duration: Duration = Duration("10ep")
    """length of training: steps (500), '20ep', '1M samples', '2B tokens'"""
    track: list[str] = field(default_factory=lambda: ["tensorboard"])
    """trackers by accelerate's names, comma-separated: tensorboard, wandb, trackio, mlflow, …
    ('none': none)"""
    task: training_keys.TaskConfig
    init: training_keys.InitConfig
    data: training_keys.DataConfig
    batch: training_keys.BatchConfig
    optimizer: training_keys.OptimizerConfig
    schedule: training_keys.ScheduleConfig
    ema: training_keys.EmaConfig
    guard: training_keys.GuardConfig
    eval: run_keys.EvalConfig
    save: run_keys.SaveConfig
    stop: run_keys.StopConfig
    log: run_keys.LogConfig
    watch: run_keys.WatchConfig
    machine: run_keys.MachineConfig
    run: run_keys.RunConfig
    debug: run_keys.DebugConfig
    resolved: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.mirror is None:
            return
        key = "run.dir" if self.mirror == self.run.dir else "save.mirror"
        check_address(self.mirror, key)

        # A mirror in a folder of this machine is not the run folder.
        there = Path(self.mirror.removeprefix("file://")).resolve()
        here = self.folder.resolve()
        are_nested = there.is_relative_to(here) or here.is_relative_to(there)
        if are_nested and self.mirror.startswith("file:"):
            raise BadInput(
                f"save.mirror {self.mirror} and run.dir {self.folder} are inside each other, and "
                "files of one would be deleted with the other; choose another address"
            )

    @property
    def folder(self) -> Path:
        """Return the run folder on this host."""
        if is_address(self.run.dir):
            return Path("runs", str(self.run.dir).partition("://")[2].strip("/"))
        return Path(self.run.dir or f"runs/{self.name}").expanduser()

    @property
    def mirror(self) -> str | None:
        """Return the address of the mirror, if there is one."""
        return self.run.dir if is_address(self.run.dir) else self.save.mirror

    def yaml(self) -> str:
        """Return the content of recipe.yaml."""
        return yaml_text(self.resolved)


_GROUPS = [one for one in fields(Recipe) if is_dataclass(one.type)]
GROUPS: dict[str, Any] = {one.name: one.type for one in _GROUPS}
"""the groups of keys and their classes, as ``--help`` lists them"""
