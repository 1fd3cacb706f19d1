"""A file is replaced completely or not at all."""

from __future__ import annotations

import os

import pytest

from failing_disks import full_disk
from oneloop.basics.exit_codes import BadInput, Unavailable
from oneloop.basics.files import replacing, writing

pytestmark = pytest.mark.covers("oneloop.basics.files")


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, shared):
    file = tmp_path / "a.json"
    file.write_text("old")

    def fails() -> None:
        with replacing(file, shared=shared) as draft:
            draft.write_text("ne")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fails()
    assert file.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with replacing(file, shared=shared) as draft:
        draft.write_text("new")
        assert file.read_text() == "old" and (str(os.getpid()) in draft.name) == shared
    assert file.read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_in_place_of_a_file_is_set_aside(tmp_path):
    (tmp_path / "a.json" / "content").mkdir(parents=True)
    with replacing(tmp_path / "a.json") as draft:
        draft.write_text("new")
    assert (tmp_path / "a.json").read_text() == "new"
    (aside,) = tmp_path.glob("bad-a.json-*")
    assert (aside / "content").is_dir()


def test_an_error_of_a_disk_names_path_and_remedy(tmp_path):
    with (
        pytest.raises(BadInput, match=r"^--to x cannot be written \(File too large\); make room$"),
        full_disk(),
        writing("--to x", "make room", only_full=True),
    ):
        (tmp_path / "file").write_text("content")
    with pytest.raises(FileNotFoundError), writing("x", "y", only_full=True):
        (tmp_path / "missing").read_text()
    with pytest.raises(Unavailable), writing("x", "y"):
        raise Unavailable("it says more")
