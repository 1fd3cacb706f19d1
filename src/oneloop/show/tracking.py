"""Write metrics to metrics.jsonl and to Accelerate's trackers. Only rank 0 writes."""

import json
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
from oneloop.show.examples import Examples, with_earlier
from oneloop.show.metrics_file import Lines
from oneloop.show.pictures import matrix, tiles

_FLUSH_INTERVAL = 5.0  # seconds between two flushes to TensorBoard, which block


def check_trackers(names: Sequence[str]) -> None:
    """Raise BadInput for a tracker that accelerate does not know, or whose package is not
    installed."""
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise BadInput(f"track {name!r} is not a tracker of accelerate; known: {known}")
        if find_spec(name) is None:
            raise BadInput(
                f"track {name!r}: {name!r} is not installed; pip install {name}, or set "
                "--track tensorboard"
            )


class Tracking:
    """A log of metrics: one JSON object per line in metrics.jsonl, and the trackers. Only the main
    process writes.

    An error of a tracker or of the disk under metrics.jsonl does not end the run: it is reported
    once, and training continues.

    ``resumed`` is the state of an earlier start at ``step``; later lines are deleted (None: all
    lines). At the first start trackers receive ``config``, the resolved recipe, and TensorBoard
    also ``graph``, a ``GraphDef``."""

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
        self._accelerator, self._say, self._folder = accelerator, say, folder
        self._reported: set[str] = set()
        self._lines = Lines(folder / "metrics.jsonl", say=say)
        self._buffered: list[tuple[Mapping[str, float], int, float]] = []
        """metrics for TensorBoard, their steps and times (seconds since 1970)"""
        self._flushed = time.monotonic()
        self._writes = accelerator.is_main_process
        if self._writes:
            with self._report_errors("metrics.jsonl"):
                if resumed:
                    self._resume_files(resumed)
                else:
                    self._lines.begin()
        flat = {name: str(value) for name, value in flattened(config).items()}
        for name in map(str, accelerator.log_with):
            with self._report_errors(f"tracker {name}"):
                tracker = self._started(name, project, step + 1 if resumed else 0)
                if not resumed:
                    tracker.store_init_configuration(flat)
                    if name == "tensorboard" and graph is not None and self._writes:
                        self._draw(tracker.tracker, graph)

    def _started(self, name: str, project: str, first: int) -> Any:
        kind = LOGGER_TYPE_TO_CLASS[name]
        where = [self._accelerator.logging_dir] if kind.requires_logging_directory else []
        # TensorBoard hides the events of an earlier start from this step on.
        tracker = kind(project, *where, **({"purge_step": first} if name == "tensorboard" else {}))
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
        """Return the position in metrics.jsonl. Flush to TensorBoard first, since a resume does not
        log again."""
        self._flush()
        return self._lines.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Delete later lines than ``state``, except events, so that a second rewind still has the
        first one."""
        if self._writes:
            with self._report_errors("metrics.jsonl"):
                self._lines.back_to(state, kept=b'"event"')

    def _resume_files(self, resumed: Mapping[str, Any]) -> None:
        self._lines.back_to(resumed, kept=b'"event": "resume"')
        examples = self._folder / "examples.json"
        try:
            damaged = not intact(dict(json.loads(examples.read_bytes())))
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, RecursionError):
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
        # one curve per EMA
        head = f"{metrics['weights']}/" if metrics.get("weights", "raw") != "raw" else ""
        numbers = {
            f"{head}{k}": value
            for k, value in metrics.items()
            if "/" in k and isinstance(value, int | float)
        }
        for tracker in self._accelerator.trackers if numbers else ():
            with self._report_errors(f"tracker {tracker.name}"):
                if tracker.name == "tensorboard":
                    self._buffered.append((numbers, metrics["step"], time.time()))
                else:
                    tracker.log(numbers, step=metrics["step"])
        if time.monotonic() - self._flushed > _FLUSH_INTERVAL:
            self._flush()

    def show(self, step: int, examples: Examples) -> None:
        """Write the samples to examples.json, and log them to the trackers that support images or
        texts."""
        if examples.problem and self._writes and "show" not in self._reported:
            self._reported.add("show")
            self._say(
                f"{examples.problem}; training continues (--eval.samples 0 turns examples off)"
            )
        if not self._writes or not (examples.samples or examples.confusion):
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
        buffered, self._buffered, self._flushed = self._buffered, [], time.monotonic()
        if not buffered:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        (writer,) = (
            tracker.tracker
            for tracker in self._accelerator.trackers
            if tracker.name == "tensorboard"
        )
        with self._report_errors("tracker tensorboard"):
            for numbers, step, when in buffered:
                values = [
                    Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()
                ]
                writer.file_writer.add_summary(Summary(value=values), step, when)
            writer.flush()

    def close(self) -> None:
        """Close the trackers and the file."""
        self._flush()
        # not end_training(), which also ends the process group
        for tracker in self._accelerator.trackers:
            with self._report_errors(f"tracker {tracker.name}"):
                tracker.finish()
        self._lines.close()


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def _log_examples(tracker: Any, step: int, examples: Examples) -> None:
    if hasattr(tracker, "log_images"):
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        for name, picture in _pictures(examples).items():
            # aim takes one image, the others a list
            images = picture if tracker.name == "aim" else picture[None]
            tracker.log_images({name: images}, step=step, **layout)
    texts = _texts(examples)
    if texts and tracker.name == "tensorboard":
        tracker.log(texts, step=step)
    elif texts and hasattr(tracker, "log_table"):
        tracker.log_table(
            "examples", columns=["which", "text"], data=[[*row] for row in texts.items()], step=step
        )


def _pictures(examples: Examples) -> dict[str, NDArray[np.uint8]]:
    pictures = {}
    for name, worst in (("examples/fixed", False), ("examples/worst", True)):
        if chosen := [
            sample for sample in examples.samples if "image" in sample and sample["worst"] == worst
        ]:
            pictures[name] = tiles(chosen)
    return pictures | (
        {"examples/confusion": matrix(examples.confusion)} if examples.confusion else {}
    )


def _texts(examples: Examples) -> dict[str, str]:
    texts = {}
    for sample in examples.samples:
        name = f"{'worst' if sample['worst'] else 'fixed'}/{sample['index']}"
        text = sample.get("text") or "".join(piece for piece, _ in sample.get("tokens", ()))
        caption = (
            f"label {sample.get('target', 'unknown')}, prediction {sample['prediction']}"
            if "prediction" in sample
            else ""
        )
        if "continuation" in sample:
            text = sample["prompt"] + "\N{RIGHTWARDS ARROW}" + sample["continuation"]
            caption = "generated text after the arrow"
        if text:
            texts[name] = f"{caption}\n\n" + "\n".join(f"    {line}" for line in text.splitlines())
    return texts
