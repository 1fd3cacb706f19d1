"""The parts of a run that rare work between its steps reads and changes."""

from dataclasses import dataclass

from oneloop.checks.repeats import Checks
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.counters import RunLog
from oneloop.loop.gradients import Gradients
from oneloop.loop.steps import Steps
from oneloop.loop.training_state import State


@dataclass(frozen=True)
class Parts:
    """The parts of a run in training."""

    job: Job  # what the recipe describes
    run: Run  # this process
    state: State  # what a checkpoint holds: counters, meter, model, optimizer, EMAs
    run_log: RunLog  # metrics.jsonl, the trackers and the terminal
    gradients: Gradients  # seeds and sums the gradients of a step
    checks: Checks  # compares what must not depend on the parallel layout
    steps: Steps  # loads the micro-batches
