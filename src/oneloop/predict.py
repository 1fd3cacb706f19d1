"""What a model says of every sample, in order, by one process or many, to one file.

>>> said = predictions(task, model, dataset, accelerator=accelerator, micro=32)     # of this rank's samples
>>> write(Path("said.parquet"), said, accelerator=accelerator)                      # the same file for any ranks
"""

import csv
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from oneloop.basics.files import dumps, replacing
from oneloop.basics.progress import tracked
from oneloop.basics.tensors import share_buffers
from oneloop.data.seeded_samples import SeededSamples
from oneloop.data.step_batches import CollateWithWeight, loader, transferred
from oneloop.evaluate import evaluating, share_of
from oneloop.tasks.protocol import Objective
from oneloop.tasks.protocol_checks import named

Columns = dict[str, list[Any]]
_GROUP = 10_000  # rows of a row group


def predictions(
    task: Objective,
    model: nn.Module,
    dataset: Any,
    *,
    accelerator: Accelerator,
    micro: int,
    workers: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    raw: bool = False,
) -> Iterator[Columns]:
    """Columns of one micro-batch after another, of this rank's samples: those of rank 0 come first. Every rank must get
    here.

    Args:
        task: its ``loss`` gives outputs, and where it ``writes`` its ``generate`` too; its ``predicted`` makes columns
            of them, else they are taken as they are.
        model: whole or sharded; nothing of it is changed.
        dataset: map-style.
        accelerator: its ranks share the samples.
        micro: samples that one rank looks at at once.
        workers: processes that load data.
        dtype: of floating inputs.
        seed: of what is random in the data set.
        raw: the outputs too.

    Raises:
        ValueError: an output or a column has no entry for each sample.
    """
    share = share_of([range(len(dataset))], micro, accelerator.num_processes, accelerator.process_index)
    collate = CollateWithWeight(task.collate, task.weight, dtype=dtype)
    loaded = loader(
        SeededSamples(dataset, seed=seed), collate, share.places, workers=workers, device=accelerator.device
    )
    share_buffers(model)
    with evaluating(model):
        batches = transferred((batch for batch, _ in loaded), accelerator.device)
        shown = tracked(batches, "predicting", total=len(share.places))
        for places, source, batch in zip(share.places, share.sources, shown, strict=True):
            _, outputs = task.loss(model, batch)
            if getattr(task, "writes", False):
                outputs = {**outputs, **task.generate(model, batch)}  # type: ignore[attr-defined]
            if source is None:
                continue  # of a rank that has none left, and must call the model as often as the others
            predicted = (
                _columns(task, task.predicted(batch, outputs), len(places)) if hasattr(task, "predicted") else {}
            )
            columns = {"row": [index for _, index in places]}
            if hasattr(dataset, "file"):
                columns["file"] = [dataset.file(index) for _, index in places]
            yield columns | predicted | (_outputs(outputs, len(places)) if raw or not predicted else {})


def _columns(task: Any, predicted: Any, samples: int) -> Columns:
    member = f"{named(task)}.predicted"
    if not isinstance(predicted, Mapping):
        raise ValueError(f"{member} returned a {type(predicted).__name__}; a dict of columns is needed")
    columns = {str(name): value.tolist() if hasattr(value, "tolist") else value for name, value in predicted.items()}
    for name, value in columns.items():
        if not isinstance(value, list | tuple) or len(value) != samples:
            number = f"{len(value)} entries" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise ValueError(f"{member} returned {number} as {name!r} for {samples} samples; give each one")
    return columns


def _outputs(outputs: Mapping[str, Tensor], samples: int) -> Columns:
    own = {name: tensor for name, tensor in outputs.items() if tensor.ndim and len(tensor) == samples}
    if not own:
        raise ValueError("the task's loss() returns no outputs with an entry for each sample; give it predicted()")
    return {name: (tensor.float() if tensor.is_floating_point() else tensor).tolist() for name, tensor in own.items()}


def write(file: Path, predicted: Iterable[Columns], *, accelerator: Accelerator) -> int:
    """Writes all ranks' columns to one file, the same whatever their number. Every rank must get here.

    Args:
        file: .parquet, .jsonl or .csv; whole at the end, or not there.
        said: this rank's, as :func:`predictions` gives them.
        accelerator: its ranks share the file system.

    Returns:
        How many rows there are, on rank 0.

    Raises:
        ValueError: csv is asked for, and a column holds lists.
    """
    rank, parts = accelerator.process_index, file.with_name(f".{file.name}.parts")
    if rank == 0:
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
    accelerator.wait_for_everyone()
    problem = None
    try:
        try:
            _write_part(parts / f"{rank:05d}.jsonl", predicted, flat=file.suffix == ".csv")
        except ValueError as error:
            if accelerator.is_fsdp2:
                raise  # the others wait for this rank inside the model
            problem = str(error)
        troubles: list[str | None] = gather_object([problem])  # type: ignore[no-untyped-call]
        if wrong := [one for one in troubles if one]:
            raise ValueError(wrong[0])
        rows = 0
        if rank == 0:
            with replacing(file) as draft:
                rows = _SINKS[file.suffix](draft, sorted(parts.glob("*.jsonl")))
    finally:
        if rank == 0:
            shutil.rmtree(parts, ignore_errors=True)
    return rows


def _write_part(part: Path, predicted: Iterable[Columns], *, flat: bool) -> None:
    with part.open("w", encoding="utf-8") as stream:
        for columns in predicted:
            for row in zip(*columns.values(), strict=True):
                line = dict(zip(columns, row, strict=True))
                if flat and (lists := [name for name, value in line.items() if isinstance(value, list)]):
                    which = ", ".join(lists)
                    raise ValueError(f"{which} hold a list for each sample, and csv has none; write parquet or jsonl")
                stream.write(json.dumps(line, ensure_ascii=False, default=_told) + "\n")


def _told(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"a column of predicted() holds a {type(value).__name__}; give text, numbers or lists of them")


def _rows(parts: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for part in parts:
        with part.open(encoding="utf-8") as stream:
            yield from map(json.loads, stream)


def _to_parquet(draft: Path, parts: Sequence[Path]) -> int:
    """In groups of one length, whatever parts they are from; the types are those of all rows."""
    from pyarrow import Table, unify_schemas
    from pyarrow.parquet import ParquetWriter

    schema, rows = None, 0
    for chunk in _chunks(parts):
        own = Table.from_pylist(chunk).schema
        schema = own if schema is None else unify_schemas([schema, own], promote_options="permissive")
    with ParquetWriter(str(draft), schema) as sink:
        for chunk in _chunks(parts):
            sink.write_table(Table.from_pylist(chunk, schema=schema))
            rows += len(chunk)
    return rows


def _chunks(parts: Sequence[Path]) -> Iterator[list[dict[str, Any]]]:
    rows = _rows(parts)
    while chunk := list(islice(rows, _GROUP)):
        yield chunk


def _to_lines(draft: Path, parts: Sequence[Path]) -> int:
    rows = 0
    with draft.open("w", encoding="utf-8") as stream:
        for row in _rows(parts):
            stream.write(dumps(row, ensure_ascii=False) + "\n")
            rows += 1
    return rows


def _to_csv(draft: Path, parts: Sequence[Path]) -> int:
    rows, names = 0, dict.fromkeys(name for row in _rows(parts) for name in row)
    with draft.open("w", encoding="utf-8", newline="") as stream:
        sink = csv.DictWriter(stream, [*names], lineterminator="\n")
        sink.writeheader()
        for row in _rows(parts):
            sink.writerow(row)
            rows += 1
    return rows


_SINKS = {".parquet": _to_parquet, ".jsonl": _to_lines, ".csv": _to_csv}
ENDINGS = tuple(_SINKS)
