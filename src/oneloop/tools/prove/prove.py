"""``oneloop prove``: does a parallel layout train the same weights as one process?

The answer comes from real runs of a few steps."""

import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from oneloop.basics.exit_codes import DONE, ERROR, BadInput
from oneloop.basics.files import dumps, printable
from oneloop.data.batch_layout import BatchLayout
from oneloop.launch.config_files import config_file
from oneloop.recipe.parse import read
from oneloop.tools.compare.first_difference import FirstDifference, parting
from oneloop.tools.prove.short_run import RunFailed, Start, launched, train_briefly

# the layout may differ from the reference by at most this multiple of the control's difference
_FACTOR = 10.0
# relative limit: minimum, and maximum
_GRADIENTS = {"float64": (1e-12, 1e-12), "float32": (1e-6, 1e-4)}
# relative distance of its weights; more is not rounding
_CONTROL = {"float64": 1e-5, "float32": 1e-2}

# Patterns of what the run's own comparisons find.
_STEP = r"step (\d+): "
_FOUND = _STEP + ".*trains a different model"
_STOPPED = r"(?:Inexact|ReplicasDiffer): (.*)"

# Patterns of the lines that name a cause, the most certain first; and lines that name none.
_CAUSES = (
    _FOUND,
    "trains a different model",
    "parallel layout",
    "parameters without a gradient in the preflight check",
    "random numbers",
    "generator",
)
_PROMISES = ("any parallel layout", "batch.grain ")


class _Differs(RuntimeError):
    """A run ended because its own comparisons found a difference."""


def prove(own: Namespace, training: Sequence[str], *, start: Start | None = None) -> int:
    """Compare a parallel layout with one process, and print the verdict. Raise BadInput.

    Args:
        own: The options config_file, processes, steps, every_step, double and json.
        training: Recipe and keys.
        start: Starts a run; default: ``oneloop launch``.

    Returns:
        The exit code: 0 (the same) or 1 (different, failed).
    """
    with TemporaryDirectory(prefix="oneloop-") as scratch:
        proof = _Proof(training, own, Path(scratch), start or launched)
        result = {"verdict": "", **proof.about, **proof.result()}
    print(dumps(result) if own.json else printable("\n".join(_lines(result))))
    return DONE if result["verdict"] in ("equal", "bit-identical") else ERROR


class _Proof:
    """The runs of one recipe: on one process, and on the parallel layout."""

    def __init__(
        self, training: Sequence[str], own: Namespace, scratch: Path, start: Start
    ) -> None:
        self.recipe = read(training)
        batch = self.recipe.batch
        file = config_file(own.config_file)
        settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        number = own.processes or settings.get("num_processes") or 1
        gpus = torch.cuda.device_count()

        micro = batch.micro if isinstance(batch.micro, int) else None
        sharded = settings.get("distributed_type") == "FSDP"
        try:
            self.batch = BatchLayout(batch.size, number, micro, grain=batch.grain, sharded=sharded)
        except ValueError as error:
            raise BadInput(str(error)) from None
        if (settings.get("num_machines") or 1) > 1:
            raise BadInput(
                f"oneloop prove runs on one machine, but {own.config_file} is for several; use "
                "ddp or fsdp2"
            )

        # Options of the two layouts.
        half = settings.get("mixed_precision") or "no"
        kept = half if batch.grain and not own.double else "no"
        precision = ["--mixed_precision", kept]
        self.single = ["--config_file", config_file("single"), *precision]
        self.layout = ["--config_file", file, "--num_processes", str(number), *precision]
        self.training = [f"tensors:{own.steps}", *training]
        self.scratch = scratch
        self.start = start
        self.double = own.double

        # The run itself compares the weights of all ranks: in each step, or in the last one.
        self.check_every = 1 if own.every_step else own.steps

        # One process recomputes nothing, so that a fault of recompute is found. (The compiler would
        # fuse other operations, and round differently.)
        self.plain: dict[str, Any] = {}
        if self.recipe.machine.compile == "none":
            self.plain = {"machine.recompute": "none", "machine.offload": False}

        # What the user should know about the comparison.
        self.notes = []
        if number > max(1, gpus):
            self.training += ["--machine.device", "cpu"]
            self.notes.append(
                f"{number} processes, {gpus} GPUs: all runs used the CPU; the processes used gloo"
            )
        if half != kept:
            self.notes.append(
                f"compared without mixed precision ({half}), because half precision rounds "
                "differently"
            )
        self.about = {
            "recipe": self.recipe.name,
            "layout": f"{Path(file).stem} on {number} process{'es' * (number > 1)}",
            "steps": own.steps,
            "notes": self.notes,
        }

    def result(self) -> dict[str, Any]:
        """Make the runs and return the verdict. Raise BadInput."""
        result = self._judge()
        known = result["reason"] and not re.search(_STEP, result["reason"])
        if result["verdict"] != "different" or known or self.check_every == 1:
            return result

        # What a run found late, or not at all, may be found earlier: compare in every step.
        self.check_every = 1
        again = self._judge()
        return again if again["verdict"] == "different" else result

    def _judge(self) -> dict[str, Any]:
        """Make the runs; return the verdict, also if a run ends early. Raise BadInput."""
        try:
            return self._result()
        except RunFailed as error:
            return {"verdict": "failed", "reason": str(error)}
        except _Differs as error:
            return _found(str(error))

    def _result(self) -> dict[str, Any]:
        """Make the runs and compare them. Raise BadInput, RunFailed or _Differs."""
        machine = self.recipe.machine
        keys: dict[str, Any] = {"machine.matmul": "highest"}
        if machine.base_dtype not in (None, "float32"):
            keys["machine.base_dtype"] = "float32"
        wide = {**keys, "machine.dtype": "float64"}

        # With batch.grain, layouts promise the same bits: compare the hashes in the logs.
        if self.recipe.batch.grain:
            same = wide if self.double else {"machine.dtype": machine.dtype}
            layout = self._run("layout", self.layout, same)
            reference = self._run("reference", self.single, {**same, **self.plain})
            verdict = _verdict(parting(reference, layout)[0], "bit-identical")
            reason = self._reason(layout, control=False) if verdict["step"] else None
            return {"dtype": same["machine.dtype"], **verdict, "reason": reason}

        try:
            return self._compare_runs(wide, "float64")
        except (RunFailed, BadInput) as error:
            wrong = "a different model" in str(error)  # a small term, which float32 does not show
            if wrong or self.double or machine.dtype == "float64":
                raise
            why = str(error).splitlines()[-1]

        # Not every operation exists in float64.
        result = self._compare_runs({**keys, "machine.dtype": "float32"}, "float32")
        note = f"compared in float32, because a run in float64 failed: {why}"
        return {**result, "notes": [*self.notes, note]}

    def _compare_runs(self, keys: Mapping[str, Any], dtype: str, again: str = "") -> dict[str, Any]:
        # The control differs from the reference only in its micro-batch: that is the rounding.
        size = self.batch.size
        each = self.batch.each
        if self.recipe.batch.micro != each and each % 2 == 0:
            each //= 2  # so that the layout also accumulates gradients
        larger = each
        for micro in range(2 * each, size + 1, each):
            if size % micro == 0:
                larger = micro
                break
        layout = self._run(f"layout{again}", self.layout, {**keys, "batch.micro": each})
        plain = {**keys, **self.plain}
        reference = self._run(f"reference{again}", self.single, {**plain, "batch.micro": larger})
        control = self._run(f"control{again}", self.single, {**plain, "batch.micro": each})
        parted, result = _compare([layout, control, reference], dtype)
        result |= {"dtype": dtype, **_verdict(parted, "equal"), "reason": None}
        reason = self._reason(layout, control=result["control"] > _CONTROL[dtype])
        if parted:
            result["reason"] = reason
        elif reason and re.match(_FOUND, reason):
            result |= _found(reason)

        # Clipping spreads a difference to all tensors; without it, the first one is the cause.
        if parted and self.recipe.optimizer.clip and not (result["reason"] or again):
            other = self._compare_runs({**keys, "optimizer.clip": 0.0}, dtype, " without clipping")
            if other["tensor"]:
                for key in ("step", "tensor", "tensors", "by"):
                    result[key] = other[key]
        return result

    def _run(self, name: str, options: Sequence[str], keys: Mapping[str, Any]) -> Path:
        folder = self.scratch / f"{keys['machine.dtype']}-{self.check_every}" / name
        folder.parent.mkdir(exist_ok=True)
        keys = {**keys, "log.every": 1, "machine.check_every": self.check_every}
        print(f"oneloop prove: {name} …", file=sys.stderr, flush=True)
        try:
            train_briefly(self.start, folder, [*options, *self.training], keys)
        except RunFailed as error:
            difference = re.search(_STOPPED, str(error), re.DOTALL)
            if difference:
                raise _Differs(f"the {name} run stopped: {difference[1]}") from None
            raise
        return folder

    def _reason(self, layout: Path, *, control: bool) -> str | None:
        """Return a known cause of a difference, or None.

        It is a line of the run (BatchNorm, random numbers, a changed buffer, unused parameters), or
        that the ``control`` differs, too."""
        lines = Path(f"{layout}.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        for word in _CAUSES:
            for line in lines:
                if word in line and not line.startswith(_PROMISES):
                    return line.strip()
        if control:
            return "on one process, another micro-batch (the control) changes the weights, too"
        return None


def _compare(runs: Sequence[Path], dtype: str) -> tuple[FirstDifference | None, dict[str, Any]]:
    """Compare gradients (first step) and weights (each step).

    ``runs``: layout, control and reference. Return the first difference, and the relative distances
    by name."""
    result = dict[str, Any]()
    rounding = torch.zeros(())
    eps = torch.finfo(getattr(torch, dtype)).eps
    always, most = _GRADIENTS[dtype]
    parted = None
    steps = len(list(runs[0].glob("step-*.pt")))
    for step in range(1, 1 + steps):
        saved = [torch.load(run / f"step-{step}.pt", map_location="cpu") for run in runs]
        for kind, tensors in zip(("gradients", "weights"), zip(*saved, strict=True), strict=True):
            names, distance, noise, norm, size = _distances(*tensors)
            if kind == "weights":
                # The rounding per element; the larger one of tensor and model.
                each = torch.maximum(noise / size.sqrt(), noise.norm() / size.sum().sqrt())
                rounding = torch.maximum(rounding, each)
                limit = torch.maximum(_FACTOR * rounding * size.sqrt(), 16 * eps * norm)
                result[kind] = float(distance.norm() / norm.norm())
                result["control"] = float(noise.norm() / norm.norm())
            elif step == 1:
                # A norm may be small by cancellation: no tensor has less than a share of the whole.
                norm = norm.clamp(min=float(norm.norm()) / 1000)
                largest = float((noise / norm).nan_to_num().max())
                limit = norm * max(always, min(_FACTOR * largest, most))
                result[kind] = float((distance / norm).nan_to_num().max())
            else:
                continue  # later gradients are those of other weights

            # Keep the first difference.
            if parted is None and not bool((distance <= limit).all()):
                differing = [
                    name for name, fits in zip(names, distance <= limit, strict=True) if not fits
                ]
                parted = FirstDifference(step, differing, len(names))
                first = names.index(differing[0])
                result["by"] = (distance / norm).tolist()[first]

    # A control that differs as much proves nothing.
    if parted is None and not result["control"] <= _CONTROL[dtype]:
        parted = FirstDifference(steps, [], len(names))
    return parted, result


def _distances(*runs: Mapping[str, Tensor]) -> tuple[list[str], Tensor, Tensor, Tensor, Tensor]:
    """Compare the tensors of layout, control and reference.

    Return names in model order, the L2 distances of layout and control from the reference, its
    norm, and sizes. A tensor that a run lacks (the gradient of an unused parameter) counts as 0."""
    rows = {}
    for name in {name: None for run in reversed(runs) for name in run}:
        layout, control, reference = (run.get(name, torch.zeros(())).double() for run in runs)
        rows[name] = (
            float((layout - reference).norm()),
            float((control - reference).norm()),
            float(reference.norm()),
            float(max(1, layout.numel(), reference.numel())),
        )
    columns = torch.tensor(list(rows.values()), dtype=torch.float64).T
    return list(rows), *columns  # type: ignore[return-value]


def _verdict(parted: FirstDifference | None, same: str) -> dict[str, Any]:
    if parted is None:
        return {"verdict": same, "step": None, "tensor": None, "tensors": None}
    parted = parted._replace(names=[name.removeprefix("model.") for name in parted.names])
    tensor = parted.names[0] if parted.names else None
    return {"verdict": "different", "step": parted.step, "tensor": tensor, "tensors": str(parted)}


def _found(reason: str) -> dict[str, Any]:
    """Return the verdict that a run's own comparisons found a difference."""
    step = re.search(_STEP, reason)
    return {**_verdict(None, "different"), "step": step and int(step[1]), "reason": reason}


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    verdict = result["verdict"]
    layout = result["layout"]
    numbers = f"{result['steps']} steps in {result.get('dtype')}"
    if "weights" in result:
        numbers += (
            f": gradients within {result['gradients']:.1e}, weights within {result['weights']:.1e}"
            f", control {result['control']:.1e}"
        )

    if verdict == "failed" or (verdict == "different" and result["tensors"] is None):
        yield f"{verdict}: {layout}: {result['reason']}"
    elif verdict == "different":
        by = f", by {result['by']:.1e}" if "by" in result else ""
        first = f", first in {result['tensors']}{by}" if result["tensors"] else ""
        yield f"different: {layout} differs from one process from step {result['step']} on{first}"
        yield numbers
        yield f"likely reason: {result['reason'] or 'unknown; see docs/how-to/prove.md'}"
    else:
        yield f"{verdict}: {layout} trains like one process ({numbers})"
    for note in result["notes"]:
        yield f"note: {note}"
