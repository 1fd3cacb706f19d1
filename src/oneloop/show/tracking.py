"""Write metrics to metrics.jsonl and to Accelerate's trackers. Only rank 0 writes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, flattened, replacing
from oneloop.show.metrics_file import Lines

_FLUSH_SECONDS = 5  # between two writes of TensorBoard's thread


def check_trackers(names: Sequence[str]) -> None:
    """Raise BadInput if a tracker is unknown to accelerate, or its package is not installed.

    Args:
        names: names of trackers, as accelerate knows them.
    """
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise BadInput(
                f"track {name!r} is not a tracker of accelerate; known: {known}; for no tracker, "
                "set --track none alone"
            )
        if find_spec(name) is None:
            raise BadInput(
                f"track {name!r}: {name!r} is not installed; pip install {name}, or set "
                "--track tensorboard"
            )


class Tracking:
    """A log of metrics: one JSON object per line in metrics.jsonl, and the trackers.

    Only the main process writes. An error of a tracker or of the disk under metrics.jsonl does not
    end the run: it is reported once, and training continues.

    Args:
        accelerator: the trackers are its ``log_with``.
        folder: the run folder.
        project: name of the project in the trackers.
        config: the resolved recipe, which trackers receive at the first start.
        resumed: the state of an earlier start; later lines are deleted (None: all lines).
        step: the step of ``resumed``.
        graph: a ``GraphDef``, which TensorBoard receives at the first start.
        say: reports an error.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        *,
        project: str,
        config: Mapping[str, Any],
        resumed: Mapping[str, Any] | None = None,
        step: int = 0,
        graph: Any = None,
        say: Callable[[str], object] = print,
    ) -> None:
        self._say = say
        self._reported: set[str] = set()  # what could not be written
        self._lines = Lines(folder / "metrics.jsonl", say=say)
        self.files = [self._lines.path]  # must be on disk before a checkpoint that refers to them
        self._trackers: list[Any] = []
        self._writes = accelerator.is_main_process
        if not self._writes:
            return
        with self._report_errors("metrics.jsonl"):
            if resumed:
                self._lines.back_to(resumed, kept=b'"event": "resume"')
            else:
                self._lines.begin()

        # Start the trackers.
        flat = {name: str(value) for name, value in flattened(config).items()}
        for name in map(str, accelerator.log_with):
            with self._report_errors(f"tracker {name}"):
                kind = LOGGER_TYPE_TO_CLASS[name]
                where = [accelerator.logging_dir] if kind.requires_logging_directory else []
                if name == "tensorboard":
                    # It hides the events of an earlier start from the next step on.
                    tracker = kind(project, *where, purge_step=step + 1, flush_secs=_FLUSH_SECONDS)
                else:
                    tracker = kind(project, *where)
                tracker.start()
                self._trackers.append(tracker)
                if not resumed:
                    tracker.store_init_configuration(flat)
                    if name == "tensorboard" and graph is not None:
                        tracker.tracker.file_writer.add_graph(graph)

    @contextmanager
    def _report_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if what not in self._reported:
                self._say(
                    f"{what} cannot be written ({type(error).__name__}: {error}); training "
                    "continues without it"
                )
            self._reported.add(what)

    def _each_tracker(self, act: Callable[[Any], object]) -> None:
        """Call a function with each tracker; report the first error of each one."""
        for tracker in self._trackers:
            with self._report_errors(f"tracker {tracker.name}"):
                act(tracker)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in metrics.jsonl.

        Flush to TensorBoard first, since a resume does not log again.
        """
        self._each_tracker(_flush)
        return self._lines.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Delete later lines than ``state``.

        Events stay, so that a second rewind still has the first one.
        """
        if self._writes:
            with self._report_errors("metrics.jsonl"):
                self._lines.back_to(state, kept=b'"event"')

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write one line; also log its numbers to the trackers."""
        if not self._writes:
            return
        with self._report_errors("metrics.jsonl"):
            self._lines.append(metrics)

        # Log the numbers to the trackers, as one curve per EMA.
        weights = metrics.get("weights", "raw")
        head = "" if weights == "raw" else f"{weights}/"
        named = [pair for pair in metrics.items() if "/" in pair[0]]
        numbers = {head + name: value for name, value in named if isinstance(value, int | float)}
        if numbers:
            self._each_tracker(lambda tracker: _log(tracker, numbers, metrics["step"]))

    def show(self, step: int, examples: Any) -> None:
        """Write examples of predictions to examples.json, and to the trackers that support them.

        Args:
            step: the step of the evaluation.
            examples: a :class:`oneloop.tools.report.examples.Examples`.
        """
        if not self._writes:
            return
        if examples.problem and "examples" not in self._reported:
            self._reported.add("examples")
            self._say(
                f"{examples.problem}; training continues (--eval.samples 0 turns examples off)"
            )
        if not (examples.samples or examples.matrices):
            return
        file = self._lines.path.with_name("examples.json")
        with self._report_errors(file.name), replacing(file) as draft:
            draft.write_text(dumps(examples.as_json(step)))
        self._each_tracker(lambda tracker: examples.log(tracker, step))

    def close(self) -> None:
        """Close the trackers and the file."""
        # Do not call end_training(), which also ends the process group.
        self._each_tracker(lambda tracker: tracker.finish())
        self._lines.close()


def _flush(tracker: Any) -> None:
    if tracker.name == "tensorboard":
        tracker.tracker.flush()


def _log(tracker: Any, numbers: Mapping[str, float], step: int) -> None:
    """Log metrics; to TensorBoard, as one event that its thread writes.

    accelerate writes one event per metric and waits for the disk, which takes thirty times as long.
    """
    if tracker.name != "tensorboard":
        tracker.log(numbers, step=step)
        return
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary()
    for name, value in numbers.items():
        summary.value.add(tag=name, simple_value=value)
    tracker.tracker.file_writer.add_summary(summary, step)
