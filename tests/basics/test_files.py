"""A file is replaced completely or not at all."""

from __future__ import annotations

import os

import pytest

from oneloop.basics.files import replacing

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
