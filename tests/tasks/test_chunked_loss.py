"""The loss without logits equals F.cross_entropy on all logits, with plain tensors and transformers
models."""

import contextlib
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logit_cases import (
    LLAMA,
    MODELS,
    ONE,
    RAGGED,
    SINGLE,
    VOCABULARY,
    WIDTH,
    capped,
    off,
    tensors,
    tiny,
)
from oneloop.tasks.language.chunked_loss import Losses, chunked_cross_entropy, without_logits

pytestmark = [
    pytest.mark.covers("oneloop.tasks.language.chunked_loss", "oneloop.tasks.probe"),
    pytest.mark.usefixtures("one_thread"),
]


def plain(hidden, weight, bias, target, change=None):
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if change is None else change(logits)
    each = F.cross_entropy(logits, target, reduction="none")
    return Losses(each.sum(), each.detach(), logits.argmax(-1) == target)


def gradients(losses, inputs):
    return torch.autograd.grad(losses.total * 0.37, inputs)


@pytest.mark.parametrize("entries", [ONE, RAGGED, SINGLE])
@pytest.mark.parametrize("change", [None, capped, lambda logits: logits * 0.0625])
@pytest.mark.parametrize("with_bias", [True, False])
def test_total_gradients_each_and_right_are_those_of_all_logits(entries, change, with_bias):
    inputs, target = tensors()
    inputs = inputs if with_bias else inputs[:2]
    # so that at least one is right
    target[1] = F.linear(*(tensor.detach() for tensor in inputs))[1].argmax()
    bias = inputs[2] if with_bias else None
    expected = plain(*inputs[:2], bias, target, change)
    found = chunked_cross_entropy(*inputs[:2], target, bias=bias, change=change, entries=entries)
    assert (
        abs(found.total - expected.total) <= 1e-12 * expected.total
        and found.total.dtype == torch.float64
    )
    for mine, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert off(mine, theirs) <= 1e-12
    assert off(found.each, expected.each) <= 1e-12 and not found.each.requires_grad
    assert (
        torch.equal(found.right, expected.right)
        and found.right.any()
        and found.right.dtype == torch.bool
    )
    assert (found.each[target == -100] == 0).all() and not found.right[target == -100].any()


@pytest.mark.parametrize("entries", [ONE, RAGGED])
def test_float32_is_as_exact_as_its_numbers(entries):
    inputs, target = tensors(torch.float32)
    expected = plain(*(tensor.detach().double().requires_grad_() for tensor in inputs), target)
    found = chunked_cross_entropy(*inputs[:2], target, bias=inputs[2], entries=entries)
    assert (
        found.total.dtype == torch.float32
        and abs(found.total.double() - expected.total) <= 1e-6 * expected.total
    )
    close = gradients(plain(*inputs, target), inputs)
    for mine, theirs in zip(gradients(found, inputs), close, strict=True):
        assert mine.dtype == torch.float32 and off(mine, theirs) <= 5e-6


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("entries", [ONE, RAGGED])
def test_half_precision_is_no_further_off_than_float32_softmax_of_half_logits(autocast, entries):
    inputs, target = tensors(torch.float32 if autocast else torch.bfloat16, tokens=400)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = plain(*exact, target)
    half = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with half:
        found = chunked_cross_entropy(*inputs[:2], target, bias=inputs[2], entries=entries)
        close = plain(*inputs, target)
    assert found.total.dtype == torch.float32
    distance, theirs = (
        abs(total.double() - expected.total) for total in (found.total, close.total)
    )
    assert 0 < distance <= theirs + 1e-6 * expected.total
    true = gradients(expected, exact)
    for given, mine, other, exactly in zip(
        inputs, gradients(found, inputs), gradients(close, inputs), true
    ):
        assert mine.dtype == given.dtype and off(mine, exactly) <= max(
            2 * off(other, exactly), 2**-8
        )


def test_gradients_of_a_half_weight_are_summed_in_float32():
    tokens = 2048
    hidden = torch.ones(tokens, WIDTH, dtype=torch.bfloat16)
    weight = torch.zeros(2, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    total = chunked_cross_entropy(
        hidden, weight, torch.zeros(tokens, dtype=torch.int64), entries=2
    ).total
    total.backward()  # 2,048 halves: bfloat16 sums would stop at 128
    assert weight.grad[1, 0] == tokens / 2 and weight.grad[0, 0] == -tokens / 2


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2)])
def test_only_what_needs_a_gradient_gets_one(which):
    inputs, target = tensors()
    for number, tensor in enumerate(inputs):
        tensor.requires_grad_(number in which)
    asked = [inputs[number] for number in which]
    found = chunked_cross_entropy(*inputs[:2], target, bias=inputs[2], entries=RAGGED)
    found.total.backward()
    for tensor, theirs in zip(
        asked, torch.autograd.grad(plain(*inputs, target).total, asked), strict=True
    ):
        assert off(tensor.grad, theirs) <= 1e-12
    assert all(tensor.grad is None for number, tensor in enumerate(inputs) if number not in which)


class Sizes(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns, and count the matrix
    products."""

    def __init__(self):
        super().__init__()
        self.largest = self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        self.products += "mm" in str(func)
        self.largest = max(
            [self.largest, *(leaf.numel() for leaf in tree_leaves(given) if torch.is_tensor(leaf))]
        )
        return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_all_tokens_never_exist(dtype):
    inputs, target = tensors(dtype, tokens=512)
    with Sizes() as sizes:
        chunked_cross_entropy(
            *inputs[:2], target, bias=inputs[2], entries=32 * VOCABULARY
        ).total.backward()
    assert sizes.largest == max(32 * VOCABULARY, 512 * WIDTH)
    with Sizes() as sizes:
        plain(*inputs, target).total.backward()
    assert sizes.largest == 512 * VOCABULARY


def test_without_gradients_nothing_is_computed_for_them():
    inputs, target = tensors()
    with torch.no_grad(), Sizes() as sizes:
        found = chunked_cross_entropy(*inputs[:2], target, entries=10 * VOCABULARY)
    assert not found.total.requires_grad and sizes.products == 4
    assert torch.equal(found.total, plain(*inputs[:2], None, target).total.detach())


@pytest.mark.parametrize("entries", [ONE, RAGGED])
def test_no_target_counts_or_there_is_none(entries):
    inputs, target = tensors()
    found = chunked_cross_entropy(
        *inputs[:2], torch.full_like(target, -100), bias=inputs[2], entries=entries
    )
    assert found.total == 0 and not found.right.any() and not found.each.any()
    assert all(not gradient.any() for gradient in gradients(found, inputs))
    found = chunked_cross_entropy(inputs[0][:0], inputs[1], target[:0], entries=entries)
    assert found.total == 0 and len(found.each) == 0 and not gradients(found, inputs[1:2])[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_total_and_the_gradients(bad):
    inputs, target = tensors(ignored=0)
    with torch.no_grad():
        inputs[0][30, 2] = bad
    found = chunked_cross_entropy(*inputs[:2], target, entries=RAGGED)
    assert (
        found.total.isnan()
        and found.each.isnan().sum() == 1
        and gradients(found, inputs[1:2])[0].isnan().any()
    )


def test_a_tied_weight_gets_both_gradients():
    inputs, target = tensors()
    weight, tokens = inputs[1], target.clamp(min=0)
    found = chunked_cross_entropy(F.embedding(tokens, weight), weight, target, entries=RAGGED)
    expected = plain(F.embedding(tokens, weight), weight, None, target)
    assert off(gradients(found, [weight])[0], gradients(expected, [weight])[0]) <= 1e-12


def test_a_second_backward_is_rejected():
    inputs, target = tensors()
    total = chunked_cross_entropy(*inputs[:2], target).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_in_one_compiled_graph():
    inputs, target = tensors()

    def act(hidden, weight, bias):
        return chunked_cross_entropy(
            hidden, weight, target, bias=bias, change=capped, entries=13 * VOCABULARY
        )

    found, expected = torch.compile(act, fullgraph=True, backend="aot_eager")(*inputs), act(*inputs)
    assert off(found.each, expected.each) <= 1e-12 and torch.equal(found.right, expected.right)
    for mine, theirs in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert off(mine, theirs) <= 1e-12


@pytest.mark.slow
def test_a_compiled_loss_holds_the_logits_of_one_chunk():
    from torch._inductor.utils import run_and_get_code

    rows, vocabulary, chunks = 96, 1003, 8
    hidden = torch.randn(rows * chunks, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    target = torch.randint(0, vocabulary, (rows * chunks,))

    @torch.compile
    def act(hidden, weight):
        return chunked_cross_entropy(
            hidden, weight, target, entries=rows * vocabulary, right=False
        ).total

    # Count the buffers of the size of a chunk that are alive at the same time.
    [code, *_] = run_and_get_code(act, hidden, weight)[1]
    made = re.compile(rf"\s*(buf\d+) = empty_strided\w*\(\({rows}, {vocabulary}\)")
    taken_over = re.compile(r"\s*(buf\d+) = (buf\d+)[; ]")
    dropped = re.compile(r"\s*del (.*)")
    alive: set[str] = set()
    most = 0
    for line in code[code.index("def call(") :].splitlines():
        if found := made.match(line):
            alive.add(found[1])
        if (found := taken_over.match(line)) and found[2] in alive:
            alive.remove(found[2])
            alive.add(found[1])
        if found := dropped.match(line):
            alive -= set(found[1].replace(" ", "").split(","))
        most = max(most, len(alive))
    assert 1 <= most <= 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_give_what_their_own_logits_give(name, tied):
    model = tiny(name, tie_word_embeddings=tied)
    tokens, target = torch.randint(1, 120, (2, 7)), torch.randint(0, 120, (2, 7))
    target[0, :3] = -100
    weights = list(model.parameters())
    logits = model(input_ids=tokens, use_cache=False).logits
    target[1, 2] = logits[1, 2].argmax()
    expected = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=-100
    )
    slopes = torch.autograd.grad(expected.sum(), weights, allow_unused=True)
    model.train()
    without_logits(model)
    assert all(module.training for module in model.modules())
    model.eval()
    found = model(input_ids=tokens, use_cache=False, target=target)
    assert abs(found.total - expected.sum()) <= 1e-6 * expected.sum()
    assert off(found.each, expected.detach().view(2, 7)) <= 1e-5
    assert found.right is None  # while gradients are computed
    with torch.no_grad():
        right = model(input_ids=tokens, use_cache=False, target=target).right
    assert torch.equal(right, (logits.argmax(-1) == target)) and right[1, 2]
    mine = torch.autograd.grad(found.total, weights, allow_unused=True)
    largest = max(float(slope.abs().max()) for slope in slopes if slope is not None)
    for found_slope, slope in zip(mine, slopes, strict=True):
        assert (found_slope is None) == (slope is None)
        assert slope is None or (found_slope - slope).abs().max() <= 5e-6 * largest
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, logits)


def test_half_models_are_taken_and_their_modes_kept():
    for name in ("Llama", "Gemma2", "Cohere"):
        model = tiny(name).to(torch.bfloat16).train()
        model.base_model.eval()
        without_logits(model)
        assert model.training and not model.base_model.training
        losses = model(
            input_ids=torch.ones(1, 4, dtype=torch.int64),
            target=torch.ones(1, 4, dtype=torch.int64),
        )
        assert losses.total.dtype == torch.float32 and losses.total.isfinite()


def test_a_model_on_the_meta_device_is_taken_as_its_config_states():
    from transformers import CohereConfig, CohereForCausalLM

    with torch.device("meta"):
        model = CohereForCausalLM(CohereConfig(**LLAMA))
    without_logits(model)
    assert model(input_ids=torch.ones(1, 4, dtype=torch.int64, device="meta"),
                 target=torch.ones(1, 4, dtype=torch.int64, device="meta")).each.shape == (1, 4)  # fmt: skip  # noqa: E501


def test_losses_are_a_plain_tuple():
    losses = Losses(torch.ones(()), torch.ones(2), torch.ones(2, dtype=torch.bool))
    assert len(tree_leaves(losses)) == 3 and type(pickle.loads(pickle.dumps(losses))) is Losses


def test_models_that_come_to_their_logits_in_another_way_are_rejected():
    import transformers

    bert = {
        key: value for key, value in LLAMA.items() if key not in ("head_dim", "num_key_value_heads")
    }
    with pytest.raises(ValueError, match="BertLMHeadModel differ from its output layer's"):
        without_logits(
            transformers.BertLMHeadModel(transformers.BertConfig(**bert, is_decoder=True))
        )
    with pytest.raises(ValueError, match="needs a linear output layer, and GPT2Model has none"):
        without_logits(transformers.GPT2Model(transformers.GPT2Config(**MODELS["GPT2"])))

    latent = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    with pytest.raises(
        ValueError, match="MiniCPM3ForCausalLM differ from its output layer's"
    ):  # scales before its output layer
        without_logits(
            transformers.MiniCPM3ForCausalLM(transformers.MiniCPM3Config(**LLAMA | latent))
        )

    class Capped(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            given = super().forward(*args, **kwargs)
            given.logits = torch.tanh(given.logits / 50) * 50
            return given

    class Cut(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            given = super().forward(*args, **kwargs)
            given.logits = given.logits[..., :100]
            return given

    for kind in (Capped, Cut):
        model = kind(transformers.LlamaConfig(**LLAMA))
        forward, head = model.forward, model.lm_head.forward
        with pytest.raises(ValueError, match=f"{kind.__name__} differ from its output layer's"):
            without_logits(model)
        assert model.forward == forward and model.lm_head.forward == head and model.training
    model = tiny("Llama")
    model.config.logit_scale = 2.0  # in the config, but not in the code
    with pytest.raises(ValueError, match="differ from its output layer's"):
        without_logits(model)
    model = tiny("Llama")
    del model.lm_head
    model.get_output_embeddings = lambda: nn.Conv1d(1, 1, 1)
    with pytest.raises(ValueError, match="a Conv1d"):
        without_logits(model)


def test_float16_is_rejected():
    hidden, weight = torch.randn(3, 4, dtype=torch.float16), torch.randn(5, 4, dtype=torch.float16)
    with pytest.raises(
        ValueError, match="does not work in fp16: small gradients of the logits underflow"
    ):
        chunked_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]))
