"""Predict every sample, in order, on one process or several, and write the predictions to a file.

>>> predicted = predictions(task, model, dataset, accelerator=accelerator, micro=32)
>>> write(Path("predictions.parquet"), predicted, accelerator=accelerator)

A rank predicts its own samples; the file is the same on any number of ranks.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from oneloop.basics.files import dumps, replacing
from oneloop.basics.generation import generated
from oneloop.basics.progress import tracked
from oneloop.basics.tensors import share_buffers
from oneloop.basics.untrusted import delete
from oneloop.data.seeded_samples import SeededSamples
from oneloop.data.step_batches import CollateWithWeight, loader, transferred
from oneloop.evaluation import evaluating, share_of
from oneloop.task_protocol.protocol import Objective
from oneloop.task_protocol.protocol_checks import named

Columns = dict[str, list[Any]]
_GROUP = 10_000  # rows per Parquet row group


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
    pinned: bool = True,
) -> Iterator[Columns]:
    """Yield columns for each micro-batch of this rank's samples, in order of rank.

    Collective: call on every rank.

    Args:
        task: ``loss`` returns the outputs and, if the task ``writes``, ``generate`` returns more;
            ``predicted`` turns them into columns. Without ``predicted``, the outputs are the
            columns.
        model: whole or sharded; it is not changed.
        dataset: map-style.
        accelerator: its ranks share the samples.
        micro: micro-batch size per rank.
        workers: number of data loading processes.
        dtype: dtype of floating-point inputs.
        seed: seed of random data sets.
        raw: add the outputs as columns.
        pinned: keep batches in pinned host memory on CUDA.

    Raises:
        ValueError: An output or a column does not have one entry per sample.
    """
    ranks = accelerator.num_processes
    share = share_of([range(len(dataset))], micro, ranks, accelerator.process_index)
    collate = CollateWithWeight(task.collate, task.weight, dtype=dtype)
    keyed = SeededSamples(dataset, seed=seed)
    device = accelerator.device
    loaded = loader(keyed, collate, share.places, workers=workers, device=device, pinned=pinned)
    share_buffers(model)
    with evaluating(model):
        batches = transferred((batch for batch, _ in loaded), device, pinned=pinned)
        shown = tracked(batches, "predicting", total=len(share.places))
        for source, batch in zip(share.sources, shown, strict=True):
            _, outputs = task.loss(model, batch)
            if getattr(task, "writes", False):
                outputs = {**outputs, **generated(task, model, batch)}
            if source is None:
                continue  # a repeated micro-batch: FSDP2 needs equal forward counts

            # A row has its number, its file, the task's columns, and the outputs.
            rows = batch["index"].tolist()
            columns: Columns = {"row": rows}
            if hasattr(dataset, "file"):
                columns["file"] = [dataset.file(index) for index in rows]
            found: Columns = {}
            if hasattr(task, "predicted"):
                found = _columns(task, task.predicted(batch, outputs), len(rows))
            columns |= found
            if raw or not found:
                columns |= _outputs(outputs, len(rows))
            yield columns


def _columns(task: Any, predicted: Any, samples: int) -> Columns:
    member = named(task, "predicted")
    if not isinstance(predicted, Mapping):
        raise ValueError(
            f"{member} returned a {type(predicted).__name__}; a dict of columns is needed"
        )
    columns = {}
    for name, value in predicted.items():
        columns[str(name)] = value.tolist() if hasattr(value, "tolist") else value
    for name, value in columns.items():
        several = isinstance(value, list | tuple)
        if several and len(value) == samples:
            continue
        number = f"{len(value)} entries" if several else f"a {type(value).__name__}"
        raise ValueError(
            f"{member} returned {number} as {name!r} for {samples} samples; give each one"
        )
    return columns


def _outputs(outputs: Mapping[str, Any], samples: int) -> Columns:
    columns = {}
    for name, tensor in outputs.items():
        if not isinstance(tensor, Tensor):
            columns[name] = list(tensor)  # generated texts
        elif tensor.ndim and len(tensor) == samples:
            wide = tensor.float() if tensor.is_floating_point() else tensor
            columns[name] = wide.tolist()
    if not columns:
        raise ValueError(
            "the task's loss() returns no outputs with an entry for each sample; give it "
            "predicted()"
        )
    return columns


def write(file: Path, predicted: Iterable[Columns], *, accelerator: Accelerator) -> int:
    """Write all ranks' columns of :func:`predictions` to one file, equal on any number of ranks.

    Collective: call on every rank; they share the file system. The file is written atomically.

    Args:
        file: .parquet, .jsonl or .csv.
        predicted: Columns of this rank.
        accelerator: Its ranks write their rows in order of rank.

    Returns:
        The number of rows, on rank 0.

    Raises:
        ValueError: A column for a .csv holds lists.
    """
    rank = accelerator.process_index
    shards = file.with_name(f".{file.name}.parts")
    if rank == 0:
        delete(shards, inside=file.parent)
        shards.mkdir(parents=True)
    accelerator.wait_for_everyone()  # the folder exists now

    # Write this rank's rows. An error must reach all ranks, or the others would wait.
    problem = None
    try:
        try:
            _write_shard(shards / f"{rank:05d}.jsonl", predicted, flat=file.suffix == ".csv")
        except ValueError as error:
            if accelerator.is_fsdp2:
                raise  # the other ranks wait for this one inside the model
            problem = str(error)
        # All ranks raise the first error; else every shard is complete.
        problems: list[str | None] = gather_object([problem])  # type: ignore[no-untyped-call]
        for found in problems:
            if found:
                raise ValueError(found)

        # Join the shards, in order of rank.
        rows = 0
        if rank == 0:
            with replacing(file) as draft:
                rows = _SINKS[file.suffix](draft, _Rows(sorted(shards.glob("*.jsonl"))))
    finally:
        if rank == 0:
            delete(shards, inside=file.parent)
    return rows


def _write_shard(shard: Path, predicted: Iterable[Columns], *, flat: bool) -> None:
    with shard.open("w", encoding="utf-8") as stream:
        for columns in predicted:
            for row in zip(*columns.values(), strict=True):
                line = dict(zip(columns, row, strict=True))
                if flat:
                    _reject_lists(line)
                stream.write(json.dumps(line, ensure_ascii=False, default=_plain) + "\n")


def _reject_lists(row: Mapping[str, Any]) -> None:
    lists = [name for name, value in row.items() if isinstance(value, list)]
    if lists:
        raise ValueError(
            f"{', '.join(lists)} hold a list for each sample, and csv has none; write parquet or "
            "jsonl"
        )


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(
        f"a column of predicted() holds a {type(value).__name__}; give text, numbers or lists "
        "of them"
    )


class _Rows:
    """The rows of all shards, each with all columns: a value that is missing is None."""

    def __init__(self, shards: Iterable[Path]) -> None:
        self._shards = shards
        self.names = dict.fromkeys(name for row in self._lines() for name in row)

    def _lines(self) -> Iterator[dict[str, Any]]:
        for shard in self._shards:
            with shard.open(encoding="utf-8") as stream:
                yield from map(json.loads, stream)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._lines():
            yield {**self.names, **row}


def _to_parquet(draft: Path, rows: _Rows) -> int:
    """Write row groups of equal size; the schema unifies the types of all rows."""
    from pyarrow import Table, unify_schemas
    from pyarrow.parquet import ParquetWriter

    # Find a schema that all rows fit into.
    schema = None
    for chunk in _chunks(rows):
        own = Table.from_pylist(chunk).schema
        if schema is not None:
            own = unify_schemas([schema, own], promote_options="permissive")
        schema = own

    # Read the rows again, and write them.
    count = 0
    with ParquetWriter(str(draft), schema) as sink:
        for chunk in _chunks(rows):
            sink.write_table(Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
    return count


def _chunks(rows: _Rows) -> Iterator[list[dict[str, Any]]]:
    stream = iter(rows)
    while chunk := list(islice(stream, _GROUP)):
        yield chunk


def _to_lines(draft: Path, rows: _Rows) -> int:
    count = 0
    with draft.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def _to_csv(draft: Path, rows: _Rows) -> int:
    count = 0
    with draft.open("w", encoding="utf-8", newline="") as stream:
        sink = csv.DictWriter(stream, [*rows.names], lineterminator="\n")
        sink.writeheader()
        for row in rows:
            sink.writerow(row)
            count += 1
    return count


_SINKS = {".parquet": _to_parquet, ".jsonl": _to_lines, ".csv": _to_csv}
