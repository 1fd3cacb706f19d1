"""Few text files: whole texts, each in one split, with one end token each."""

from __future__ import annotations

from pathlib import Path

import pytest

from oneloop.tasks.causal_lm import CausalLM

pytestmark = pytest.mark.covers(
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.rows.text_files",
    "oneloop.tasks.rows.find_files",
)

SMALL = {"layers": 1, "heads": 2, "width": 16, "block": 16}
END = 256


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))


def files(folder: Path, count: int, *, length: int = 20) -> dict[str, str]:
    """Write texts of several lines; return them by name."""
    folder.mkdir(parents=True)
    texts = {}
    for number in range(count):
        lines = "".join(f"file {number}, line {line}\n" for line in range(length))
        (folder / f"{number}.txt").write_text(lines)
        texts[f"{number}.txt"] = lines
    return texts


def tokens_of(task: CausalLM) -> dict[str, list[int]]:
    sets = {"train": task.train_set(), **task.eval_sets()}
    return {name: list(data.tokens) for name, data in sets.items()}


@pytest.mark.parametrize("count", [3, 6, 39, 45])
def test_files_stay_whole(tmp_path, count):
    texts = files(tmp_path / "data", count)
    tokens = tokens_of(CausalLM(str(tmp_path / "data"), **SMALL))
    assert sum(part.count(END) for part in tokens.values()) == count
    found = []
    for part in tokens.values():
        assert part[-1] == END
        text = bytes(256 if token == END else token for token in part if token != END)
        ends = [at for at, token in enumerate(part) if token == END]
        starts = [0, *(end + 1 for end in ends)]
        for start, end in zip(starts, ends, strict=False):
            found.append(bytes(part[start:end]).decode())
        assert text
    assert sorted(found) == sorted(texts.values())
    assert set(tokens) == {"train", "validation", "test"} and all(tokens.values())


@pytest.mark.parametrize("count", [1, 2])
def test_the_end_of_one_or_two_files_is_held_out(tmp_path, count):
    texts = files(tmp_path / "data", count, length=400)
    task = CausalLM(str(tmp_path / "data"), **SMALL)
    tokens = tokens_of(task)
    assert any("the end of each file is held out" in note for note in task.notes)
    assert {name: part.count(END) for name, part in tokens.items()} == {
        "train": 0,
        "validation": 0,
        "test": count,
    }
    if count == 1:
        joined = [*tokens["train"], *tokens["validation"], *tokens["test"]]
        assert bytes(joined[:-1]).decode() == texts["0.txt"]
        assert bytes(tokens["train"]).endswith(b"\n")  # cut after a line
        for name in ("validation", "test"):
            assert abs(len(tokens[name]) / len(joined) - 0.05) < 0.03


def test_a_text_of_one_line_is_cut_after_a_word_or_anywhere(tmp_path):
    for name, text in (("words", "some words " * 400), ("none", "x" * 4000)):
        (tmp_path / f"{name}.txt").write_text(text)
        tokens = tokens_of(CausalLM(str(tmp_path / f"{name}.txt"), **SMALL))
        joined = [*tokens["train"], *tokens["validation"], *tokens["test"]]
        assert bytes(joined[:-1]).decode() == text and joined.count(END) == 1
        assert name == "none" or bytes(tokens["train"]).endswith(b" ")


def test_the_content_of_a_file_decides_its_split(tmp_path):
    """Whatever the names; a copy is in the split of the original."""
    files(tmp_path / "data", 30)
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for number, file in enumerate(sorted((tmp_path / "data").iterdir(), reverse=True)):
        (renamed / f"{number:02}.txt").write_text(file.read_text())
    (renamed / "copy.txt").write_text((renamed / "07.txt").read_text())
    splits = []
    for folder in (tmp_path / "data", renamed):
        made = CausalLM(str(folder), held_out=0.2, **SMALL)
        splits.append(
            {
                name: {bytes(text) for text in texts_in(tokens)}
                for name, tokens in tokens_of(made).items()
            }
        )
    assert splits[0] == splits[1] and sum(map(len, splits[0].values())) == 30


def texts_in(tokens: list[int]) -> list[list[int]]:
    """Divide tokens at the end tokens."""
    ends = [at for at, token in enumerate(tokens) if token == END]
    return [
        tokens[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)
    ]


def test_a_short_file_next_to_a_long_one_is_trained(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "long.txt").write_text("some words\n" * 400)
    (tmp_path / "data" / "short.txt").write_text("ab")
    tokens = tokens_of(CausalLM(str(tmp_path / "data"), **SMALL))
    assert tokens["train"].count(END) == 1 and sum(map(len, tokens.values())) == 4400 + 2 + 2


def test_a_text_that_is_too_short_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(ValueError, match=r"a\.txt is too short to hold out its end"):
        CausalLM(str(tmp_path / "a.txt"), **SMALL)


def test_files_that_are_not_read_are_listed(tmp_path):
    files(tmp_path / "data", 4)
    (tmp_path / "data" / "table.xlsx").write_bytes(b"")
    (tmp_path / "data" / "README").write_text("about")
    task = CausalLM(str(tmp_path / "data"), **SMALL)
    assert any("files that are not read: 1 .xlsx" in note for note in task.notes)
