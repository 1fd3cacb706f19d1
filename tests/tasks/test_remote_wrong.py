"""Remote data that cannot be read: one message, nothing written; hostile servers and footers; and
the forms of addresses that can be read."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from hub_server import Hub
from oneloop.basics.bucket import StoreChangedError, StoreError
from oneloop.tasks.rows import rewrite
from oneloop.tasks.rows.open_data import Source, named_sources, opened, whole
from oneloop.tasks.rows.remote import store as stores
from oneloop.tasks.rows.remote.addresses import address_of
from oneloop.tasks.rows.remote.footers import check_apart, checked_footer
from oneloop.tasks.rows.remote.open_store import open_store
from oneloop.tasks.rows.remote.remote_file import RemoteFile
from oneloop.tasks.rows.remote.store import RemoteObject
from oneloop.tasks.rows.remote_checks import sampled
from remote_data import Files, counted_s3
from stores import KEYS
from worlds import each_message, run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.bucket",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.rows.remote.addresses",
    "oneloop.tasks.rows.remote.buckets",
    "oneloop.tasks.rows.remote.data_sets",
    "oneloop.tasks.rows.remote.footers",
    "oneloop.tasks.rows.remote.remote_file",
    "oneloop.tasks.rows.remote.open_store",
    "oneloop.tasks.rows.remote.store",
    "oneloop.tasks.rows.remote.web",
    "oneloop.tasks.rows.rewrite",
)
COLUMNS = {"text": "text", "label": "label"}
OPTIONS = "--batch.size 8 --duration 2 --run.dir run --track none"


def rows_of(where: str, stream: bool = False) -> Source:
    """Open data as a task does."""
    (source,) = named_sources(where, COLUMNS, stream=stream)
    return opened(source, held_out=0.05, window=4)


def write(folder: Path) -> Path:
    """Write a small data set with a validation split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train-0", "train-1", "validation"):
        texts = [f"{name} {number}" * 5 for number in range(60)]
        table = pa.table({"text": texts, "label": ["a", "b"] * 30})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=20)
    return folder


def trained(s3, folder: Path, words: str):
    """Train in a process that reads from the bucket."""
    options = f"{words} {OPTIONS}"
    return run(train, options.split(), config="single", folder=folder, variables=variables(s3))


def variables(s3) -> dict[str, str]:
    return {**s3.variables, "ONELOOP_CACHE": os.environ["ONELOOP_CACHE"]}


@pytest.fixture(scope="module", autouse=True)
def servers(tmp_path_factory):
    """A bucket, a web server and a hub, in the environment of this module."""
    before = dict(os.environ)
    base = tmp_path_factory.mktemp("servers")
    data = write(base / "data")
    with counted_s3() as s3, Files(data) as web, Hub(base / "hub", "some/texts") as hub:
        s3.copy(data, "s3://bucket/data")
        s3.write("s3://bucket/lines/train.jsonl", b'{"text": "a", "label": "b"}\n')
        s3.write("s3://bucket/photos/a/1.png", b"image")
        s3.write("s3://bucket/short/train.parquet", b"PAR1PAR1")
        s3.write("s3://bucket/text/train.parquet", b"not a parquet file, but a text")
        s3.write("s3://bucket/odd/back\\slash.parquet", b"PAR1PAR1")
        s3.write("s3://bucket/odd2/..%2Fup.parquet", b"PAR1PAR1")
        s3.write("s3://bucket/only/test.parquet", (data / "validation.parquet").read_bytes())
        content = (data / "train-0.parquet").read_bytes()
        s3.write("s3://bucket/long/train.parquet", content[:-8] + b"\xff\xff\xff\x7fPAR1")
        hub.commit({f"data/{file.name}": file.read_bytes() for file in data.glob("*.parquet")})
        os.environ |= s3.variables | hub.variables(base / "hf")
        os.environ["ONELOOP_CACHE"] = str(base / "cache")
        try:
            yield s3, web, data
        finally:
            os.environ.clear()
            os.environ.update(before)


def test_addresses_give_the_data_of_the_disk(servers) -> None:
    _, web, data = servers
    here = rows_of(str(data))
    there = [
        rows_of("s3://bucket/data"),
        rows_of("s3://bucket/data/*.parquet"),
        rows_of(f"file://{data}"),
        rows_of(web.list()),
        rows_of("hf://datasets/some/texts@main/data"),
    ]
    for source in there:
        assert [*source.parts] == [*here.parts]
        for split, rows in source.parts.items():
            local = here.parts[split]
            assert [rows[i] for i in range(len(rows))] == [local[i] for i in range(len(local))]
            assert rows.fingerprint()["files"] == local.fingerprint()["files"]
    streamed = rows_of("hf:some/texts", stream=True)
    assert streamed.parts["train"][61] == here.parts["train"][61]


def test_a_hub_data_set_by_its_name_without_an_owner(tmp_path, monkeypatch) -> None:
    """hf:squad is redirected to rajpurkar/squad. Its answers are nested columns."""
    rows = []
    for number in range(20):
        answers = {"text": ["a", "b"][: number % 3], "answer_start": [3, 5][: number % 3]}
        rows.append({"question": f"why {number}?", "answers": answers})
    with Hub(tmp_path / "hub", "rajpurkar/squad") as hub:
        hub.short = "squad"
        hub.commit({"plain_text/train-00000-of-00001.parquet": rows})
        for name, value in hub.variables(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        columns = {"text": "question", "label": "answers"}
        for where in ("hf:squad", "hf:squad:plain_text", "hf:rajpurkar/squad"):
            (source,) = named_sources(where, columns, stream=True)
            found = whole(source, window=4).parts["all"]
            assert [found[number] for number in range(20)] == rows

        # The hub knows no owner.
        hub.name, hub.short = "squad", ""
        with pytest.raises(ValueError, match="hf:squad has no owner, and is read in place only"):
            whole(named_sources("hf:squad", columns, stream=True)[0], window=4)


WRONG = {
    "ftp://host/folder": "cannot be read; use s3://",
    "s3://user:SeCrEt@bucket/data": "contains a user",
    "https://host/x.parquet?X-Amz-Signature=SeCrEt": "contains a user",
    "s3://bucket/data#SeCrEt": "contains a user",
    "simplecache::s3://bucket/SeCrEt": "contains a user",
    "s3:///data": "has no valid bucket",
    "s3://bucket/../other": "not a plain address",
    "s3://bucket/%2e%2e/other": "not a plain address",
    "s3://bucket/back\\slash": "not a plain address",
    "s3://bucket/line\nbreak": "not a plain address",
    "s3://bucket/nothing": "names no file",
    "s3://bucket/data/none-*.parquet": "names no file",
    "s3://no-such-bucket/data": "does not exist",
    "s3://bucket/lines": "python -m oneloop.tasks.rows.rewrite",
    "s3://bucket/photos": "holds image files",
    "s3://bucket/short": "is not a Parquet file",
    "s3://bucket/text": "is not a Parquet file",
    "s3://bucket/long": "its footer claims 2,147,483,647 bytes",
    "s3://bucket/odd": "is not a plain path below its folder",
    "s3://bucket/odd2": "is not a plain path below its folder",
    "s3://bucket/only": "no training data",
    "http://example.com/a.parquet": "is not encrypted",
    "https://example.com/folder": "is not the address of one file",
    "hf://models/some/texts": "does not name a data set",
    "hf://datasets/some/nothing/data": "is not a data set of the hub",
    "hf://datasets/some/texts@none/data": "is not a data set of the hub",
    "hf://datasets/some/texts/nothing": "has no folder 'nothing'",
    "file://data": "needs a path",
}


@pytest.mark.parametrize("where", WRONG)
def test_what_cannot_be_read_is_one_message(where: str) -> None:
    with pytest.raises(ValueError) as raised:
        rows_of(where)
    message = str(raised.value)
    assert WRONG[where] in message and "\n" not in message
    assert "SeCrEt" not in message and KEYS["AWS_SECRET_ACCESS_KEY"] not in message


def test_stream_has_an_effect_only_for_the_hub() -> None:
    with pytest.raises(ValueError, match="task.stream true has an effect only for"):
        rows_of("s3://bucket/data", stream=True)


TYPED = {
    "snippets --task.data s3://user:SeCrEt@bucket/x": "contains a user",
    "snippets --task.data s3://no-such-bucket/x": "does not exist",
    "gpt --task.data s3://bucket/data": "tokens of all rows",
}


@pytest.fixture(scope="module")
def messages(servers, tmp_path_factory) -> tuple[dict[str, tuple[Any, str]], Path, str]:
    """Return exit code and output of each of these commands, the folder of their runs, and what
    was written past the messages.

    One process runs all of them.
    """
    folder = tmp_path_factory.mktemp("typed")
    several = [f"{words} {OPTIONS}".split() for words in TYPED]
    world = run(each_message, several, folder=folder, variables=variables(servers[0]))
    (found,) = world.ok()
    return dict(zip(TYPED, found, strict=True)), folder, world.output


@pytest.mark.parametrize(("words", "expected"), TYPED.items())
def test_from_the_command_line(messages, words: str, expected: str) -> None:
    found, folder, more = messages
    code, output = found[words]
    assert code == 2 and expected in output, output
    assert not any(word in output + more for word in ("SeCrEt", KEYS["AWS_SECRET_ACCESS_KEY"]))
    assert not (folder / "run").exists()


def test_a_run_keeps_no_secret(servers, tmp_path: Path) -> None:
    words = "snippets --task.data s3://bucket/data --task.layers 1 --task.width 8 --task.heads 1"
    done = trained(servers[0], tmp_path, words)
    assert done.codes == [0], done.output
    secret = KEYS["AWS_SECRET_ACCESS_KEY"].encode()
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert files and not any(secret in file.read_bytes() for file in files)
    assert secret.decode() not in done.output


def test_hostile_web_servers(servers, tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "files"
    shutil.copytree(servers[2], folder)
    monkeypatch.setattr(stores, "_FIRST_WAIT", 0.0)

    def rejected(web: Files, match: str, where: str = "/train-0.parquet") -> None:
        with pytest.raises((ValueError, StoreError), match=match):
            rows_of(f"{web.address}{where}")

    with Files(folder) as web:
        web.whole = True
        rejected(web, "status 200 in place of 206")
        web.whole, web.shifted = False, 1
        rejected(web, "sent other bytes")
        web.shifted, web.etag, web.dated = 0, False, False
        rejected(web, "no ETag and no Last-Modified")
        web.etag = web.dated = True
        rejected(web, "the file does not exist", "/none.parquet")
        for target in ("ftp://127.0.0.1/x", "https://127.0.0.1/x", "http://example.com/SeCrEt"):
            web.redirects["/moved.parquet"] = target
            rejected(web, "is not followed", "/moved.parquet")
        web.redirects["/moved.parquet"] = "/moved.parquet"
        rejected(web, "redirects more than 5 times", "/moved.parquet")
        web.redirects["/moved.parquet"] = "/train-0.parquet"
        assert open_store(f"{web.address}/moved.parquet").objects()[0].size
        lines = ("../up.parquet", "/etc/a.parquet", "http://127.0.0.1:1/a.parquet", "a.csv", "")
        for line in lines:
            (folder / "list.txt").write_text(f"{line}\n")
            rejected(web, "line 1: expected the name|lists no file", "/list.txt")

        # Without ETags, the time of the last change is the version. Weak ones are compared here.
        for etag, weak in ((True, False), (True, True), (False, False)):
            web.etag, web.weak = etag, weak
            store = open_store(f"{web.address}/train-1.parquet")
            (item,) = store.objects()
            assert store.read(item, 0, 4) == b"PAR1"
            content = (folder / "train-1.parquet").read_bytes()
            (folder / "train-1.parquet").write_bytes(
                content[:100] + bytes([etag + 2 * weak]) + content[101:]
            )
            os.utime(folder / "train-1.parquet", (1e9 + 2 * etag + weak,) * 2)
            with pytest.raises(StoreChangedError, match="has changed since"):
                store.read(item, 0, 4)
        address = web.address

    # No server answers any more.
    tries = []
    store = open_store(f"{address}/train-1.parquet")
    with pytest.raises(StoreError):
        store.read(item, 0, 4, on_retry=lambda number, error: tries.append(number))
    assert tries == [1, 2, 3, 4]


def test_an_object_that_changes_in_a_bucket(servers) -> None:
    s3, _, data = servers
    s3.copy(data / "validation.parquet", "s3://bucket/changing")
    store = open_store("s3://bucket/changing")
    (item,) = store.objects()
    assert store.read(item, 0, 4) == b"PAR1"
    s3.write("s3://bucket/changing/validation.parquet", b"x" * item.size)
    with pytest.raises(StoreChangedError, match="has changed since"):
        store.read(item, 0, 4)


def test_footers_that_lie(servers) -> None:
    _, _, data = servers
    content = (data / "train-0.parquet").read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8]
    good = RemoteFile(
        "", RemoteObject("x", len(content), "1"), "x", checked_footer(footer, len(content), "x"), ""
    )
    with pytest.raises(ValueError, match="claims that row group 0, column 'label' has the bytes"):
        checked_footer(footer, len(footer) + 400, "x")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        checked_footer(footer[:-100], len(content), "x")

    # One range for neighbours; a request has at most 32 MiB.
    ((start, end),) = good.ranges(0, ["text", "label"])
    assert start == 4 and end < good.ranges(1, ["text"])[0][0] + 1


def test_a_row_group_of_no_rows_is_healthy(servers, tmp_path: Path) -> None:
    """pyarrow, Spark and filters write such groups; they have no pages, and so no offsets."""
    s3, _, _ = servers
    schema = pa.schema([("text", pa.string()), ("label", pa.string())])
    for name in ("train1", "dev1"):
        with parquet.ParquetWriter(tmp_path / f"{name}.parquet", schema) as writer:
            for numbers in ([], range(3), [], range(3, 8), []):
                rows = [{"text": f"{name} {number}", "label": "a"} for number in numbers]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    s3.copy(tmp_path, "s3://bucket/empty")
    here, there = rows_of(str(tmp_path)), rows_of("s3://bucket/empty")
    assert [*there.parts] == [*here.parts] and set(there.parts) == {"train", "validation"}
    for split, rows in there.parts.items():
        orders = [
            one.order(seed=0, batch=2).at(np.arange(8))[1] for one in (rows, here.parts[split])
        ]
        assert np.array_equal(*orders) and sorted(orders[0]) == [*range(8)]
        columns = [[*one.values("text")] for one in (rows, here.parts[split])]
        assert pa.chunked_array(columns[0]) == pa.chunked_array(columns[1])
        assert rows.where(3).endswith("1.parquet, row 3")
        assert len(sampled(rows)) == 8 and rows.traffic.requests > 0


def test_names_in_a_bucket_that_seem_to_be_splits_are_rejected(servers) -> None:
    s3, _, data = servers
    for name in ("mytrain", "mytest"):
        content = (data / "validation.parquet").read_bytes()
        s3.write(f"s3://bucket/mine/{name}.parquet", content)
    with pytest.raises(ValueError, match=r"'mytrain.parquet' contains train, and 'mytest.parquet'"):
        rows_of("s3://bucket/mine")


@pytest.mark.slow
def test_a_footer_at_which_pyarrow_aborts(servers) -> None:
    content = (servers[2] / "train-0.parquet").read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = content[-8 - length : -8]
    # The process that reads it must not be this one.
    for at in range(length):
        damaged = bytearray(footer)
        damaged[at] ^= 0x80
        call = bytes(damaged), len(content), "s3://bucket/damaged.parquet"
        if not aborts(*call):
            continue
        with pytest.raises(ValueError, match="s3://bucket/damaged.parquet .* is damaged"):
            check_apart([(footer, len(content), "good"), call])
        break


def aborts(content: bytes, size: int, where: str) -> bool:
    """Return whether a process that reads a footer ends by a signal."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with suppress(ValueError):
            checked_footer(content, size, where)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_json_lines_become_parquet(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for split in ("train", "validation"):
        lines = [f'{{"text": "{split} {number}", "label": "a"}}\n' for number in range(5)]
        (tmp_path / "old" / f"{split}.jsonl").write_text("".join(lines))
    assert rewrite.main([str(tmp_path / "old"), str(tmp_path / "new"), "--rows", "2"]) == 0
    old, new = rows_of(str(tmp_path / "old")), rows_of(str(tmp_path / "new"))
    for split in old.parts:
        rows = range(5)
        assert [new.parts[split][i] for i in rows] == [old.parts[split][i] for i in rows]
    assert parquet.ParquetFile(tmp_path / "new/train.parquet").num_row_groups == 3


def test_forms_of_addresses() -> None:
    one = address_of("hf://datasets/some/texts@refs%2Fconvert%2Fparquet/en/*/0.parquet")
    assert (one.root, one.pattern) == (
        "hf://datasets/some/texts@refs%2Fconvert%2Fparquet/en",
        "*/0.parquet",
    )
    assert one.matches("a/0.parquet") and not one.matches("a/b/0.parquet")
    assert address_of("s3://bucket/spark.parquet/").root == "s3://bucket/spark.parquet"
    assert address_of("gs://bucket/a/b.parquet").pattern == "b.parquet"
