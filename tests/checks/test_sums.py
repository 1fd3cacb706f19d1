"""The check before a run: loss and gradient of a batch are sums over samples, whatever the model
draws; a data set does not change what it stores; and a message names the cause."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from oneloop.basics.content_hash import content_hash
from oneloop.basics.tensors import local
from oneloop.checks.passes import run_pass
from oneloop.data.fingerprint import IN_PLACE, OTHER, fault
from oneloop.tools.prove.prove import _Proof
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.tensors",
    "oneloop.task_protocol.contract",
    "oneloop.checks.dry_run",
    "oneloop.checks.metrics",
    "oneloop.checks.modes",
    "oneloop.checks.passes",
    "oneloop.checks.preflight",
    "oneloop.checks.questions",
    "oneloop.checks.rows",
    "oneloop.checks.samples",
    "oneloop.checks.sums",
    "oneloop.checks.tolerance",
    "oneloop.basics.content_hash",
    "oneloop.data.fingerprint",
    "oneloop.loop.start_lines",
    "oneloop.machine.fsdp2_units",
    "oneloop.task_protocol.user_code",
    "oneloop.task_protocol.whole_batch",
    "oneloop.tools.prove.prove",
)

NOT_A_SUM = ["for samples whose losses are", "additive = False"]
GRADIENT = ["the gradient of", "is not the sum"]
STORED = ["the training set changes what it stores"]

WRONG = {
    # D
    "zoo_silent_sums.FaintFocal": NOT_A_SUM,
    "zoo_silent_sums.FaintNormaliser": [*GRADIENT, "layers.0.inner"],
    "zoo_silent_sums.FaintFrequency": [*GRADIENT, "embedding.weight", "scale_grad_by_freq"],
    "zoo_silent_sums.OwnDropPath": NOT_A_SUM,
    "zoo_silent_sums.FunctionalDropout": NOT_A_SUM,
    "zoo_silent_sums.AttentionDropout": NOT_A_SUM,
    "zoo_silent_sums.DrawnInCollate": NOT_A_SUM,
    "zoo_silent_sums.WholeBatchDrops": ["depends on the other samples of the batch"],
    "sum_cases.CentredWithBatchNorm": NOT_A_SUM,
    "sum_cases.NoisyInLoss": ["in eval mode", *NOT_A_SUM],
    "sum_cases.CentredLSTM": NOT_A_SUM,
    "sum_cases.OnlyInTraining": NOT_A_SUM,
    "sum_cases.SingleSamples": NOT_A_SUM,
    # J
    "zoo_silent_sums.StftLeak": NOT_A_SUM,
    "zoo_silent_sums.SoftMask": NOT_A_SUM,
    "zoo_silent_sums.SmallPenalty": NOT_A_SUM,
    "zoo_silent_sums.StableByBatch": NOT_A_SUM,
    "zoo_silent_sums.SmallNudge": [*GRADIENT, "layers.0.inner"],
    "sum_cases.TinyPenalty": NOT_A_SUM,
    "sum_cases.FirstCounts": NOT_A_SUM,
    "sum_cases.InHalf": NOT_A_SUM,
    "sum_cases.OnlyInFloat32": NOT_A_SUM,
    # I
    "sum_cases.Shrinks": STORED,
    "sum_cases.EvaluationShrinks": ["the data set other changes what it stores"],
    "sum_cases.CollateShrinks": ["the training set stores the samples that collate changes"],
    "sum_cases.Draws": ["the training set returns other content", "its own generator"],
    # K
    "zoo_silent_sums.EvalBuffer": ["a forward in evaluation changes the buffer center"],
    "sum_cases.CountsEvaluations": ["another loss in the next evaluation", "calls"],
}
IN_FLOAT64 = [
    "zoo_silent_sums.SoftMask",
    "zoo_silent_sums.SmallPenalty",
    "zoo_silent_sums.StableByBatch",
    "sum_cases.TinyPenalty",
    "sum_cases.FirstCounts",
    "sum_cases.InHalf",
]
"""of WRONG, what the rounding of float32 or bfloat16 may hide: it is found with float64"""
ONLY_FLOAT32 = ["sum_cases.OnlyInFloat32", "sum_cases.KeepsModel"]
"""they have constants in float32"""
DOUBLE = ["--machine.dtype", "float64"]
RIGHT = [
    "sum_cases.ManyDropouts",
    "sum_cases.AttentionDrops",
    "sum_cases.Diffusion",
    "sum_cases.FreshInPlace",
    "sum_cases.HasNaN",
    "sum_cases.UpAndDown",
    "sum_cases.KeepsModel",
    "sum_cases.ZeroGradient",
    "sum_cases.NotAdditive",
    "sum_cases.FrozenNorm",
    "sum_cases.Skips",
]
QUICK = [
    "zoo_silent_sums.FaintNormaliser",
    "zoo_silent_sums.DrawnInCollate",
    "zoo_silent_sums.WholeBatchDrops",
    "zoo_silent_sums.EvalBuffer",
    "zoo_silent_sums.SoftMask",
    "sum_cases.CentredWithBatchNorm",
    "sum_cases.OnlyInTraining",
    "sum_cases.SingleSamples",
    "sum_cases.TinyPenalty",
    "sum_cases.OnlyInFloat32",
    "sum_cases.EvaluationShrinks",
    "sum_cases.CollateShrinks",
    "sum_cases.ManyDropouts",
    "sum_cases.FreshInPlace",
    "sum_cases.UpAndDown",
]
ACCUSING = [
    "is not the sum",
    "stores",
    "a forward in evaluation",
    "next evaluation",
    "different loss",
]


def checked(names: list[str], *words: str) -> dict[str, str]:
    """Return what the check says of these tasks: an error, or the lines of the start-up log."""
    from oneloop.basics.exit_codes import BadInput
    from oneloop.checks.preflight import preflight
    from oneloop.job.build import build_job
    from oneloop.launch.processes import start
    from oneloop.loop.start_lines import start_lines
    from oneloop.recipe.parse import read

    there = start()
    found = {}
    for name in names:
        micro = "1" if name.endswith("SingleSamples") else "4"
        keys = [
            "digits",
            "--task",
            name,
            "--duration",
            "2",
            "--batch.size",
            "16",
            "--track",
            "none",
        ]
        more = DOUBLE if name in IN_FLOAT64 and not words else []
        recipe = read([*keys, "--batch.micro", micro, *words, *more])
        job = build_job(recipe, ranks=there.ranks, sharded=there.sharded)
        if recipe.machine.dtype == "float64":  # as oneloop prove --double does
            job.model.double()
        model = there.prepare(job.model, blocks=job.built.blocks)
        before = state_of(model)
        try:
            seen = preflight(job, there, model)
            optimizer = job.make_optimizer(model)
            found[name] = "\n".join(start_lines(job, there, model, optimizer, [], seen))
        except BadInput as error:
            found[name] = f"rejected: {error}"
        assert state_of(model) == before, name
    return found


def state_of(model: torch.nn.Module) -> list[object]:
    """Return what the check must leave as it is: tensors, modes and hooks of all modules."""
    state: list[object] = [torch.get_default_dtype()]
    for module in model.modules():
        state += [module.training, len(module._forward_hooks), len(module._forward_pre_hooks)]
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                state += [id(tensor), local(tensor.detach()).flatten().tolist()]
    return state


def judge(found: dict[str, str]) -> None:
    """Check what is said of each task."""
    for name, text in found.items():
        if name in WRONG:
            assert all(word in text for word in WRONG[name]), f"{name}: {text}"
        else:
            assert not any(word in text for word in ["rejected", *ACCUSING]), f"{name}: {text}"


def test_what_is_no_sum_over_samples_is_found_and_what_is_one_is_accepted():
    (found,) = run(checked, QUICK).ok()
    judge(found)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], DOUBLE], ids=["float32", "float64"])
def test_every_case_is_found(words):
    without = ONLY_FLOAT32 if words else []
    names = [name for name in [*WRONG, *RIGHT] if name not in without]
    (found,) = run(checked, names, *words).ok()
    judge(found)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
@pytest.mark.parametrize("words", [[], DOUBLE], ids=["float32", "float64"])
def test_it_is_found_on_two_processes(config, words):
    without = ONLY_FLOAT32 if words else []
    names = [name for name in [*WRONG, *RIGHT] if name not in without]
    names.remove("sum_cases.Skips")  # it does not use all parameters in each step
    one, two = run(checked, names, *words, ranks=2, config=config).ok()
    assert one == two
    judge(one)


@pytest.mark.slow
def test_random_units_are_the_cause_under_fsdp2():
    found = run(checked, ["sum_cases.Skips"], ranks=2, config="fsdp2").ok()[0]
    assert "which units run depends on random numbers (LayerDrop)" in found["sum_cases.Skips"]


@pytest.mark.slow
def test_with_the_grain_a_set_that_changes_is_rejected():
    names = [name for name, words in WRONG.items() if any("set" in word for word in words)]
    (found,) = run(checked, names, "--batch.grain", "4").ok()
    assert len(found) == 4
    for name, text in found.items():
        assert text.startswith("rejected: batch.grain requires"), f"{name}: {text}"
        assert all(word in text for word in WRONG[name]), f"{name}: {text}"


def test_a_change_that_sums_to_zero_changes_the_product():
    class Sums(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Parameter(torch.zeros(3, 4))
            self.unused = torch.nn.Parameter(torch.zeros(2))
            self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    model = Sums()
    gradient = torch.arange(12.0).view(3, 4)
    other = gradient + torch.tensor([1.0, -1.0, 0.0, 0.0])
    assert gradient.sum() == other.sum()
    found = []
    for factor in (gradient, other):
        loss = (model.used * factor).sum() + model.empty.sum()
        found.append(run_pass(model, lambda loss=loss: loss))
    assert abs(found[0]["used"].product - found[1]["used"].product) > 0.1
    assert found[0].keys() == {"", "used", "empty"}
    assert (found[0]["empty"].product, found[0]["empty"].norm) == (0.0, 0.0)


def test_samples_are_compared_by_content():
    sample = {"x": torch.tensor([1.0, torch.nan]), "rows": [np.arange(3), "text"], "set": {1}}
    before = content_hash([sample])
    again = {"x": sample["x"].clone(), "rows": [np.arange(3), "text"], "set": {1}}
    assert fault(before, [sample], [again]) == ""
    again["rows"][0][1] = 7
    assert fault(before, [sample], [again]) == OTHER
    sample["rows"][0][1] = 7
    assert fault(before, [sample], [again]) == IN_PLACE
    for value in (2, 0.5, "text", b"bytes", True, np.float32(1)):
        assert content_hash([value, math.nan]) == content_hash([value, math.nan])
        assert content_hash(value) != content_hash(value * 2)


def test_the_reason_of_a_difference_is_found_in_later_lines(tmp_path):
    cause = "a forward in training changes the buffer mean; another parallel layout trains a …"
    lines = [
        "tiny: 30 parameters",
        "any parallel layout gives the same gradients",
        "step 1/3",
        cause,
    ]
    (tmp_path / "layout.txt").write_text("\n".join(lines))
    reason = _Proof._reason(None, tmp_path / "layout", control=True)
    assert reason == cause
    (tmp_path / "layout.txt").write_text("\n".join(lines[:3]))
    assert _Proof._reason(None, tmp_path / "layout", control=False) is None
