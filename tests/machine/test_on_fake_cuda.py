"""What a GPU would run, on fake CUDA tensors: nothing waits, and attention is the expected one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import LlamaConfig, LlamaForCausalLM

from fake_cases import OTHERS, RECIPES, prepared
from fake_cuda import CUDA, Attention, Seen, fake_cuda, fake_run, on_cuda
from fake_steps import FakeSteps, Prepared
from oneloop.basics.tensors import Planned
from oneloop.data.step_batches import to_device
from oneloop.machine.recompute import _keeps
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.bad_step_policy import Fault
from oneloop.tasks.language.attention import attend_within_documents
from oneloop.tasks.language.chunked_loss import tokens_of_a_chunk
from oneloop.tasks.language.generation import written
from oneloop.tasks.retrieval_metrics import Retrieval
from worlds import ROOT

pytestmark = pytest.mark.covers(
    "oneloop.basics.tensors",
    "oneloop.data.step_batches",
    "oneloop.machine.recompute",
    "oneloop.machine.torch_settings",
    "oneloop.optim.bad_step_guard",
    "oneloop.optim.bad_step_policy",
    "oneloop.task_protocol.evaluation_metrics",
    "oneloop.tasks.language.chunked_loss",
    "oneloop.tasks.language.generation",
    "oneloop.tasks.unread_masks",
)

PRECISIONS = ("no", "bf16", "fp16")

# cases that run without -m slow: each kind of attention, whole-batch losses, each precision
QUICK = {
    ("digits", "no"),
    ("llama", "bf16"),
    ("gpt packed", "fp16"),
    ("docstrings", "bf16"),
    ("bert classifier", "bf16"),
    ("bart", "bf16"),
    ("window", "fp16"),
    ("grain", "bf16"),
    ("bf16 parameters", "no"),
}

PACKED = (
    "llama",
    "sft",
    "preference",
    "distil",
    "gpt packed",
    "sft packed",
    "lora packed",
    "recompute",
)
PADDED = (
    "snippets",
    "docstrings",
    "bert",
    "bert packed",
    "bert classifier",
)  # attention in both directions, with a mask for the padding
BIASED = ("numbers", "bart")  # attention to the source; T5 adds biases of relative positions
WHOLE_BATCH = ("docstrings", "clip", "siglip", "supcon")
NO_ATTENTION = ("digits", "images", "bf16 parameters", "clip", "siglip", "supcon")

FLOAT64_OF_STEPS = {
    "unscale": "torch's GradScaler inverts the loss scale, a number",
    "_spike": "the window of losses and norms is compared over hundreds of steps",
    "measure/meter.py": "named metrics are summed over the steps of a log line",
    "basics/exact_sums.py": "batch.grain sums without rounding",
    "optim/adamw.py": "batch.grain computes the bias corrections as torch does on the host",
}
"""float64 on the device that is asked for in a training step, by a part of its line, and why"""

FLOAT64_OF_EVALUATIONS = {
    "basics/wide_sums.py": "losses and metrics are summed over the whole set",
    "tasks/light_metrics.py": "so are the metrics of the packaged tasks",
    "tasks/retrieval_metrics.py": "so are those of retrieval",
    "tasks/language/token_targets.py": "losses of tokens are summed",
    "tasks/sft.py": "losses of tokens are summed",
    "tasks/reward.py": "squares of rewards are summed",
}
"""the same in an evaluation"""


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Callable[[str], Prepared]:
    """Prepare a case by its name; no two tests read the data of one."""
    return prepared(tmp_path_factory.mktemp("cases"))


def cases() -> list:
    found = []
    for name in (*RECIPES, *OTHERS):
        for precision in PRECISIONS:
            if name == "bf16 parameters" and precision == "fp16":
                continue  # rejected: fp16 loss scaling needs float32 parameters
            marks = () if (name, precision) in QUICK else (pytest.mark.slow,)
            found.append(pytest.param(name, precision, marks=marks, id=f"{name}-{precision}"))
    return found


def not_asked_for(doubles: list[str], reasons: dict[str, str]) -> list[str]:
    return [line for line in doubles if not any(part in line for part in reasons)]


def test_the_recorder_sees_reads_copies_float64_and_attention():
    with fake_cuda() as seen:
        values = torch.ones(1, 2, 8, 16, device=CUDA)
        cuts = torch.zeros(3, dtype=torch.int32, device=CUDA)
        assert not seen.copies

        assert float(values.sum()) == 0.0
        assert not bool((values > 0).any())
        assert [text.split(":")[0] for text in seen.reads] == [
            "aten._local_scalar_dense.default"
        ] * 2
        with pytest.raises(Exception, match="nonzero"):
            values[values > 0]
        assert len(seen.reads) == 3

        values.cpu()
        torch.tensor(1.0, device=CUDA)
        values[torch.tensor([0])]
        assert len(seen.copies) == 3
        values * 2.0 + torch.tensor(1.0)
        assert len(seen.copies) == 3

        assert not seen.doubles
        values.double().view(-1)
        assert len(seen.doubles) == 1

        F.scaled_dot_product_attention(values, values, values, is_causal=True)
        F.scaled_dot_product_attention(values, values, values, values.new_ones(8, 8))
        rows = values[0].transpose(0, 1).bfloat16()
        varlen_attn(rows, rows, rows, cuts, cuts, 4, 4)
        assert [(one.name, one.mask, one.causal) for one in seen.attention] == [
            ("scaled_dot_product_attention", None, True),
            ("scaled_dot_product_attention", (8, 8), False),
            ("torch_attn::_varlen_attn", None, True),
        ]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("no", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_precision_of_a_run_on_fake_cuda_is_that_of_accelerate(precision, dtype):
    with fake_cuda() as seen, fake_run(precision) as run:
        model = run.prepare(on_cuda(nn.Linear(4, 4)))
        run.accelerator.backward(model(torch.ones(2, 4, device=CUDA)).sum())
        assert run.device == CUDA
        assert (run.accelerator.scaler is not None) == (precision == "fp16")
        assert model.weight.grad.dtype == torch.float32 and model.weight.grad.is_cuda
    products = [one for one in seen.operators if one.name == "aten.addmm.default"]
    assert [one.dtypes[0] for one in products] == [dtype]
    assert not seen.reads and not seen.copies


def test_each_packaged_recipe_is_a_case():
    assert {path.stem for path in (ROOT / "src/oneloop/tasks/recipes").glob("*.yaml")} == set(
        RECIPES
    )


def check_attention(name: str, precision: str, calls: list[Attention]) -> None:
    """Check that packed rows use the kernel for variable lengths in 16 bit, and others no mask."""
    assert bool(calls) == (name not in NO_ATTENTION)
    for call in calls:
        if name in BIASED:
            assert call.mask is not None or call.causal
        elif name in PADDED:
            rows, one, queries, keys = call.mask
            assert one == 1 and queries == keys
        elif name not in PACKED:
            assert (call.name, call.mask) == ("scaled_dot_product_attention", None) and call.causal
        elif precision == "no":
            assert call.name == "scaled_dot_product_attention" and call.mask is not None
        else:
            assert call.name == "torch_attn::_varlen_attn"


@pytest.mark.parametrize(("name", "precision"), cases())
def test_a_step_waits_for_nothing_and_copies_nothing(case, name, precision):
    made = case(name)
    job = made.fresh()
    with fake_cuda() as seen, fake_run(precision) as run:
        steps = FakeSteps(made, job, run, seen)
        for number in (0, 1):
            fault = steps.step(number)
            assert fault is (Fault.NONE if number else None)

            # A loss over the whole batch looks once, in the first step, at what embed returns.
            if number or name not in WHOLE_BATCH:
                assert seen.reads == []
            assert seen.copies == []
            assert not_asked_for(seen.doubles, FLOAT64_OF_STEPS) == []
            assert sum("bad_step_guard" in flag for flag in seen.flags) == 1
            check_attention(name, precision, seen.attention)
            check_kernels(seen)
        check_updated(steps)


@pytest.mark.parametrize(("name", "precision"), cases())
def test_an_evaluation_waits_for_nothing_and_copies_nothing(case, name, precision):
    made = case(name)
    job = made.fresh()
    with fake_cuda() as seen, fake_run(precision) as run:
        FakeSteps(made, job, run, seen).evaluation()
        assert seen.reads == []
        assert seen.copies == []
        assert not_asked_for(seen.doubles, FLOAT64_OF_EVALUATIONS) == []
        check_attention(name, precision, seen.attention)
        check_kernels(seen)


def check_updated(steps: FakeSteps) -> None:
    """Check that optimizer and EMA hold a state in the dtype of the weights, or in float32."""
    weights = [one for one in steps.model.parameters() if one.requires_grad]
    assert {weight.device for weight in weights} == {CUDA}
    for weight in weights:
        state = steps.optimizer.state[weight].values()
        assert {one.dtype for one in state if one.ndim} <= {weight.dtype}
    for ema in steps.emas:
        assert {one.dtype for one in ema.tensors().values()} == {torch.float32}


# operators without a deterministic kernel on CUDA, forwards or backwards: torch's documentation of
# use_deterministic_algorithms lists their functions as those that raise
NO_DETERMINISTIC_KERNEL = re.compile(
    r"aten\.(avg_pool3d|_adaptive_avg_pool[23]d|adaptive_max_pool[23]d|fractional_max_pool[23]d"
    r"|max_unpool[23]d|_?upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)(_aa)?"
    r"|reflection_pad[123]d|nll_loss2d_forward|_ctc_loss|put_?|histc|bincount|(nan)?median"
    r"|grid_sampler_[23]d|scatter_reduce_?|kthvalue|index_reduce_?)\."
)


def check_kernels(seen: Seen) -> None:
    """Check that each operator has a deterministic kernel on CUDA."""
    found = {one.name for one in seen.operators if NO_DETERMINISTIC_KERNEL.match(one.name)}
    assert found == set()


@pytest.mark.parametrize(
    "function",
    [
        lambda images: F.interpolate(images, scale_factor=2, mode="bilinear"),
        lambda images: F.interpolate(images, scale_factor=2, mode="bicubic", antialias=True),
        lambda images: F.adaptive_avg_pool2d(images, 2),
        lambda images: F.pad(images, (1, 1, 1, 1), mode="reflect"),
        lambda images: F.grid_sample(images, images.new_zeros(2, 4, 4, 2)),
        lambda images: F.cross_entropy(images, images[:, 0].long()),
        lambda images: images.median(1),
    ],
)
def test_the_list_of_kernels_knows_functions_that_are_not_deterministic(function):
    with fake_cuda() as seen:
        function(torch.ones(2, 3, 9, 9, device=CUDA))
        with pytest.raises(AssertionError):
            check_kernels(seen)


def test_pooling_to_one_value_has_a_deterministic_kernel():
    with fake_cuda() as seen:
        F.adaptive_avg_pool2d(torch.ones(2, 3, 9, 9, device=CUDA), 1)
    check_kernels(seen)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def test_grouped_retrieval_has_deterministic_kernels():
    ids = [torch.tensor([3, 1, 3, 2]), torch.tensor([5, 5, 4, 5])]
    with _Names() as names:
        Retrieval(group=True).update(torch.eye(4), torch.eye(4), ids=ids)
    assert "aten._unique2.default" in names.found
    assert not [name for name in names.found if NO_DETERMINISTIC_KERNEL.match(name)]


@pytest.mark.parametrize("fused", [True, False])
def test_fp16_reads_only_for_an_optimizer_that_does_not_take_the_flag(fused):
    with fake_cuda() as seen, fake_run("fp16") as run:
        model = run.prepare(on_cuda(nn.Linear(4, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = run.accelerator.scaler
        guard = Guard(optimizer, device=CUDA, scaler=scaler, sigma=6.0)
        run.accelerator.backward(model(torch.ones(2, 4, device=CUDA)).sum())
        guard.unscale()
        seen.clear()
        guard.step(torch.ones((), device=CUDA), loss=torch.ones((), device=CUDA))
        assert len(seen.reads) == (0 if fused else 1)
        assert guard.resolve().fault is Fault.NONE and len(seen.flags) == fused


def test_packed_rows_in_float32_compute_their_mask_once_per_forward(case):
    made = case("llama")
    job = made.fresh()
    with fake_cuda() as seen, fake_run() as run:
        FakeSteps(made, job, run, seen).step(0)
        assert len(seen.attention) == 4  # two micro-batches through two layers
        masks = [one for one in seen.operators if one.name.startswith("aten.searchsorted")]
        assert len(masks) == 2


def test_generation_looks_only_after_several_tokens():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, **sizes)).eval()
    attend_within_documents(model)
    with fake_cuda() as seen, torch.no_grad():
        on_cuda(model)
        prompts = [torch.ones(length, dtype=torch.int64, device=CUDA) for length in (3, 5)]
        tokens = written(model, prompts, 17, ends=[7])
    assert tokens.shape == (2, 17)
    assert [read.split(" ")[1].split(":")[0] for read in seen.reads] == [
        "tasks/language/generation.py"
    ]


def test_selective_recomputation_keeps_the_attention_of_packed_rows():
    assert _keeps(None, torch.ops.torch_attn._varlen_attn.default) is CheckpointPolicy.MUST_SAVE


def test_chunks_of_the_loss_fill_the_tiles_of_a_gpu():
    with fake_cuda():
        hidden = torch.empty(1, device=CUDA)
        assert tokens_of_a_chunk(hidden, 50_304, None) == 2_560  # 2^27 / 50,304 = 2,668
        assert tokens_of_a_chunk(hidden, 1_000_000, None) == 134
        assert tokens_of_a_chunk(hidden, 50_304, 1 << 20) == 20
    assert tokens_of_a_chunk(torch.empty(1), 50_304, None) == 333


def test_a_compiled_loss_has_larger_chunks(monkeypatch):
    def added(one):
        return one + tokens_of_a_chunk(one, 50_304, None)

    monkeypatch.setattr(Planned, "capability", (9, 0))
    assert int(added(torch.zeros(()))) == 2_560
    compiled = torch.compile(added, backend="eager", fullgraph=True)
    assert int(compiled(torch.zeros(()))) == 3_328  # 2^31 / (3 x 4 bytes x 50,304) = 3,557


MANY = ["--task.padded_vocab", "131072", "--task.block", "2048", "--task.layers", "1"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_loss_of_many_logits_is_fused_on_cuda_but_not_in_fp16(case, precision):
    words = [*case("gpt").words, *MANY, "--batch.size", "1", "--batch.micro", "1"]
    made = Prepared(words, steps=1)
    job = made.fresh()
    with fake_cuda() as seen, fake_run(precision) as run:
        model = run.prepare(on_cuda(job.model))
        (batch,) = [to_device(batch, CUDA) for batch in made.groups[0][0]]
        with torch.no_grad():
            job.task.loss(model, batch)
        logits = [one for one in seen.operators if one.name == "aten.argmax.default"]
        assert len(logits) == (1 if precision == "fp16" else 2)  # 1,024 tokens at once
