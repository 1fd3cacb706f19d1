"""The recipe as typed, frozen dataclasses; :mod:`oneloop.recipe.parse` reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from oneloop.basics.duration import Duration
from oneloop.recipe.key_rules import reject_inexact
from oneloop.recipe.run_keys import (
    DebugConfig,
    EvalConfig,
    LogConfig,
    MachineConfig,
    RunConfig,
    SaveConfig,
    StopConfig,
    WatchConfig,
)
from oneloop.recipe.training_keys import (
    BatchConfig,
    EmaConfig,
    GuardConfig,
    InitConfig,
    OptimizerConfig,
    ScheduleConfig,
    TaskConfig,
)

GROUPS: dict[str, type] = {
    "task": TaskConfig,
    "init": InitConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "ema": EmaConfig,
    "guard": GuardConfig,
    "eval": EvalConfig,
    "save": SaveConfig,
    "stop": StopConfig,
    "log": LogConfig,
    "watch": WatchConfig,
    "machine": MachineConfig,
    "run": RunConfig,
    "debug": DebugConfig,
}
"""the groups of keys, as ``--help`` lists them"""


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe; ``resolved`` holds the same keys as plain data, as in recipe.yaml."""

    name: str
    seed: int
    duration: Duration
    track: tuple[str, ...]
    task: TaskConfig
    init: InitConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    ema: EmaConfig
    guard: GuardConfig
    eval: EvalConfig
    save: SaveConfig
    stop: StopConfig
    log: LogConfig
    watch: WatchConfig
    machine: MachineConfig
    run: RunConfig
    debug: DebugConfig
    resolved: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.batch.grain is not None:
            reject_inexact(self.batch.grain, self.eval, self.optimizer, self.machine)

    @property
    def folder(self) -> Path:
        return Path(self.run.dir or f"runs/{self.name}").expanduser()

    def yaml(self) -> str:
        return yaml.safe_dump(dict(self.resolved), sort_keys=False)
