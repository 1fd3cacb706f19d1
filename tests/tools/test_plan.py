"""oneloop plan: the planned step is the real one, its numbers are those of formulas, and its
changes make a run fit."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections import Counter
from importlib import import_module
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from adapters import a_base
from oneloop.cli import main
from oneloop.launch.config_files import config_files
from oneloop.recipe.parse import read
from oneloop.recipe.schema import MachineConfig
from oneloop.tasks.language.models import Shape, scratch_config
from oneloop.tools.plan.asked import Asked
from oneloop.tools.plan.changes import possible_changes
from oneloop.tools.plan.description import Plan
from oneloop.tools.plan.planned import planned
from planning import GPT, LAYOUTS, LLAMA, one_step, planned_recipes
from worlds import HERE, run, train

pytestmark = pytest.mark.covers(
    "oneloop.launch.command",
    "oneloop.recipe.schema",
    "oneloop.tasks.language.models",
    "oneloop.tools.plan.changes",
    "oneloop.tools.plan.asked",
    "oneloop.tools.plan.command",
    "oneloop.tools.plan.description",
    "oneloop.tools.plan.fake_mode",
    "oneloop.tools.plan.gpus",
    "oneloop.tools.plan.ledger",
    "oneloop.tools.plan.plan",
    "oneloop.tools.plan.planned",
    "oneloop.tools.plan.step_costs",
)

BLOCKS = (f"{HERE / 'planning.py'}:Blocks", "--batch.size", "32")
GIB = 2.0**30


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import once what each plan of a language model needs: its process is a fork of this one."""
    import_module("transformers.models.gpt2.modeling_gpt2")
    import_module("transformers.models.llama.modeling_llama")
    read(["gpt"])  # the parser of the keys is kept


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, list[str]]:
    made = planned_recipes(a_base(tmp_path_factory.mktemp("base")))
    return {**made, "gpt": [*made["gpt"], "--task.layers", "2"]}


def both(words: list[str], config: str, *options: str) -> tuple[dict, dict]:
    """Return what a step takes: as planned, and as measured on real tensors."""
    ranks = LAYOUTS[config]
    real = run(one_step, words, ranks=ranks, config=config, options=options).ok()[0]
    return run(one_step, words, ranks, config=config, options=options).ok()[0], real


def recomputing(recipe: str, mode: str) -> list[str]:
    return [] if mode == "none" else ["--machine.recompute", mode]


GRID = [
    (recipe, config, mode)
    for recipe in ("digits", "gpt", "llama", "lora", "packed")
    for config in LAYOUTS
    for mode in ("none", "full", "selective", "every:2")
    if recipe != "digits" or mode == "none"  # its convolutions have no repeated blocks
]
QUICK = [("gpt", "fsdp2", "none")]


def traced(real: dict) -> Counter[tuple[str, int]]:
    """Return the calls in the trace of a real step, by name and bytes."""
    sizes = [(name, 4 * math.prod(shapes[0])) for name, shapes in real["called"]]
    return Counter((name, 2 * size if name.endswith("gather") else size) for name, size in sizes)


GOLDEN = {
    "ddp": {("gloo:all_reduce", 138_880): 1},
    "fsdp2": {
        ("gloo:all_gather", 37_376): 2,
        ("gloo:all_gather", 50_816): 8,
        ("gloo:all_reduce", 4): 1,
        ("gloo:all_reduce", 37_376): 1,
        ("gloo:all_reduce", 50_816): 2,
    },
}
"""of two real ranks that train gpt, from the profiler's trace, which is independent of the ledger;
bytes of the whole tensor. gloo reduces by all-reduces only"""


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[] if cell in QUICK else pytest.mark.slow, id="-".join(cell))
        for cell in GRID
    ],
)
def test_a_planned_step_is_the_real_one(recipes, cell):
    recipe, config, mode = cell
    plan, real = both([*recipes[recipe], *recomputing(recipe, mode)], config)
    copies = [  # gloo copies the result of a reduce-scatter
        number
        for number, operator in enumerate(real["operators"])
        if operator == "aten.copy_.default"
        and real["operators"][number - 1] == "c10d._reduce_scatter_base_.default"
    ]
    assert plan["operators"] == [
        op for number, op in enumerate(real["operators"]) if number not in copies
    ]
    assert plan["collectives"] == real["collectives"] and plan["operations"] == real["operations"]
    for name in ("peak", "evaluation"):
        assert plan[name] == pytest.approx(real[name], rel=0.05)
    assert plan["kept"]["parameters"] == real["kept"]["parameters"]
    if recipe == "gpt" and config in GOLDEN:
        assert traced(real) == GOLDEN[config]
        names = {
            "all-gather": "gloo:all_gather",
            "reduce-scatter": "gloo:all_reduce",
            "all-reduce": "gloo:all_reduce",
        }
        assert {
            (names[name], size): number for name, size, _, number in plan["collectives"]
        } == GOLDEN[config]
    if mode in ("full", "every:2"):
        assert plan["operations"]["recompute"] > 0
    else:
        assert "recompute" not in plan["operations"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_muons_share_of_a_process_is_planned(config):
    words = [*LLAMA[:-2], "--optimizer.name", "muon"]
    plan, real = both(words, config)
    assert plan["collectives"] == real["collectives"] and plan["operations"] == real["operations"]
    assert plan["peak"] == pytest.approx(real["peak"], rel=0.05)
    sent = [name for name, *_ in real["collectives"]]
    assert ("broadcast" if config == "ddp" else "all-to-all") in sent


def test_one_more_layer_adds_what_the_formulas_say():
    width, block, samples = 32, 32, 8
    words = (*LLAMA, "--batch.micro", str(samples))
    one, two = planned(
        [Asked((*words, "--task.layers", str(layers)), "single", 1) for layers in (1, 2)]
    )
    mlp = 96  # 8/3 x width, rounded up to a multiple of 32
    assert not one.sharded
    assert not one.collectives
    parameters = 4 * width**2 + 3 * width * mlp + 2 * width
    assert two.parameters - one.parameters == parameters
    kept = {kind: two.memory.kept[kind] - one.memory.kept[kind] for kind in ("parameters", "EMA")}
    assert kept == {"parameters": 4 * parameters, "EMA": 4 * parameters}
    counters = 9 * 4  # AdamW's step of each tensor
    assert two.memory.kept["optimizer"] - one.memory.kept["optimizer"] == 8 * parameters + counters
    tokens, matrices = samples * block, parameters - 2 * width
    # queries x keys and weights x values, not halved for causality
    attention = samples * 4 * block**2 * width
    forward = {name: two.flops[name] - one.flops[name] for name in ("forward", "backward")}
    assert forward["forward"] == 2 * matrices * tokens + attention
    # with the recomputed attention matrix
    assert forward["backward"] == 4 * matrices * tokens + 2.5 * attention
    assert two.disk["checkpoint"] - one.disk["checkpoint"] == pytest.approx(
        16 * parameters, rel=0.01
    )


def sent(plan: Plan, name: str) -> int:
    """Return the bytes of all calls of a collective."""
    return sum(
        call.size * call.calls for call in plan.collectives if call.name == name and call.size > 8
    )


def test_bytes_of_each_layout(tmp_path):
    """The closed forms: FSDP2 with and without resharding, with a reduce-scatter per micro-batch,
    HSDP and DDP."""
    whole = tmp_path / "whole.yaml"
    text = config_files()["fsdp2"].read_text()
    whole.write_text(
        text.replace("fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: false")
    )
    # micro-batches on two processes
    words, times = (*BLOCKS, "--batch.micro", "4"), 4
    each = ("--machine.sync_each_batch", "true")
    ema = ("--ema.half_life", "5ep")
    asked = [
        Asked((*words, *ema), "fsdp2", 2),
        Asked(words, str(whole), 2),
        Asked((*words, *each), "fsdp2", 2),
    ]
    asked += [
        Asked((*words, *ema, "--batch.size", "64"), "hsdp", 4),
        Asked((*words, *ema), "ddp", 2),
    ]
    sharded, kept, synced, hybrid, replicated = planned(asked)
    replica = 4 * sharded.parameters
    number = replica + 4 * (64 + 1)  # FSDP2 pads the one row of the last layer to two
    root = 4 * 2 * (64 + 1)  # that layer, which stays gathered
    assert sent(sharded, "all-gather") == times * (2 * (number - root) + root)
    assert sent(kept, "all-gather") == times * number
    assert sent(sharded, "reduce-scatter") == sent(kept, "reduce-scatter") == number
    assert sent(synced, "reduce-scatter") == times * number
    assert (
        sent(hybrid, "all-gather") == sent(sharded, "all-gather")
        and sent(hybrid, "reduce-scatter") == number
    )
    assert sent(hybrid, "all-reduce") == number / 2
    assert sent(replicated, "all-reduce") == replica and not sent(replicated, "all-gather")
    for plan, share in ((sharded, 2), (hybrid, 2), (replicated, 1)):
        assert plan.processes == (4 if plan is hybrid else 2)
        assert plan.sharded is (plan is not replicated)
        assert plan.memory.step.peak > 0
        held, size = plan.memory.kept, replica if plan is replicated else number / share
        assert held["parameters"] == held["EMA"] == size
        assert held["optimizer"] == pytest.approx(2 * size, rel=0.01)


def test_the_first_change_that_fits_is_printed(capsys):
    words = [*BLOCKS, "--task.width", "512", "--batch.size", "4", "--batch.micro", "2"]
    words += ["--ema.half_life", "5ep"]
    asked = Asked(tuple(words), "single", 1)
    plan = planned([asked])[0]
    singles = [
        [f"--{key}", value] for change in possible_changes(plan) for key, value in change.items()
    ]
    changed = [dataclasses.replace(asked, training=(*words, *more)) for more in singles]
    totals = [again.memory.total for again in planned(changed)]

    def change_for(total: int) -> Any:
        assert plan.memory.total > total
        assert main(["plan", *words, "--gpu", repr(total / GIB), "--json"]) == 1
        return json.loads(capsys.readouterr().out)["change"]

    # One change fits: the first one in their order.
    change = change_for(min(totals))
    first = next(index for index, total in enumerate(totals) if total <= min(totals))
    assert (change["words"], change["total"]) == (singles[first], totals[first])
    assert main([*shlex.split(change["command"])[1:]]) == 0
    assert capsys.readouterr().out.startswith("fits: ")

    # None of them fits alone.
    change = change_for(min(totals) - 1)
    assert len(change["words"]) >= 4 and change["total"] < min(totals)


@pytest.mark.slow
def test_the_fused_loss_has_three_products_of_the_output_layer():
    words = (*LLAMA, "--task.layers", "1")
    plain, fused = planned(
        [Asked((*words, "--task.fused_loss", value), "single", 1) for value in ("false", "true")]
    )
    # its gradient is computed in the forward, in place
    assert fused.flops["total"] == plain.flops["total"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_half_precision(config):
    plan, real = both(LLAMA, config, "--mixed_precision", "bf16")
    for name in ("peak", "evaluation"):
        assert plan[name] == pytest.approx(real[name], rel=0.05)
    assert plan["collectives"] == real["collectives"] and plan["operations"] == real["operations"]


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_a_block_is_recomputed_with_the_autocast_of_cuda(mode):
    """GPT-2's GELU has a power, which is computed in float32 on CUDA and in bfloat16 on a CPU."""
    words = (*GPT, "--task.layers", "2", "--batch.micro", "8", *recomputing("gpt", mode))
    (plan,) = planned([Asked(words, "single", 1, mixed_precision="bf16")])
    assert isinstance(plan, Plan), plan
    assert ("recompute" in plan.flops) == (mode == "full")


def test_it_says_what_fits(capsys):
    assert main(["plan", *BLOCKS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("fits on b200, ")
        and lines[1].startswith("limited by ")
        and "no change" in lines[2]
    )
    assert main(["plan", *BLOCKS, "--gpu", "0.1", "--no_changes"]) == 1
    assert capsys.readouterr().out.startswith("does not fit: ")


WRONG = [
    ([], "takes a recipe first"),
    (["--processes", "2"], "takes a recipe first"),
    (["gpt", "--gpu", "h1000"], "--gpu h1000 is unknown"),
    (["gpt", "--gpu", "-3"], "--gpu -3 is unknown"),
    (["gpt", "--processes", "0"], "must be a positive integer"),
    (["gpt", "--processes", "6", "--nodes", "4"], "cannot be divided among 4 nodes"),
    (["gpt", "--mixed_precision", "int8"], "int8"),
    (["gpt", "--config_file", "fsdp3"], "fsdp3"),
    (["gpt", "--config_file", "fsdp2", "--processes", "1"], "FSDP2 needs two processes"),
    (["gpt", "--config_file", "single", "--processes", "2"], "is for one process"),
    (["gpt", "--processes", "7"], "cannot be split over 7 ranks"),
    (["gpt", "--task.widthh", "32"], "widthh"),
    (["no-such-recipe"], "no-such-recipe"),
    (["gpt", "--config_file", "hsdp", "--processes", "16"], "16"),
]


@pytest.mark.parametrize(("words", "text"), WRONG)
def test_wrong_input_is_rejected(words, text, capsys):
    assert main(["plan", *words]) == 2
    output = capsys.readouterr()
    assert text in output.err and not output.out and len(output.err.splitlines()) == 1


READS = """
import torch
from torch import nn
class Task:
    def model(self):
        return nn.Linear(4, 2)
    def train_set(self):
        return [torch.ones(4)] * 8
    def eval_sets(self):
        return {}
    def collate(self, samples):
        return {"x": torch.stack(samples)}
    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))
    def loss(self, model, batch):
        found = model(batch["x"])
        return (found.sum() if found.max() > 0 else -found.sum()), {}
"""


def test_a_task_that_reads_a_value_is_rejected(tmp_path, capsys):
    (tmp_path / "reads.py").write_text(READS)
    assert main(["plan", f"{tmp_path / 'reads.py'}:Task", "--batch.size", "4"]) == 2
    assert "reads.py:17" in capsys.readouterr().err


ODD = f"{HERE / 'planning.py'}:Odd"


@pytest.mark.parametrize(
    ("does", "text"),
    [("exit", "SystemExit: 5"), ("killed", "was killed"), ("lines", "one line and another")],
)
def test_a_task_that_ends_the_process_is_rejected(does, text, capsys):
    assert main(["plan", ODD, "--task.does", does, "--batch.size", "8"]) == 2
    output = capsys.readouterr()
    assert text in output.err and len(output.err.splitlines()) == 1 and not output.out


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("lstm", "what the kernels of lstm allocate"),
        ("operator", "what the kernels of planning::same allocate"),
        ("reads", "the evaluation, whose loss or metrics read values"),
    ],
)
def test_a_plan_that_cannot_count_everything_says_so_first(does, why, capsys):
    words = [ODD, "--task.does", does, "--batch.size", "8"]
    assert main(["plan", *words]) == 3
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("may fit on b200, ") and first.endswith(f"not counted exactly: {why}")
    if does == "lstm":  # what was counted is already too much
        assert main(["plan", *words, "--gpu", "0.1", "--no_changes", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["fits"] is False


def test_many_samples_of_one_size_leave_no_doubt(capsys):
    assert main(["plan", ODD, "--task.does", "many", "--batch.size", "8"]) == 0
    assert capsys.readouterr().out.startswith("fits on ")


def test_an_upper_bound_that_does_not_fit_may_fit(capsys):
    words = ["plan", *BLOCKS, "--machine.offload", "true", "--gpu", "0.1", "--no_changes"]
    assert main([*words, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is None and "upper bound" in found["not_counted"]["less"][0]
    assert main([*words[:-2], "4"]) == 0
    assert capsys.readouterr().out.startswith("fits: ")


def test_tied_parameters_that_fsdp2_separates_are_named_in_plan_and_run(tmp_path, capsys):
    words = [f"{HERE / 'planning.py'}:Tied", "--task.what", "module", "--batch.size", "8"]
    assert main(["plan", *words, "--config_file", "fsdp2", "--processes", "2"]) == 2
    error = capsys.readouterr().err
    names = "0.up.weight and 1.up.weight"
    assert f"cannot shard the model: {names} are one parameter" in error
    ended = run(train, words, ranks=2, config="fsdp2", folder=tmp_path)
    assert ended.codes == [2, 2] and error in ended.output


def test_a_bias_of_the_model_and_its_output_layer_is_in_the_unit_of_the_root(tmp_path):
    words = [f"{HERE / 'planning.py'}:Tied", "--task.what", "bias", "--batch.size", "8"]
    words += ["--duration", "5", "--track", "none", "--optimizer.name", "sgd"]
    words += ["--eval.every", "0", "--save.every", "0"]
    assert main(["plan", *words, "--config_file", "fsdp2", "--processes", "2"]) == 0
    for config, ranks in (("single", 1), ("fsdp2", 2)):
        more = ["--run.dir", config]
        run(train, [*words, *more], ranks=ranks, config=config, folder=tmp_path).ok()
    one, two = (
        load_file(tmp_path / name / "final/model.safetensors") for name in ("single", "fsdp2")
    )
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=1e-6, atol=1e-7), name


class Nested(torch.autograd.Function):
    """A backward inside a backward, as often as ``depth``: autograd then starts threads."""

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                nested = Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1)
                nested.sum().backward()
        return gradient, None


def _planned_after_threads() -> Plan:
    Nested.apply(torch.ones(1, requires_grad=True), 100).sum().backward()
    (plan,) = planned([Asked(("digits",), str(config_files()["single"]), 1)])
    return plan


def test_a_process_whose_autograd_has_threads_can_plan():
    """A notebook that has trained on a GPU: torch rejects a backward in a fork of it."""
    (plan,) = run(_planned_after_threads).ok()
    assert isinstance(plan, Plan), plan


def test_odd_tasks_and_environments(capfd, monkeypatch):
    # of another launcher: accelerate would wait for other ranks
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["plan", ODD, "--task.does", "pop", "--batch.size", "8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["fits"]  # nothing of what the task prints


def changes(*words: str) -> set[str]:
    """Return the keys of all changes of a run."""
    return {
        key
        for change in possible_changes(planned([Asked(words, "single", 1)])[0])
        for key in change
    }


def test_changes_that_would_change_the_result_are_not_tried():
    assert changes(*BLOCKS, "--batch.size", "8") == {"batch.micro", "machine.recompute"}
    assert "batch.micro" not in changes(ODD, "--task.does", "norm", "--batch.size", "8")
    assert changes(*BLOCKS, "--batch.grain", "16") == {"machine.recompute"}


@pytest.mark.slow
def test_a_change_that_cannot_be_planned_is_passed_over(capsys):
    """FSDP2 cannot shard a module of two blocks; no combination has it."""
    words = (f"{HERE / 'planning.py'}:Tied", "--task.what", "module", "--batch.grain", "32")
    asked = Asked(words, "ddp", 2)
    (plan,) = planned([asked])
    assert {"config_file": "fsdp2"} in possible_changes(plan)
    assert "FSDP2 cannot shard" in planned([dataclasses.replace(asked, config_file="fsdp2")])[0]
    room = repr(plan.memory.total / GIB - 1e-3)
    layout = ["--config_file", "ddp", "--processes", "2"]
    assert main(["plan", *words, *layout, "--gpu", room]) == 1
    assert "no change makes it fit, alone or together" in capsys.readouterr().out


COUNTED = {
    "workers": "3",
    "dtype": "float64",
    "recompute": "full",
    "blocks": "Linear",
}
"""keys of machine.* that change a number of the plan, with a value that does"""
OF_FSDP2 = {"sync_each_batch": "true"}
"""those that do so on several processes only, under FSDP2"""
BOUNDS = {"compile": "regional", "offload": "true", "recompute": "budget:0.5"}
"""those that are replaced, with a line about it"""
ONE_LAYOUT = {"base_dtype", "channels_last", "find_unused_parameters"}
"""those of frozen weights, convolutions and routers, which the model of this test does not have"""


def of_machine(keys: dict[str, str]) -> list[str]:
    words = []
    for key, value in keys.items():
        words += [f"--machine.{key}", value]
    return words


def test_every_machine_key_is_planned_or_listed():
    # The plan without a key, with each one, and with all that are replaced.
    several = [{}, *({key: value} for key, value in COUNTED.items()), BOUNDS]
    plain, *plans, bounds = planned(
        [Asked((*BLOCKS, *of_machine(keys)), "single", 1) for keys in several]
    )
    for key, plan in zip(COUNTED, plans, strict=True):
        assert type(plan) is type(plain) and plan != plain, key
    for key in BOUNDS:
        lines = [line for line in bounds.not_counted.less if line.startswith(f"machine.{key} ")]
        assert lines and "upper bound" in lines[0], key

    # The same on two processes, whose step has two micro-batches.
    words = (*BLOCKS, "--batch.micro", "8")
    several = [{}, *({key: value} for key, value in OF_FSDP2.items())]
    sharded, *plans = planned([Asked((*words, *of_machine(keys)), "fsdp2", 2) for keys in several])
    for key, plan in zip(OF_FSDP2, plans, strict=True):
        assert type(plan) is type(sharded) and plan != sharded, key
    listed = set(" ".join(plain.not_counted.other).split("machine.")[1].replace(",", "").split())
    names = {field.name for field in dataclasses.fields(MachineConfig)}
    others = COUNTED.keys() | OF_FSDP2.keys() | BOUNDS.keys() | ONE_LAYOUT
    assert names == (listed & names) | others
    assert not listed & others


@pytest.mark.slow
def test_keys_of_other_models(recipes):
    """machine.base_dtype holds the frozen weights of LoRA in 16 bits; channels_last permutes
    strides, not sizes."""
    asked = [
        Asked((*recipes["lora"], *more), "single", 1, mixed_precision="bf16") for more in ([], BASE)
    ]
    wide, narrow = (plan.memory.kept["parameters"] for plan in planned(asked))
    assert narrow < 0.6 * wide
    images = [
        Asked(("digits", "--machine.channels_last", value), "single", 1)
        for value in ("true", "false")
    ]
    one, other = (plan.memory.kept for plan in planned(images))
    assert one == other


BASE = ["--machine.base_dtype", "bfloat16"]


IN_OTHER_TESTS = {"single", "ddp", "fsdp2", "hsdp"}
"""config files of the plans of test_one_more_layer_adds_what_the_formulas_say and
test_bytes_of_each_layout"""


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(IN_OTHER_TESTS, id="others"),
        pytest.param(set(), id="all", marks=pytest.mark.slow),
    ],
)
def test_every_config_file_is_planned(left_out):
    processes = {"single": 1, "hsdp": 4, "multi_node": 16}
    ranks = {name: processes.get(name, 2) for name in config_files() if name not in left_out}
    assert ranks
    asked = [
        Asked(BLOCKS, name, number, nodes=2 if number == 16 else 1)
        for name, number in ranks.items()
    ]
    for one, plan in zip(asked, planned(asked), strict=True):
        assert plan.memory.step.peak > 0 and plan.processes == one.processes
        assert plan.sharded is (one.config_file in ("fsdp2", "hsdp"))
        assert bool(plan.collectives) is (one.processes > 1)


@pytest.mark.parametrize(
    ("name", "number"),
    [("gpt2", 124_439_808), ("llama-1b", 1_235_814_400), ("llama-7b", 6_738_415_616)],
)
def test_the_large_recipes_have_their_shapes(name, number):
    options = read([name]).task.options
    names = {field.name for field in dataclasses.fields(Shape)}
    known = {key: value for key, value in options.items() if key in names}
    with torch.device("meta"):
        shape = Shape(**known, length=options["block"])
        model = AutoModelForCausalLM.from_config(scratch_config(shape, entries=16_384, end=0))
    assert sum(parameter.numel() for parameter in model.parameters()) == number


@pytest.mark.slow
@pytest.mark.parametrize("processes", [8, 64, 1024])
def test_a_llama_of_seven_billion_parameters(processes):
    words = ("llama-7b", "--ema.half_life", "10%", "--batch.size", "1024")
    plan = planned(
        [Asked(words, "fsdp2", processes, nodes=max(1, processes // 8), mixed_precision="bf16")]
    )[0]
    number, root = 6_738_415_616, 32_000 * 4_096 + 4_096
    assert plan.parameters == number
    held, padding = plan.memory.kept, 0.02 if processes == 1024 else 1e-6
    assert held["parameters"] == held["EMA"] == pytest.approx(4 * number / processes, rel=padding)
    assert held["optimizer"] == pytest.approx(8 * number / processes, rel=padding + 1e-6)
    times = plan.accumulate
    assert sent(plan, "all-gather") == pytest.approx(
        times * (4 * (number - root) + 2 * root), rel=padding
    )
    assert sent(plan, "reduce-scatter") == pytest.approx(4 * number, rel=padding)
