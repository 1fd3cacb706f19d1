"""The oneloop command on real runs (verify, export), and its help pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import oneloop
from failing_disks import full_disk
from hostile import listing
from oneloop.basics.exit_codes import BadInput
from oneloop.checkpoint.store import Store
from oneloop.cli import COMMANDS, main
from oneloop.recipe.parse import read
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.command_options",
    "oneloop.checkpoint.store",
    "oneloop.cli",
    "oneloop.tools.export.command",
    "oneloop.tools.export.convert",
    "oneloop.tools.new",
    "oneloop.tools.verify",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a run of a GPT."""
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "texts").mkdir()
    for number in range(60):
        (folder / "texts" / f"{number}.txt").write_text(
            f"text {number}: " + "the cat sat on the mat. " * 9
        )
    words = [
        "gpt",
        "--task.data",
        str(folder / "texts"),
        "--task.layers",
        "2",
        "--task.width",
        "32",
        "--task.block",
        "16",
        "--duration",
        "12",
        "--save.every",
        "4",
        "--eval.every",
        "4",
        "--save.keep",
        "9",
        "--track",
        "none",
        "--run.dir",
        str(folder / "run"),
        "--batch.size",
        "8",
    ]
    run(train, words, ranks=2, config="fsdp2", folder=folder).ok()
    return folder


@pytest.fixture
def gpt(trained, tmp_path):
    """Return a copy of the run, which the test may damage."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def test_verify_lists_every_checkpoint_and_what_is_wrong(gpt, capsys):
    assert main(["verify", str(gpt)]) == 0
    assert capsys.readouterr().out.count("good") == 3 + 1  # three checkpoints, and final/
    (gpt / "checkpoints" / "step-00000008" / "rank-00001.safetensors").write_bytes(b"x")
    assert main(["verify", str(gpt)]) == 1
    assert "step-00000008: rank-00001.safetensors: expected" in capsys.readouterr().out
    assert main(["verify", str(gpt.parent)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_export_gives_what_transformers_loads(gpt, capsys):
    from transformers import GPT2LMHeadModel

    to = gpt.parent / "out"
    assert main(["export", str(gpt), "--to", str(to)]) == 0
    final, exported = (
        load_file(gpt / "final" / "model.safetensors"),
        load_file(to / "model.safetensors"),
    )
    assert final.keys() == exported.keys() and all(
        torch.equal(final[name], exported[name]) for name in final
    )
    assert not any(part in name for name in exported for part in ("module.", "_orig_mod."))
    assert GPT2LMHeadModel.from_pretrained(to).config.n_layer == 2
    assert main(["export", str(gpt), "--to", str(to), "--checkpoint", "4"]) == 0
    assert not all(
        torch.equal(final[name], one) for name, one in load_file(to / "model.safetensors").items()
    )
    assert main(["export", str(gpt), "--to", str(to), "--checkpoint=best"]) == 0
    capsys.readouterr()
    for words, expected_text in (
        (["--checkpoint", "5"], "steps: 4, 8, 12"),
        (["--checkpoint", "x"], "not found"),
        (["--weights", "ema"], "no EMA 'ema'; it has none"),
        (["--too"], "unrecognized arguments: --too"),
    ):
        assert main(["export", str(gpt), "--to", str(to), *words]) == 2
        assert expected_text in capsys.readouterr().err
    assert main(["export", str(gpt)]) == 2
    (Store(gpt / "checkpoints").sealed()[-1] / "state.json").write_text("")
    newest = ["export", str(gpt), "--to", str(to), "--checkpoint", "newest"]
    assert main(newest) == 2 and "is damaged" in capsys.readouterr().err
    (gpt / "final" / "model.safetensors").write_bytes(b"")
    assert (
        main(["export", str(gpt), "--to", str(to)]) == 2
        and "final is damaged" in capsys.readouterr().err
    )


def test_no_command_writes_into_a_run(gpt, capsys):
    """Neither into the same run, nor into another one, nor through a link; nor into a checkpoint
    that was copied to another folder."""
    other = gpt.parent / "other"
    shutil.copytree(gpt, other)
    (gpt.parent / "link").symlink_to(other)
    newest = Store(gpt / "checkpoints").sealed()[-1]
    shutil.copytree(newest, gpt.parent / "backup")
    before = listing(gpt.parent)
    export = ["export", str(gpt), "--checkpoint", "4", "--to"]
    commands = [
        *(
            [*export, str(to)]
            for to in (newest, gpt / "final", gpt / "new", gpt, other / "a" / "b")
        ),
        *([*export, str(gpt.parent / to)] for to in ("link/new", "backup", "new/../run/final")),
        ["predict", str(gpt), "--to", f"{other}/checkpoints/{newest.name}/rows.jsonl"],
        ["report", str(gpt), "--to", f"{gpt}/recipe.yaml"],
        ["worth", "gpt", "--to", str(gpt)],
        ["new", f"{gpt}/my_task.py"],
        ["new", "--configs", f"{gpt}/final"],
    ]
    for words in commands:
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert "is in the folder of a run or a checkpoint" in error, (words, error)
        assert "choose a path outside of it" in error and error.count("\n") == 1
    with pytest.raises(BadInput, match="is in the folder of a run"):
        oneloop.export(gpt, to=gpt / "final")
    with pytest.raises(BadInput, match="is in the folder of a run"):
        oneloop.report(gpt, to=other / "page.html")
    assert listing(gpt.parent) == before

    # Its own page is an exception.
    assert main(["report", str(gpt)]) == 0


def test_an_export_to_a_full_disk_names_the_folder(gpt, capsys):
    to = gpt.parent / "out"
    with full_disk(100):
        assert main(["export", str(gpt), "--to", str(to)]) == 2
    error = capsys.readouterr().err
    assert f"--to {to} cannot be written (" in error and error.count("\n") == 1
    assert "make room, or name another folder" in error
    assert not [*to.glob("*.safetensors")] and not (to / "MANIFEST.json").exists()


@pytest.mark.slow
def test_nothing_is_unpickled_in_an_export(gpt):
    code = (
        "import sys; sys.addaudithook(lambda event, _: event.startswith('pickle.find_class') "
        "and print('UNPICKLED'));"
        f"from oneloop.cli import main; sys.exit(main(['export', {str(gpt)!r}, '--to', "
        f"{str(gpt.parent / 'o')!r}]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0 and "UNPICKLED" not in ended.stdout, ended.stderr


NONSENSE = """
    plan / plan gpt --gpuu 4 / plan gpt --gpu h1000 / plan no-such / plan no_such.py:Task
    plan gpt --processes 6 --nodes 4 / plan gpt --config_file no-such / plan gpt --task.widthh 3
    worth / worth gpt --roundss 1 / worth gpt --only no-such / worth no-such
    prove / prove gpt --config_file no-such / prove gpt --config_file ddp --stepss 1
    prove no-such --config_file ddp / check / check digits --jsonn / check no-such
    launch / launch --config_file ddp / launch --config_file no-such digits / launch no-such
    launch digits --batch.sizee 1 / launch --num_processes / launch no_such.py:Task
    launch --config_file ddp evaluate no-such / doctor --config_file no-such / doctor --nodes 2
    doctor no-such / evaluate / evaluate no-such / evaluate no-such --dataa x / predict
    predict no-such --to x.csv / export / export no-such --to x / verify / verify no-such
    verify no-such --samee x / report / report no-such / compare / compare no-such no-such
    watch / watch no-such --once / watch no-such --oncee / new / new x.py --configss
"""


def test_wrong_words_are_rejected_before_torch_is_imported(tmp_path):
    """An import of torch would fail here."""
    lines = [line.split() for line in NONSENSE.replace("\n", "/").split("/") if line.strip()]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['accelerate'] = None;"
        "from oneloop.cli import main;"
        f"print([words for words in {lines} if main(words) != 2])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and ended.stdout.strip() == "[]", ended.stderr
    messages = ended.stderr.splitlines()
    assert len(messages) == len(lines) and all(line.startswith("oneloop: ") for line in messages)
    assert {words[0] for words in lines} == {*COMMANDS}


def test_each_command_has_a_help_page(capsys):
    assert main(["--help"]) == 0
    overview, pages = capsys.readouterr().out, {}
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        pages[name] = capsys.readouterr().out
        assert pages[name].startswith(f"usage: oneloop {name}") and f"\n  {name} " in overview
    assert len(set(pages.values())) == len(pages) and "ddp" in pages["launch"]
    assert main([]) == 2 and main(["lunch"]) == 2
    assert (
        "unknown command 'lunch'; known: new, launch, doctor, plan, verify, check"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("recipe", ["digits", "gpt", "sft", "snippets"])
def test_help_shows_types_in_words_and_no_twins(recipe, capsys):
    with pytest.raises(SystemExit, match="0"):
        read([recipe, "--help"])
    shown = capsys.readouterr().out
    assert "--duration DURATION " in shown and "--batch.micro INT|{auto,fastest}|null" in shown
    assert not [
        line
        for line in shown.splitlines()
        if re.search(r"Union|Optional|Literal|<class|--[a-z_.]+\+", line)
    ]
