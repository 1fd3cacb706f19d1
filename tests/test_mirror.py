"""Checkpoints in a bucket: what a mirror holds, and runs whose disk is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import stores


@pytest.fixture(scope="module")
def s3():
    with stores.s3_server() as variables:
        yield variables


def final(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "final").glob("*.safetensors")}


LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp2", 2)]


@pytest.mark.parametrize(("config", "ranks"), LAYOUTS)
@pytest.mark.parametrize("hosts", [False, True])
def test_a_lost_disk(tmp_path, config, ranks, hosts):
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    stores.trained(whole, "--run.dir", "run", config=config, ranks=ranks).ok()
    mirror = ["--save.mirror", f"file://{tmp_path}/store", "--run.dir", "run"]
    how = {"config": config, "ranks": ranks, "hosts": hosts}
    first = stores.trained(lost, *mirror, "--stop.after", "1s", variables={"SLOW": "0.05"}, **how)
    assert first.codes == [75] * ranks, first.output
    shutil.rmtree(lost)
    again = stores.trained(lost, *mirror, **how)
    again.ok()
    assert "resuming from" in again.output, again.output
    assert final(lost / "host-0/run" if hosts else lost / "run") == final(whole / "run")
