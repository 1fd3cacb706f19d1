"""Predict every sample, in order, on one process or several, and write the predictions to a file.

>>> predicted = predictions(task, model, dataset, accelerator=accelerator, micro=32)
>>> write(Path("predictions.parquet"), predicted, accelerator=accelerator)

A rank predicts its own samples; the file is the same on any number of ranks.
"""

import csv
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from oneloop.task_protocol.user_code import named

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
        batches = transferred(loaded, device, pinned=pinned)
        shown = tracked(batches, "predicting", total=len(share.places))
        for source, (batch, _) in zip(share.sources, shown, strict=True):
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

    Collective: call on every rank; they share the file system. The file is written atomically. A
    column that has no value in any row is left out.

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
    known: dict[str, bool] = {}  # columns in order, and whether they have a value
    try:
        try:
            shard = shards / f"{rank:05d}.jsonl"
            known = _write_shard(shard, predicted, flat=file.suffix == ".csv")
        except ValueError as error:
            if accelerator.is_fsdp2:
                raise  # the other ranks wait for this one inside the model
            problem = str(error)
        # All ranks raise the first error; else every shard is complete.
        results: list[tuple[str | None, dict[str, bool]]]
        results = gather_object([(problem, known)])  # type: ignore[no-untyped-call]
        for found, columns in results:
            if found:
                raise ValueError(found)
            for name, has_value in columns.items():
                known[name] = known.get(name, False) or has_value
        names = [name for name, has_value in known.items() if has_value]

        # Join the shards, in order of rank.
        rows = 0
        if rank == 0:
            with replacing(file) as draft:
                rows = _SINKS[file.suffix](draft, sorted(shards.glob("*.jsonl")), names)
    finally:
        if rank == 0:
            delete(shards, inside=file.parent)
    return rows


def _write_shard(shard: Path, predicted: Iterable[Columns], *, flat: bool) -> dict[str, bool]:
    """Write the rows of this rank; return its columns, and whether they have a value."""
    known: dict[str, bool] = {}
    with shard.open("w", encoding="utf-8") as stream:
        for columns in predicted:
            for row in zip(*columns.values(), strict=True):
                line = dict(zip(columns, row, strict=True))
                if flat:
                    _reject_lists(line)
                stream.write(json.dumps(line, ensure_ascii=False, default=_plain) + "\n")
                for name, value in line.items():
                    known[name] = known.get(name, False) or value is not None
    return known


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
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise ValueError(
        f"a column of predicted() holds a {type(value).__name__}; give text, numbers or lists "
        "of them"
    )


def _rows(shards: Iterable[Path], names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all shards, each with the columns of these names."""
    for shard in shards:
        with shard.open(encoding="utf-8") as stream:
            for row in map(json.loads, stream):
                yield {name: row.get(name) for name in names}


def _to_parquet(draft: Path, shards: Sequence[Path], names: Collection[str]) -> int:
    """Write row groups of equal size; the schema unifies the types of all rows."""
    from pyarrow import Table, unify_schemas
    from pyarrow.parquet import ParquetWriter

    # Find a schema that all rows fit into.
    schema = None
    for chunk in _chunks(shards, names):
        own = Table.from_pylist(chunk).schema
        if schema is not None:
            own = unify_schemas([schema, own], promote_options="permissive")
        schema = own

    # Read the rows again, and write them.
    rows = 0
    with ParquetWriter(str(draft), schema) as sink:
        for chunk in _chunks(shards, names):
            sink.write_table(Table.from_pylist(chunk, schema=schema))
            rows += len(chunk)
    return rows


def _chunks(shards: Sequence[Path], names: Collection[str]) -> Iterator[list[dict[str, Any]]]:
    rows = _rows(shards, names)
    while chunk := list(islice(rows, _GROUP)):
        yield chunk


def _to_lines(draft: Path, shards: Sequence[Path], names: Collection[str]) -> int:
    rows = 0
    with draft.open("w", encoding="utf-8") as stream:
        for row in _rows(shards, names):
            stream.write(dumps(row, ensure_ascii=False) + "\n")
            rows += 1
    return rows


def _to_csv(draft: Path, shards: Sequence[Path], names: Collection[str]) -> int:
    rows = 0
    with draft.open("w", encoding="utf-8", newline="") as stream:
        sink = csv.DictWriter(stream, [*names], lineterminator="\n")
        sink.writeheader()
        for row in _rows(shards, names):
            sink.writerow(row)
            rows += 1
    return rows


_SINKS = {".parquet": _to_parquet, ".jsonl": _to_lines, ".csv": _to_csv}
