"""``task.split_by groups`` draws whole row groups without reading a row."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.rows.find_files import found
from oneloop.tasks.rows.open_data import named_sources, opened
from oneloop.tasks.rows.parquet import Parquet
from oneloop.tasks.rows.parquet_files import LocalFile
from oneloop.tasks.rows.remote.remote_parquet import RemoteParquet
from oneloop.tasks.rows.row_group_splits import check_split_by
from oneloop.tasks.rows.rows import divided
from own_files import started
from worlds import each_message, run

pytestmark = pytest.mark.covers("oneloop.tasks.rows.row_group_splits")

WORDS = ["digits", "--task", "text_classification", "--task.layers", "1", "--task.heads", "2"]
WORDS += ["--task.width", "16", "--duration", "16", "--save.every", "8", "--batch.size", "8"]
WORDS += ["--eval.every", "0", "--track", "none"]


def written(folder: Path, *names: str, groups: int = 20, rows: int = 10) -> Path:
    """Write files of row groups; every row has a different text."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        texts = [f"text {number} {row}" for row in range(groups * rows)]
        labels = [f"class {row % 2}" for row in range(groups * rows)]
        table = pa.table({"text": texts, "label": labels})
        parquet.write_table(table, folder / name, row_group_size=rows)
    return folder


def split(folder: Path, share: float = 0.1) -> dict[str, Parquet]:
    [source] = named_sources(str(folder), {"text": "text", "label": "label"}, split_by="groups")
    return opened(source, held_out=share, window=4).parts


def test_whole_groups_are_drawn_and_none_is_read(tmp_path):
    parts = split(written(tmp_path / "data", "a.parquet", "deep/b.parquet", groups=100))
    assert [rows.reads for rows in parts.values()] == [0, 0, 0]
    assert sum(map(len, parts.values())) == 2000
    assert 50 < len(parts["validation"]) < 350 and 50 < len(parts["test"]) < 350

    # A group is in one split, with its file and row numbers.
    seen: Counter[tuple[str, int]] = Counter()
    for rows in parts.values():
        groups = set()
        for index in range(len(rows)):
            number, row = map(int, rows[index]["text"].split()[1:])
            file = ["a.parquet", "deep/b.parquet"][number]
            groups.add((file, row // 10))
            assert rows.where(index) == f"{tmp_path / 'data' / file}, row {row}"
        seen.update(groups)
        assert sorted(rows.order(seed=0, batch=8)[0 : len(rows)][1].tolist()) == [*range(len(rows))]
    assert len(seen) == 200 and set(seen.values()) == {1}

    # Reading one split leaves the groups of the others alone.
    texts = [text for array in parts["validation"].values("text") for text in array.to_pylist()]
    assert len(texts) == len(parts["validation"])
    assert parts["validation"].fingerprint()["groups"] != parts["test"].fingerprint()["groups"]


def test_names_decide_and_each_split_has_a_group(tmp_path):
    def named(parts: dict[str, Parquet]) -> dict[str, list]:
        return {name: [*rows.filled_groups().values()] for name, rows in parts.items()}

    folder = written(tmp_path / "data", "a.parquet")
    before = named(split(folder, 0.001))
    assert len(before["validation"]) == len(before["test"]) == 1
    # a copy elsewhere, of other content
    written(tmp_path / "other", "a.parquet", rows=5)
    assert named(split(tmp_path / "other", 0.001)) == before
    # With a test split, validation has both shares.
    shutil.copytree(folder, tmp_path / "both" / "train")
    written(tmp_path / "both", "test/a.parquet", groups=1)
    both = named(split(tmp_path / "both", 0.2))
    assert both["test"] == [("test/a.parquet", 0)] and len(both["validation"]) >= 2


def test_rows_that_cannot_be_used_are_left_out_of_their_group(tmp_path):
    there = found(written(tmp_path / "data", "a.parquet"))
    files = [LocalFile(file, there.root) for file in there.files]
    rows = Parquet(files, there.root, ["text"], window=4, content={})
    out = np.array([0, 57, 199])
    whole = divided({"": rows}, 0.1, by_groups=True)
    parts = divided({"": rows}, 0.1, {"": out}, by_groups=True)
    for name, part in parts.items():
        texts = [row["text"] for row in map(whole[name].__getitem__, range(len(whole[name])))]
        kept = [text for text in texts if int(text.split()[2]) not in out]
        assert [part[index]["text"] for index in range(len(part))] == kept


def test_what_has_no_groups_to_draw_is_rejected(tmp_path):
    few = written(tmp_path / "few", "a.parquet", groups=19)
    with pytest.raises(ValueError, match=r"19 row groups, and .* at least 20; write smaller"):
        split(few)
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "b"}\n' * 30)
    with pytest.raises(ValueError, match=r"convert them to Parquet, or draw rows"):
        split(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text("text " * 300)
    with pytest.raises(ValueError, match="convert them to Parquet, or draw rows"):
        CausalLM(str(tmp_path / "a.txt"), split_by="groups")

    files = [LocalFile(few / "a.parquet", few)]
    away = RemoteParquet(files, "s3://bucket/few", ["text"], window=4, content={})
    with pytest.raises(ValueError, match=r"add a validation split, or draw whole row groups"):
        check_split_by("s3://bucket/few", {"": away}, "rows")
    check_split_by("s3://bucket/few", {"train": away, "validation": away}, "rows")


def test_a_run_by_groups_resumes_and_another_split_is_another_run(tmp_path):
    folder = written(tmp_path / "data", "a.parquet")
    words = [*WORDS, "--task.split_by", "groups"]
    started(tmp_path, words, folder)
    few = written(tmp_path / "few", "a.parquet", groups=3)
    same = ["--task.data", str(folder), "--run.dir", "run"]
    new = ["--task.data", str(few), "--run.dir", "new"]
    several = [[*WORDS, *same], [*words, *new], [*words, *same]]
    (other, rejected, resumed) = run(each_message, several, folder=tmp_path).ok()[0]
    assert other[0] == 2 and "task.split_by: groups -> rows" in other[1], other
    assert rejected[0] == 2 and "add a validation split" in rejected[1], rejected
    assert resumed[0] == 0 and "resuming from" in resumed[1], resumed
    assert not (tmp_path / "new").exists()
