"""The files for schedulers in launch/: valid for the published models, with oneloop's exit codes
and valid commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from oneloop.basics.exit_codes import BAD_INPUT, DIVERGED, STOPPED
from oneloop.launch.command import NODE_OPTIONS, split
from oneloop.recipe.parse import check_keys
from worlds import ROOT

pytestmark = pytest.mark.covers(
    "oneloop.basics.exit_codes",
    "oneloop.tools.nodes",
    "oneloop.recipe.parse",
)

KUBERNETES = [*yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())]
SKYPILOT = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
KINDS = {
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
"""models of kubeflow_trainer_api, by the kind of a manifest"""


def _known(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest as the model reads it, which drops unknown keys."""
    from kubeflow_trainer_api import models  # takes seconds, which the other workers save

    model = getattr(models, KINDS[manifest["kind"]])
    return model.from_dict(manifest).to_dict()


def _places(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all dictionaries with fixed keys in a manifest (labels and resources have free
    ones)."""
    if isinstance(value, dict):
        yield value
        for key, inside in value.items():
            if key not in ("labels", "limits", "requests"):
                yield from _places(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _places(inside)


@pytest.mark.parametrize("manifest", KUBERNETES, ids=lambda manifest: manifest["kind"])
def test_kubernetes_manifests_are_those_of_kubeflow_trainer(manifest):
    assert _known(manifest) == manifest
    for place in _places(manifest):  # one wrong key, anywhere, is found
        place["onExitCode"] = [1]
        assert _known(manifest) != manifest
        del place["onExitCode"]


def test_kubernetes_restarts_by_exit_code():
    (runtime,) = (
        manifest for manifest in KUBERNETES if manifest["kind"] == "ClusterTrainingRuntime"
    )
    jobs = runtime["spec"]["template"]["spec"]
    (rule,), (job,) = jobs["failurePolicy"]["rules"], jobs["replicatedJobs"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert jobs["failurePolicy"]["maxRestarts"] > 0 and job["template"]["spec"]["backoffLimit"] == 0
    (codes,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (codes["action"], codes["onExitCodes"]["values"]) == ("FailJob", [BAD_INPUT, DIVERGED])
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60
    assert codes["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.fixture(scope="module")
def schemas(tmp_path_factory) -> tuple[dict, dict]:
    """Return SkyPilot's schemas of a task and of its resources. (The import writes to the home
    folder.)"""
    program = "import json; from sky.utils import schemas as s\n"
    program += "print(json.dumps([s.get_task_schema(), s.get_resources_schema()]))"
    # by launch/environment.sh, as it needs another transformers
    installed = Path(sys.prefix) / "skypilot"
    if not installed.is_dir():
        pytest.skip("SkyPilot is not installed; launch/test.sh installs it")
    home = {
        **os.environ,
        "HOME": str(tmp_path_factory.mktemp("home")),
        "PYTHONPATH": str(installed),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=home, capture_output=True, text=True, check=True
    )
    task, resources = json.loads(done.stdout.splitlines()[-1])
    recovery = resources["properties"]["job_recovery"]["anyOf"][1]
    recovery["additionalProperties"] = False  # SkyPilot ignores unknown keys here
    return task, resources


def test_skypilot_task_is_one_of_skypilot(schemas):
    task, resources = schemas
    jsonschema.validate(SKYPILOT, task)
    jsonschema.validate(SKYPILOT["resources"], resources)
    recovery = SKYPILOT["resources"]["job_recovery"]
    assert (
        recovery["recover_on_exit_codes"] == [STOPPED] and recovery["max_restarts_on_errors"] == 0
    )
    for part, schema in (
        (SKYPILOT | {"num_node": 2}, task),
        (SKYPILOT["resources"] | {"spot": True}, resources),
        (SKYPILOT["resources"] | {"job_recovery": {"recover_on_exit_code": [75]}}, resources),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(part, schema)


def _commands() -> Iterator[list[str]]:
    """Yield the words after ``oneloop launch`` (or after the script) in each file."""
    (job,) = (
        manifest["spec"]["trainer"] for manifest in KUBERNETES if manifest["kind"] == "TrainJob"
    )
    yield [*job["command"], *job["args"]][2:]
    (line,) = (line for line in SKYPILOT["run"].splitlines() if line.startswith("oneloop"))
    yield shlex.split(line)[2:]
    script = (ROOT / "launch" / "slurm.sbatch").read_text()
    (example,) = re.findall(r"^# sbatch .*?slurm\.sbatch (.*)", script, re.MULTILINE)
    yield ["--config_file", "ddp", *shlex.split(example)]


@pytest.mark.parametrize("words", [*_commands()], ids=("kubernetes", "skypilot", "slurm"))
def test_the_commands_are_valid(words):
    own, rest = split(words, NODE_OPTIONS)
    assert own.keys() <= {"max_restarts", "nodes", "rendezvous"} and rest[0] == "--config_file"
    check_keys(rest[2:])
    assert (ROOT / "accelerate_configs" / f"{rest[1]}.yaml").exists()


def test_the_slurm_script_is_one_page_of_bash():
    script = ROOT / "launch" / "slurm.sbatch"
    assert len(script.read_text().splitlines()) <= 60
    subprocess.run(["bash", "-n", str(script)], check=True)
    for line in ("--requeue", "--open-mode=append", "--signal=B:USR1@300", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in script.read_text()
