"""Write rows as Parquet files in small row groups: ``python -m oneloop.tasks.rows.rewrite FOLDER
NEW_FOLDER --rows 1000``. The rows may be in Parquet, JSON Lines, CSV or Arrow files."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from oneloop.basics.files import reject_run_folder
from oneloop.tasks.rows.arrow_tables import quiet, table_of
from oneloop.tasks.rows.cache import below
from oneloop.tasks.rows.find_files import found


def rewrite(old: Path, new: Path, *, rows: int) -> int:
    """Write Parquet files with small row groups; hold one batch in memory at a time.

    Parquet files keep their names. Files of other kinds become one file for each split.

    Args:
        old: a folder of Parquet, JSON Lines, CSV or Arrow files, or a file.
        new: the folder to write to.
        rows: rows of a group.

    Returns:
        The number of files.

    Raises:
        ValueError: there are no files, a row cannot be read, or ``new`` is not empty.
    """
    from pyarrow import parquet

    there = found(old, kinds=["parquet", "json", "csv", "tsv", "arrow"])
    if rows < 1:
        raise ValueError(f"--rows {rows} is not a positive number of rows; 1000 is a common choice")
    if new.exists() and (not new.is_dir() or any(new.iterdir())):
        raise ValueError(f"{new} exists and is not an empty folder; name a new folder")

    if there.kind != "parquet":
        tables = {split: table_of(there, split, None) for split in there.parts}
        for split, table in tables.items():
            new.mkdir(parents=True, exist_ok=True)
            with quiet():
                table.dataset.to_parquet(new / f"{split or 'rows'}.parquet", batch_size=rows)
        return len(there.parts)

    # Keep the names of the files and folders, which may name splits.
    for file in there.files:
        target = new / below(file, there.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            parquet.ParquetFile(file, memory_map=True) as source,
            parquet.ParquetWriter(target, source.schema_arrow) as writer,
        ):
            for batch in source.iter_batches(batch_size=rows, use_threads=False):
                writer.write_batch(batch, row_group_size=rows)
    return len(there.files)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m oneloop.tasks.rows.rewrite", description=__doc__
    )
    parser.add_argument("old", type=Path, help="a folder of files, or a file")
    parser.add_argument("new", type=Path, help="the folder to write to")
    parser.add_argument("--rows", type=int, default=1000, help="rows of a group")
    given = parser.parse_args(words)
    try:
        reject_run_folder(given.new)
        print(f"{rewrite(given.old, given.new, rows=given.rows):,} files written to {given.new}")
    except ValueError as error:
        print(f"oneloop: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
