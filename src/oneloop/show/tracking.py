"""Write metrics to metrics.jsonl and to Accelerate's trackers. Only rank 0 writes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from numpy.typing import NDArray

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, flattened, intact, replacing, vouched
from oneloop.basics.untrusted import read_json
from oneloop.show.examples import Examples, with_earlier
from oneloop.show.metrics_file import Lines

_FLUSH_INTERVAL = 5.0  # seconds between two flushes to TensorBoard, which block


def check_trackers(names: Sequence[str]) -> None:
    """Raise BadInput if a tracker is unknown to accelerate, or its package is not installed.

    Args:
        names: names of trackers, as accelerate knows them.
    """
    for name in names:
        if name == "none":
            raise BadInput('track is a list with "none"; for no tracker, write track="none" alone')
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise BadInput(f"track {name!r} is not a tracker of accelerate; known: {known}")
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
        self._accelerator = accelerator
        self._folder = folder
        self._say = say
        self._reported: set[str] = set()  # what could not be written
        self._lines = Lines(folder / "metrics.jsonl", say=say)

        # metrics for TensorBoard, their steps and times (seconds since 1970)
        self._buffered: list[tuple[Mapping[str, float], int, float]] = []
        self._flushed = time.monotonic()
        self._writes = accelerator.is_main_process
        if self._writes:
            with self._report_errors("metrics.jsonl"):
                if resumed:
                    self._resume_files(resumed)
                else:
                    self._lines.begin()

        # Start the trackers.
        flat = {name: str(value) for name, value in flattened(config).items()}
        for name in map(str, accelerator.log_with):
            with self._report_errors(f"tracker {name}"):
                tracker = self._started(name, project, step + 1 if resumed else 0)
                if not resumed:
                    tracker.store_init_configuration(flat)
                    if name == "tensorboard" and graph is not None and self._writes:
                        self._draw(tracker.tracker, graph)

    def _started(self, name: str, project: str, first: int) -> Any:
        """Start a tracker, whose first step will be ``first``."""
        kind = LOGGER_TYPE_TO_CLASS[name]
        where = [self._accelerator.logging_dir] if kind.requires_logging_directory else []
        if name == "tensorboard":
            # It hides the events of an earlier start from this step on.
            tracker = kind(project, *where, purge_step=first)
        else:
            tracker = kind(project, *where)
        tracker.start()
        self._accelerator.trackers.append(tracker)
        return tracker

    def _draw(self, writer: Any, graph: Any) -> None:
        from tensorboard.compat.proto.config_pb2 import RunMetadata

        with self._report_errors("the model's graph"):
            writer.file_writer.add_graph((graph, RunMetadata()))

    @contextmanager
    def _report_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if what not in self._reported:
                self._reported.add(what)
                self._say(
                    f"{what} cannot be written ({type(error).__name__}: {error}); training "
                    "continues without it"
                )

    @property
    def files(self) -> list[Path]:
        """Return the files that must be on disk before a checkpoint that refers to them."""
        return [self._lines.path]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in metrics.jsonl.

        Flush to TensorBoard first, since a resume does not log again.
        """
        self._flush()
        return self._lines.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Delete later lines than ``state``.

        Events stay, so that a second rewind still has the first one.
        """
        if self._writes:
            with self._report_errors("metrics.jsonl"):
                self._lines.back_to(state, kept=b'"event"')

    def _resume_files(self, resumed: Mapping[str, Any]) -> None:
        self._lines.back_to(resumed, kept=b'"event": "resume"')
        examples = self._folder / "examples.json"
        try:
            damaged = not intact(read_json(examples))
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            damaged = True
        if damaged:
            self._say(
                f"{examples} is damaged and was renamed; the next evaluation writes a new one"
            )
            examples.rename(examples.with_name(f"bad-{examples.name}"))

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write one line; also log its numbers to the trackers."""
        if not self._writes:
            return
        with self._report_errors("metrics.jsonl"):
            self._lines.append(metrics)

        # Log the numbers to the trackers, as one curve per EMA.
        weights = metrics.get("weights", "raw")
        head = "" if weights == "raw" else f"{weights}/"
        numbers = {}
        for name, value in metrics.items():
            if "/" in name and isinstance(value, int | float):
                numbers[head + name] = value
        if numbers:
            for tracker in self._accelerator.trackers:
                with self._report_errors(f"tracker {tracker.name}"):
                    if tracker.name == "tensorboard":
                        self._buffered.append((numbers, metrics["step"], time.time()))
                    else:
                        tracker.log(numbers, step=metrics["step"])
        if time.monotonic() - self._flushed > _FLUSH_INTERVAL:
            self._flush()

    def show(self, step: int, examples: Examples) -> None:
        """Write the samples to examples.json, and log them to the trackers.

        Only some trackers support images or texts.
        """
        if examples.problem and self._writes and "show" not in self._reported:
            self._reported.add("show")
            self._say(
                f"{examples.problem}; training continues (--eval.samples 0 turns examples off)"
            )
        if not self._writes or not (examples.samples or examples.matrices):
            return
        path = self._folder / "examples.json"
        with self._report_errors("examples.json"):
            found = with_earlier({"step": step, **examples.plain()}, _read(path))
            with replacing(path) as draft:
                draft.write_text(dumps(vouched(found)))
        for tracker in self._accelerator.trackers:
            with self._report_errors(f"tracker {tracker.name}"):
                _log_examples(tracker, step, examples)

    def _flush(self) -> None:
        """Write to TensorBoard, with one event for all metrics of a step.

        accelerate writes one event per metric and waits for the disk, which takes thirty times as
        long."""
        self._flushed = time.monotonic()
        buffered = self._buffered
        self._buffered = []
        if not buffered:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        trackers = {tracker.name: tracker for tracker in self._accelerator.trackers}
        writer = trackers["tensorboard"].tracker
        with self._report_errors("tracker tensorboard"):
            for numbers, step, when in buffered:
                summary = Summary()
                for name, value in numbers.items():
                    summary.value.add(tag=name, simple_value=value)
                writer.file_writer.add_summary(summary, step, when)
            writer.flush()

    def close(self) -> None:
        """Close the trackers and the file."""
        self._flush()
        # Do not call end_training(), which also ends the process group.
        for tracker in self._accelerator.trackers:
            with self._report_errors(f"tracker {tracker.name}"):
                tracker.finish()
        self._lines.close()


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if it is missing or damaged."""
    try:
        return dict(read_json(path))
    except (OSError, ValueError):
        return {}


def _log_examples(tracker: Any, step: int, examples: Examples) -> None:
    """Log the samples in the way that the tracker supports."""
    if hasattr(tracker, "log_images"):
        for name, picture in _pictures(examples).items():
            if tracker.name == "tensorboard":
                tracker.log_images({name: picture[None]}, step=step, dataformats="NHWC")
            elif tracker.name == "aim":
                tracker.log_images({name: picture}, step=step)  # one image; others take a list
            else:
                tracker.log_images({name: picture[None]}, step=step)
    texts = _texts(examples)
    if texts and tracker.name == "tensorboard":
        tracker.log(texts, step=step)
    elif texts and hasattr(tracker, "log_table"):
        rows = [[name, text] for name, text in texts.items()]
        tracker.log_table("examples", columns=["which", "text"], data=rows, step=step)


def _pictures(examples: Examples) -> dict[str, NDArray[np.uint8]]:
    """Return images of the samples and of matrices, by name in the tracker.

    Names of EMA weights begin with the name of the EMA, as those of metrics do.
    """
    from oneloop.show.pictures import matrix, tiles

    pictures = {}
    head = "" if examples.weights == "raw" else f"{examples.weights}/"
    for name, worst in (("examples/fixed", False), ("examples/worst", True)):
        chosen = []
        for sample in examples.samples:
            if "image" in sample and sample["worst"] == worst:
                chosen.append(sample)
        if chosen:
            pictures[head + name] = tiles(chosen)
    for name, table in examples.matrices.items():
        pictures[f"{head}examples/{name}"] = matrix(table)
    return pictures


def _texts(examples: Examples) -> dict[str, str]:
    """Return the samples with text as Markdown, by name in the tracker."""
    texts = {}
    for sample in examples.samples:
        name = f"{'worst' if sample['worst'] else 'fixed'}/{sample['index']}"
        caption = ""
        if "continuation" in sample:
            text = sample["prompt"] + "\N{RIGHTWARDS ARROW}" + sample["continuation"]
            caption = f"generated text after the arrow ({examples.weights} weights)"
        else:
            text = sample.get("text") or "".join(piece for piece, _ in sample.get("tokens", ()))
            if "prediction" in sample:
                label = sample.get("target", "unknown")
                caption = f"label {label}, prediction {sample['prediction']}"
                caption += f" ({examples.weights} weights)"
        if text:
            lines = [f"    {line}" for line in text.splitlines()]  # a code block
            texts[name] = "\n".join([caption, "", *lines])
    return texts
