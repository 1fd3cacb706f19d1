"""Evaluate and predict after training, on one or more processes.

``python -m oneloop.tools.after_training.evaluate_and_predict evaluate|predict RUN …``

Each rank predicts its own samples; the file is the same on any number of ranks.
"""

import sys

if __name__ == "__main__":  # before the imports that a system could lack
    from oneloop.basics.system import exit_if_not_supported

    exit_if_not_supported()

import csv
import json
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from oneloop.basics import exit_codes
from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import dumps, replacing, writing
from oneloop.basics.generation import generated
from oneloop.basics.launcher import die_with_launcher
from oneloop.basics.progress import tracked
from oneloop.basics.streams import replace_unknown_characters
from oneloop.basics.tensors import share_buffers
from oneloop.basics.untrusted import delete
from oneloop.data.seeded_samples import SeededSamples
from oneloop.data.step_batches import CollateWithWeight, loader, transferred
from oneloop.evaluation import evaluate_all, evaluating, share_of
from oneloop.launch.before_imports import reject
from oneloop.launch.processes import Run, start
from oneloop.launch.signals import leave
from oneloop.machine.torch_settings import float32_products
from oneloop.run.before_run import before_run
from oneloop.task_protocol.generated import Generation, check_generates
from oneloop.task_protocol.protocol import Objective, check_sets
from oneloop.task_protocol.user_code import named, theirs
from oneloop.tools.after_training.options import check_file as check_file
from oneloop.tools.after_training.options import parsed
from oneloop.tools.after_training.trained_model import initial_model, recipe_of, trained

Columns = dict[str, list[Any]]
_GROUP = 10_000  # rows per Parquet row group


def main(argv: Sequence[str]) -> NoReturn:
    """Run ``evaluate`` or ``predict``; end the process with oneloop's exit code."""
    try:
        given = parsed(argv[0], argv[1:])
    except (BadInput, Unavailable) as error:
        reject(error)
    run(given)


def run(given: Namespace) -> NoReturn:
    """Run the command of these options; end the process with oneloop's exit code."""
    try:
        processes, result = perform(given.command, given)
    except (BadInput, Unavailable) as error:
        reject(error)
    if processes.main:
        if given.command == "evaluate":
            result = dumps(result) if given.json else _table(result)
        print(result, flush=True)
    leave(exit_codes.DONE, main=processes.main)


def perform(command: str, given: Namespace) -> tuple[Run, Any]:
    """Evaluate or predict. Collective: call on every rank.

    Args:
        command: ``evaluate`` or ``predict``.
        given: The options of :func:`parsed`.

    Returns:
        The processes, and the metrics of ``evaluate`` or a line about the file of ``predict``.

    Raises:
        BadInput: The run, the data or an option is invalid.
    """
    recipe = recipe_of(given.run, command=command, task=given.task)
    machine = recipe.machine
    run = start(device=given.device or machine.device, deterministic=machine.deterministic)
    float32_products(machine.matmul, benchmark=machine.cudnn_benchmark)
    evaluates = command == "evaluate"

    # Load the model and the data; with a wrong input, all ranks raise the same error.
    with run.setting_up():
        of = trained(given, recipe, run, own_data=evaluates or given.data is None)
        sets = _data_sets(of.task, given.data, labelled=evaluates)

    model = run.prepare_frozen(of.model, names=machine.blocks)
    before_run(of.task, model, run, sets=sets, initial_model=partial(initial_model, of, run))
    options = of.options
    accelerator = run.accelerator
    with run.setting_up():
        if evaluates:
            generate = given.generate or recipe.eval.generate
            if generate:
                check_generates(of.task, sets)
            micro = given.micro or recipe.eval.micro
            # A loss over a whole batch is evaluated in windows of the training's batch size.
            options["window"] = recipe.batch.size
            options["generation"] = Generation.of(generate, micro)
            found = evaluate_all(of.task, model, sets, accelerator=accelerator, **options)
            assert found is not None
            return run, {"weights": of.about, **found["raw"]}

        (dataset,) = sets.values()
        predicted = predictions(
            of.task, model, dataset, accelerator=accelerator, raw=given.raw, **options
        )
        with writing(f"--to {given.to}", "make room, or name another file"):
            rows = write(given.to, predicted, accelerator=accelerator)
        warning = getattr(dataset, "warning", "")
        lines = [f"{rows:,} rows of {of.about} are in {given.to}", warning]
        return run, "\n".join(filter(None, lines))


def _data_sets(task: Any, data: str | None, *, labelled: bool) -> dict[str, Any]:
    """Return the data sets by name: those of the run, or other data.

    Args:
        task: of the run.
        data: rows to use instead (None: those of the run).
        labelled: whether they need labels; without labels, there is only one set.

    Raises:
        ValueError: the task has no evaluation set, or cannot read the data.
    """
    sets: dict[str, Any]
    if data is None:
        sets = task.eval_sets()
        if not labelled:
            sets = dict(islice(sets.items(), 1))
        if not sets:
            raise ValueError("the run's task has no validation set; give data with --data")
    elif not hasattr(task, "samples_of"):
        raise ValueError(
            f"--data {data}: {type(task).__name__} has no samples_of() to open it; remove --data"
        )
    else:
        opened = partial(task.samples_of, data, labelled=labelled)
        try:
            sets = {"data": theirs(task, "samples_of", opened)}
        except ValueError as error:
            raise ValueError(f"--data {data}: {str(error).removeprefix('task.data: ')}") from error
    check_sets(next(iter(sets.values())), sets)
    return sets


def _table(metrics: Mapping[str, Any]) -> str:
    width = max(map(len, metrics))
    lines = []
    for name, value in metrics.items():
        text = value if isinstance(value, str) else f"{value:.6g}"
        lines.append(f"{name:{width}}  {text}")
    return "\n".join(lines)


def predictions(
    task: Objective,
    model: nn.Module,
    dataset: Any,
    *,
    accelerator: Accelerator,
    micro: int,
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
    loaded = loader(keyed, collate, share.places, workers=0, device=device, pinned=pinned)
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
    rows = 0
    values = Counter[str]()  # number of values of each column, in order
    try:
        try:
            shard = shards / f"{rank:05d}.jsonl"
            rows = _write_shard(shard, predicted, values, flat=file.suffix == ".csv")
        except ValueError as error:
            if accelerator.is_fsdp2:
                raise  # the other ranks wait for this one inside the model
            problem = str(error)
        # All ranks raise the first error; else every shard is complete.
        gathered = gather_object([(problem, rows, values)])  # type: ignore[no-untyped-call]
        rows = 0
        for wrong, number, columns in gathered:
            if wrong:
                raise ValueError(wrong)
            rows += number
            values.update(columns)

        # Join the shards, in order of rank.
        if rank == 0:
            names = [name for name, number in values.items() if number]
            with replacing(file) as draft:
                _SINKS[file.suffix](draft, sorted(shards.glob("*.jsonl")), names)
    finally:
        if rank == 0:
            delete(shards, inside=file.parent)
    return rows


def _write_shard(
    shard: Path, predicted: Iterable[Columns], values: Counter[str], *, flat: bool
) -> int:
    """Write the rows of this rank, and count the values of each column; return the rows."""
    rows = 0
    with shard.open("w", encoding="utf-8") as stream:
        for columns in predicted:
            for row in zip(*columns.values(), strict=True):
                line = dict(zip(columns, row, strict=True))
                lists = [name for name, value in line.items() if isinstance(value, list)]
                if flat and lists:
                    raise ValueError(
                        f"{', '.join(lists)} hold a list for each sample, and csv has none; write "
                        "parquet or jsonl"
                    )
                stream.write(json.dumps(line, ensure_ascii=False, default=_plain) + "\n")
                rows += 1
                for name, value in line.items():
                    values[name] += value is not None
    return rows


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


def _to_parquet(draft: Path, shards: Sequence[Path], names: Collection[str]) -> None:
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
    with ParquetWriter(str(draft), schema) as sink:
        for chunk in _chunks(shards, names):
            sink.write_table(Table.from_pylist(chunk, schema=schema))


def _chunks(shards: Sequence[Path], names: Collection[str]) -> Iterator[list[dict[str, Any]]]:
    rows = _rows(shards, names)
    while chunk := list(islice(rows, _GROUP)):
        yield chunk


def _to_lines(draft: Path, shards: Sequence[Path], names: Collection[str]) -> None:
    with draft.open("w", encoding="utf-8") as stream:
        for row in _rows(shards, names):
            stream.write(dumps(row, ensure_ascii=False) + "\n")


def _to_csv(draft: Path, shards: Sequence[Path], names: Collection[str]) -> None:
    with draft.open("w", encoding="utf-8", newline="") as stream:
        sink = csv.DictWriter(stream, [*names], lineterminator="\n")
        sink.writeheader()
        sink.writerows(_rows(shards, names))


_SINKS = {".parquet": _to_parquet, ".jsonl": _to_lines, ".csv": _to_csv}


if __name__ == "__main__":
    die_with_launcher()
    replace_unknown_characters()
    main(sys.argv[1:])
