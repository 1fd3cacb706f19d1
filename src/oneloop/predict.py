"""What a model says of every sample, in order, by one process or many, to one file.

>>> said = predictions(task, model, dataset, accelerator=accelerator, micro=32)     # of this rank's samples
>>> write(Path("said.parquet"), said, accelerator=accelerator)                      # the same file for any ranks
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from oneloop.basics.buffers import share_buffers
from oneloop.basics.files import replacing
from oneloop.basics.plain_json import dumps
from oneloop.basics.progress import tracked
from oneloop.data.groups import Weighed, loader, transferred
from oneloop.data.keyed import Keyed
from oneloop.evaluate import evaluating, share_of
from oneloop.tasks.base import Objective

Columns = dict[str, list[Any]]
_GROUP = 10_000
"""rows of a row group"""


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
        task: its ``loss`` gives outputs; its ``predicted`` makes columns of them, else they are taken as they are.
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
    collate = Weighed(task.collate, task.weight, dtype=dtype)
    loaded = loader(Keyed(dataset, seed=seed), collate, share.places, workers=workers, device=accelerator.device)
    share_buffers(model)
    with evaluating(model):
        batches = transferred((batch for batch, _ in loaded), accelerator.device)
        shown = tracked(batches, "predicting", total=len(share.places))
        for places, source, batch in zip(share.places, share.sources, shown, strict=True):
            _, outputs = task.loss(model, batch)
            if source is None:
                continue  # of a rank that has none left, and must call the model as often as the others
            said = task.predicted(batch, outputs) if hasattr(task, "predicted") else {}
            columns = {"row": [index for _, index in places]}
            if hasattr(dataset, "file"):
                columns["file"] = [dataset.file(index) for _, index in places]
            yield columns | said | (_outputs(outputs, len(places)) if raw or not said else {})


def _outputs(outputs: Mapping[str, Tensor], samples: int) -> Columns:
    """The outputs that have an entry for each sample."""
    own = {name: tensor for name, tensor in outputs.items() if tensor.ndim and len(tensor) == samples}
    if not own:
        raise ValueError("the task's loss() returns no outputs with an entry for each sample; give it predicted()")
    return {name: (tensor.float() if tensor.is_floating_point() else tensor).tolist() for name, tensor in own.items()}


def write(file: Path, said: Iterable[Columns], *, accelerator: Accelerator) -> int:
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
    try:
        _write_part(parts / f"{rank:05d}.arrow", said, flat=file.suffix == ".csv")
        accelerator.wait_for_everyone()
        rows = 0
        if rank == 0:
            with replacing(file) as draft:
                rows = _SINKS[file.suffix](draft, _tables(sorted(parts.glob("*.arrow"))))
    finally:
        if rank == 0:
            shutil.rmtree(parts, ignore_errors=True)
    return rows


def _write_part(part: Path, said: Iterable[Columns], *, flat: bool) -> None:
    """This rank's rows as an arrow file; none where it has none."""
    import pyarrow
    from pyarrow import ipc

    with ExitStack() as closing:
        sink: Any = None
        schema: Any = None
        for columns in said:
            table = pyarrow.table(columns, schema=schema)
            lists = [name for name in columns if pyarrow.types.is_list(table.schema.field(name).type)]
            if flat and lists:
                raise ValueError(
                    f"{', '.join(lists)} hold a list for each sample, and csv has none; write parquet or jsonl"
                )
            if sink is None:
                sink = closing.enter_context(ipc.new_stream(str(part), table.schema))
                schema = table.schema
            sink.write_table(table)


def _tables(parts: Iterable[Path]) -> Iterator[Any]:
    """All rows in tables of one length, whatever parts they are from."""
    from pyarrow import Table, concat_tables, ipc

    held: list[Any] = []
    for part in parts:
        with ipc.open_stream(str(part)) as batches:
            for batch in batches:
                held.append(Table.from_batches([batch]))
                while sum(map(len, held)) >= _GROUP:
                    whole = concat_tables(held).combine_chunks()
                    yield whole.slice(0, _GROUP)
                    held = [whole.slice(_GROUP)]
    if any(map(len, held)):
        yield concat_tables(held).combine_chunks()


def _to_parquet(draft: Path, tables: Iterator[Any]) -> int:
    from pyarrow.parquet import ParquetWriter

    first = next(tables)
    rows = len(first)
    with ParquetWriter(str(draft), first.schema) as sink:
        sink.write_table(first)
        for table in tables:
            sink.write_table(table)
            rows += len(table)
    return rows


def _to_lines(draft: Path, tables: Iterator[Any]) -> int:
    rows = 0
    with draft.open("w", encoding="utf-8") as stream:
        for table in tables:
            stream.writelines(dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
            rows += len(table)
    return rows


def _to_csv(draft: Path, tables: Iterator[Any]) -> int:
    rows = 0
    with draft.open("w", encoding="utf-8", newline="") as stream:
        sink: Any = csv.writer(stream, lineterminator="\n")
        for table in tables:
            if not rows:
                sink.writerow(table.column_names)
            sink.writerows(row.values() for row in table.to_pylist())
            rows += len(table)
    return rows


_SINKS = {".parquet": _to_parquet, ".jsonl": _to_lines, ".csv": _to_csv}
ENDINGS = tuple(_SINKS)
