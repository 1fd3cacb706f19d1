"""Attention and the fused loss as on a GPU, whose kernels a plan or a compiler traces on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from adapters import a_base
from oneloop.basics.tensors import Planned
from oneloop.cli import main
from oneloop.tasks.language import attention
from oneloop.tasks.language.chunked_loss import chunked_cross_entropy
from oneloop.tasks.language.language_model import LanguageModel, ModelSettings
from oneloop.tools.plan.ledger import _hidden
from planning import GPT, LAYOUTS, SFT, few_chats, one_step
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.tensors",
    "oneloop.tasks.language.attention",
    "oneloop.tasks.language.chunked_loss",
    "oneloop.tasks.language.language_model",
    "oneloop.tools.plan.ledger",
    "oneloop.tools.plan.plan",
)

KERNEL = "torch_attn._varlen_attn.default"
BACKWARD = "torch_attn._varlen_attn_backward.default"
LAYERS = 2  # of each model below
AMPERE = (8, 0)
TURING = (7, 5)
MODELS = ("GPT2", "Llama", "Qwen3", "Gemma3")
QUICK = [("Llama", "single", "selective")]
CELLS = []
for model in MODELS:
    for layout in LAYOUTS:
        for mode in ("none", "selective"):
            marks = [] if (model, layout, mode) in QUICK else [pytest.mark.slow]
            CELLS.append(pytest.param(model, layout, mode, marks=marks))


@pytest.fixture
def on(monkeypatch):
    """Let tensors on the CPU stand for tensors on a GPU of a compute capability."""

    def stand_for(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(Planned, "capability", capability)

    return stand_for


class Operators(TorchDispatchMode):
    """Records the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def packed_words(folder, kind: str, ranks: int = 1) -> list[str]:
    """Return a recipe of packed chats, whose step has one micro-batch on each rank."""
    if kind == "GPT2":
        model = ["--task.architecture", "gpt2", "--task.layers", str(LAYERS)]
    else:
        model = ["--task.model", str(a_base(folder, kind=kind))]
    words = [*SFT, *few_chats(folder), *model, "--task.pack", "packed", "--batch.micro", "4"]
    return [*words, "--batch.size", str(4 * ranks)]


def planned_step(folder: Path, kind: str, layout: str, mode: str, capability) -> dict[str, Any]:
    """Return what a planned step in bfloat16 takes, for kernels of this compute capability."""
    ranks = LAYOUTS[layout]
    words = [*packed_words(folder, kind, ranks), "--machine.recompute", mode]
    options = ["--mixed_precision", "bf16"]
    return run(one_step, words, ranks, capability, config=layout, options=options).ok()[0]


def each_capability(words: list[str], ranks: int) -> list[dict[str, Any]]:
    """Plan the step on a GPU that has the kernel, and on one that lacks it."""
    return [one_step(words, ranks, capability) for capability in (AMPERE, TURING)]


@pytest.fixture(scope="module")
def quick_steps(tmp_path_factory) -> list[dict[str, Any]]:
    """Return what the quick cell takes with the kernel, and with masks. One process plans both."""
    ((kind, layout, mode),) = QUICK
    words = [*packed_words(tmp_path_factory.mktemp("quick"), kind), "--machine.recompute", mode]
    options = ["--mixed_precision", "bf16"]
    return run(each_capability, words, 1, config=layout, options=options).ok()[0]


@pytest.mark.parametrize(("kind", "layout", "mode"), CELLS)
def test_packed_rows_in_bf16_use_the_kernel_without_masks(request, tmp_path, kind, layout, mode):
    if (kind, layout, mode) in QUICK:
        step = request.getfixturevalue("quick_steps")[0]
    else:
        step = planned_step(tmp_path, kind, layout, mode, AMPERE)
    for operator in (KERNEL, BACKWARD):
        assert step["operators"].count(operator) == LAYERS
    assert not [name for name in step["operators"] if "tril" in name or "scaled_dot" in name]


def test_a_plan_counts_the_operations_and_buffers_of_the_kernel(quick_steps):
    """Operations are those of attention over whole rows, as with masks."""
    kernel_step, with_masks = quick_steps
    assert KERNEL not in with_masks["operators"]
    assert kernel_step["operations"] == with_masks["operations"]


def test_the_backward_of_the_kernel_allocates_more_than_its_results():
    cuts = torch.tensor([0, 3, 16, 16], dtype=torch.int32)
    rows = 16 + 128 * 3
    for heads, expected in ((4, 0), (2, 2 * 2 * 16 * 4 * 40)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            query = torch.empty(16, 4, 40, dtype=torch.bfloat16)
            key = torch.empty(16, heads, 40, dtype=torch.bfloat16)
            hidden = _hidden(query, query, key, key, query, query[..., 0], cuts, cuts)
        assert hidden == 4 * rows * 4 * (64 + 1) + expected


@pytest.mark.slow
def test_packed_rows_in_float32_use_masks(tmp_path):
    words = packed_words(tmp_path, "Llama")
    step = run(one_step, words, 1, AMPERE).ok()[0]
    assert KERNEL not in step["operators"]
    assert step["operators"].count("aten.tril.default") == 1  # of the micro-batch


def packed_inputs(rows: int = 2, length: int = 16) -> dict[str, Any]:
    """Return rows with two documents each, and the starts of all documents as the mask."""
    tokens = torch.arange(rows * length).view(rows, length) % 32
    documents = (torch.arange(length) >= length // 2).long().expand(rows, length)
    positions = (torch.arange(length) % (length // 2)).expand(rows, length)
    cuts = torch.arange(0, rows * length + 1, length // 2, dtype=torch.int32)
    mask = attention.borders(documents, cuts)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}


def small(kind: str = "Llama", **more: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32,
        **more,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    attention.attend_within_documents(model, packed=True)
    return model


def test_only_a_gpu_with_the_kernel_gets_the_starts_of_documents(on):
    assert packed_inputs()["attention_mask"].dtype is torch.uint8
    for capability, dtype in ((TURING, torch.uint8), (AMPERE, torch.int32), ((10, 0), torch.int32)):
        on(capability)
        assert packed_inputs()["attention_mask"].dtype is dtype


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"query": torch.bfloat16}, torch.bfloat16),
        ({"query": torch.float64}, None),
        ({"autocast": torch.float16}, torch.float16),
        ({"autocast": None}, None),
        ({"autocast": None, "query": torch.float16}, torch.float16),
        ({"width": 264}, None),
        ({"width": 208}, None),
        ({"width": 256, "value": 256}, torch.bfloat16),
        ({"width": 12}, None),
        ({"value": 32}, None),
    ],
)
def test_the_dtype_of_the_kernel_is_that_of_autocast(case, dtype):
    width = case.get("width", 64)
    query = torch.zeros(1, 2, 4, width, dtype=case.get("query", torch.float32))
    value = torch.zeros(1, 2, 4, case.get("value", width), dtype=torch.bfloat16)
    autocast = case.get("autocast", torch.bfloat16)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        assert attention._kernel_dtype(query, value) is dtype


def test_layers_that_cannot_use_the_kernel_share_one_mask(on):
    model = small(attention_dropout=0.1)
    expected = packed_inputs()
    on(AMPERE)
    given = packed_inputs()
    with Operators() as operators, torch.no_grad():
        found = model.eval()(**given, use_cache=False).logits
    assert operators.seen.count("aten.tril.default") == 1
    with torch.no_grad():
        assert torch.equal(found, model(**expected, use_cache=False).logits)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_compiled_blocks_call_the_kernel(on, kind):
    """The compiler traces the blocks; a stand-in for its backend returns results of their shapes,
    because the kernel has no form for a CPU."""
    model = small(kind)
    traced: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        traced.append(sum("varlen_attn" in name for name in names))
        assert not [name for name in names if "tril" in name or "scaled_dot" in name]
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        shapes = [node.meta["example_value"] for node in output.args[0]]
        return lambda *_: tuple(torch.zeros(one.shape, dtype=one.dtype) for one in shapes)

    on(AMPERE)
    torch._dynamo.reset()
    counters.clear()
    for block in model.model.layers:
        block.compile(backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        model(**packed_inputs(), use_cache=False)
    torch._dynamo.reset()
    assert traced and set(traced) == {1} and len(traced) <= 2


@pytest.mark.parametrize(("capability", "chunks"), [(None, 16), (AMPERE, 2)])
def test_the_fused_loss_has_larger_chunks_on_a_gpu(monkeypatch, capability, chunks):
    monkeypatch.setattr(Planned, "capability", capability)
    with FakeTensorMode():
        hidden = torch.empty(2048, 8)
        weight = torch.empty(1 << 17, 8)
        with Operators() as operators:
            chunked_cross_entropy(hidden, weight, torch.zeros(2048, dtype=torch.int64))
    assert operators.seen.count("aten.nll_loss_forward.default") == chunks


class Words(LanguageModel):
    entries = 1 << 17


def test_fused_loss_auto_stays_off_in_fp16(monkeypatch, on):
    task = Words(ModelSettings(), packed=False)
    task._can_fuse = True
    tokens = torch.zeros(2, 1024, dtype=torch.int64)
    on(AMPERE)
    for precision, uses in (("no", True), ("bf16", True), ("fp16", False)):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        assert task._uses_fused_loss(tokens, task.entries) is uses
    # A plan of fp16 has the rules of bf16, but for this one.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(Planned, "fp16", True)
    assert not task._uses_fused_loss(tokens, task.entries)


def test_a_plan_says_for_which_kernels_it_is(capsys):
    words = ["plan", *GPT, "--task.pack", "packed", "--task.layers", "1", "--batch.micro", "8"]
    words += ["--mixed_precision", "bf16", "--no_changes"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "l4" in lines[0] and "t4" not in lines[0] and "v100" not in lines[0]
    (line,) = (line for line in lines if line.startswith("kernels of a GPU"))
    assert "8.0 or higher; packed rows use variable-length attention" in line
    assert line.endswith("(not on v100-32 and t4: plan these with --gpu)")

    assert main([*words, "--gpu", "t4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["capability"] == list(TURING) and not answer["varlen"]
