"""Divergences of merged distributions equal plain ones if all entries are kept, and are lower
bounds otherwise; stored records keep what they need."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from oneloop.tasks.language.divergences import divergence, merged
from oneloop.tasks.language.sequences import IGNORE, Sample, collated, records_of_targets
from oneloop.tasks.language.top_logits import collated_records, record_of, records

pytestmark = [
    pytest.mark.covers("oneloop.tasks.language.divergences", "oneloop.tasks.language.top_logits"),
    pytest.mark.usefixtures("one_thread"),
]

KINDS = ("forward", "reverse", "js")
WEIGHT = 0.3
ENTRIES = 50


def logits(*, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return logits of a teacher and of a student, (tokens, entries)."""
    draw = torch.Generator().manual_seed(0)
    made = scale * torch.randn(2, 7, ENTRIES, generator=draw, dtype=torch.float64)
    return list(made.to(dtype))


def plain(teacher: torch.Tensor, student: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the divergence of whole distributions, from their probabilities."""
    p, q = teacher.softmax(-1), student.softmax(-1)

    def kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        return F.kl_div(to.log(), of, reduction="none").sum(-1)

    if kind == "forward":
        return kl(p, q)
    if kind == "reverse":
        return kl(q, p)
    middle = WEIGHT * p + (1 - WEIGHT) * q
    return WEIGHT * kl(p, middle) + (1 - WEIGHT) * kl(q, middle)


def found(
    teacher: torch.Tensor, student: torch.Tensor, kind: str, k: int, temperature: float
) -> torch.Tensor:
    """Return the divergence by way of stored records."""
    stored = records(teacher, record_of(k, ENTRIES), temperature=temperature)
    every = torch.ones(1, len(teacher), dtype=torch.bool)
    batch = collated_records(stored, every, ENTRIES)
    of_student = merged(student[None], batch["teacher_entry"], temperature=temperature)
    of_teacher = batch["teacher"].to(student.dtype)
    return divergence(of_teacher, of_student, kind, weight=WEIGHT)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_with_all_entries_losses_and_gradients_are_the_plain_ones(kind, temperature):
    for dtype in (torch.float32, torch.float64):
        teacher, student = logits(dtype=dtype)
        student.requires_grad_()
        ours = found(teacher, student, kind, ENTRIES, temperature)
        wide = student.detach().double().requires_grad_()
        exact = plain(teacher.double() / temperature, wide / temperature, kind)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(ours.square().sum(), student)
        (expected,) = torch.autograd.grad(exact.square().sum(), wide)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_with_fewer_entries_it_is_a_lower_bound_that_grows(kind):
    teacher, student = logits()
    exact = plain(teacher, student, kind)
    before = torch.zeros_like(exact)
    for k in (1, 2, 5, 20, 49, 50):
        now = found(teacher, student, kind, k, 1.0)
        assert (now >= before - 1e-6).all() and (now <= exact + 1e-6).all(), k
        before = now
    assert (found(teacher, student, kind, 5, 1.0) < exact - 1e-3).all()

    # It is exact if both are proportional outside of the entries.
    outside = teacher.clone()
    best = teacher.topk(5, -1).indices
    outside.scatter_(-1, best, student.gather(-1, best))
    torch.testing.assert_close(
        found(teacher, outside, kind, 5, 1.0), plain(teacher, outside, kind), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_merged_distributions_is_that_of_their_sums(kind):
    teacher, student = logits()
    best = teacher.topk(5, -1).indices
    several = []
    for one in (teacher, student.requires_grad_()):
        probabilities = one.softmax(-1)
        chosen = probabilities.gather(-1, best)
        tail = probabilities.scatter(-1, best, 0).sum(-1, keepdim=True)
        several.append(torch.cat([chosen, tail], -1).log())
    exact = plain(*several, kind)  # its softmax of log-probabilities changes nothing
    ours = found(teacher, student, kind, 5, 1.0)
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(ours.sum(), student)
    (expected,) = torch.autograd.grad(exact.sum(), student)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5, ENTRIES - 1, ENTRIES])
def test_tiny_tails_are_finite_and_exact_in_float32(kind, k):
    for scale in (0.0, 1e-6, 3.0, 40.0):
        teacher, student = logits(scale=scale, dtype=torch.float32)
        for of_student in (student, teacher.clone(), student.flip(-1)):
            of_student = of_student.detach().requires_grad_()
            ours = found(teacher, of_student, kind, k, 1.0)
            (gradient,) = torch.autograd.grad(ours.sum(), of_student)
            assert ours.isfinite().all() and gradient.isfinite().all(), scale
            assert (ours > -1e-4).all(), scale

            # The student's tail does not cancel, also if it is far below the float32 epsilon.
            best = teacher.topk(k, -1).indices
            buckets = merged(of_student.detach(), best, temperature=1.0)
            wide = of_student.detach().double().log_softmax(-1)
            if k < ENTRIES:
                tail = wide.scatter(-1, best, -torch.inf).logsumexp(-1)
                torch.testing.assert_close(buckets[:, -1].double(), tail, rtol=1e-5, atol=1e-5)
        same = teacher.clone().requires_grad_()
        assert found(teacher, same, kind, k, 1.0).abs().max() < 1e-5 * max(1.0, scale)


def test_entries_without_any_probability_are_finite():
    """Some models set the logits of unused entries to minus infinity."""
    teacher, student = logits(dtype=torch.float32)
    teacher[:, 10:] = -torch.inf
    for k in (5, 12, ENTRIES):
        student = student.detach().requires_grad_()
        ours = found(teacher, student, "forward", k, 1.0)
        (gradient,) = torch.autograd.grad(ours.sum(), student)
        exact = plain(teacher.double(), student.detach().double(), "forward")
        assert gradient.isfinite().all() and (ours <= exact + 1e-5).all(), k
        if k >= 12:
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


# --- records


def test_records_hold_the_most_likely_entries_and_the_tail():
    # Two chunks, and entries that two bytes cannot number.
    vocabulary = 70_000
    draw = torch.Generator().manual_seed(0)
    made = 5 * torch.randn(260, vocabulary, generator=draw)
    assert made.numel() > 1 << 24
    record = record_of(3, vocabulary)
    found = records(made, record, temperature=2.0)
    assert record.itemsize == 3 * (4 + 4) + 4
    for row in (0, 100, 239, 240, 259):
        exact = (made[row].double() / 2).log_softmax(-1)
        best = exact.topk(3)
        assert found["entry"][row].tolist() == best.indices.tolist()
        np.testing.assert_allclose(found["logp"][row], best.values.numpy(), atol=2e-5)
        rest = exact.scatter(-1, best.indices, -torch.inf).logsumexp(-1)
        np.testing.assert_allclose(found["tail"][row], float(rest), atol=2e-5)


def test_small_vocabularies_have_entries_of_two_bytes():
    assert record_of(64, 1 << 16).itemsize == 64 * (2 + 4) + 4
    assert record_of(64, (1 << 16) + 1).itemsize == 64 * (4 + 4) + 4
    made = torch.zeros(1, 1 << 16)
    made[0, -1] = 1
    assert records(made, record_of(1, 1 << 16), temperature=1.0)["entry"][0, 0] == (1 << 16) - 1


def test_half_precision_logits_are_summed_in_float32():
    made = logits(dtype=torch.bfloat16)[0]
    found = records(made, record_of(4, ENTRIES), temperature=1.0)
    exact = made.double().log_softmax(-1).topk(4).values
    np.testing.assert_allclose(found["logp"], exact.numpy(), atol=1e-5)


@pytest.mark.parametrize("k", [3, ENTRIES])
def test_records_are_at_the_positions_of_their_targets(k):
    """Two rows, one with two documents; trained tokens are those that are not complements."""
    record = record_of(k, ENTRIES)
    spans = [np.array(one, dtype=np.int32) for one in ([~1, 2, ~3, 4], [~5, ~6, 7], [8, 9])]
    stored = []
    for number, span in enumerate(spans):
        targets = span[1:] >= 0
        made = records(torch.randn(int(targets.sum()), ENTRIES) + number, record, temperature=1.0)
        stored.append(made)
    rows = [Sample(spans[:2], True, stored[:2]), Sample(spans[2:], True, stored[2:])]
    is_target = collated(rows, width=6, most=2)["target"] != IGNORE
    batch = collated_records(records_of_targets(rows), is_target, ENTRIES)
    places = [(0, 0, 0, 0), (0, 2, 0, 1), (0, 4, 1, 0), (1, 0, 2, 0)]
    for row, column, document, target in places:
        one = stored[document][target]
        assert batch["teacher_entry"][row, column].tolist() == one["entry"].tolist()
        assert batch["teacher"][row, column, :k].tolist() == one["logp"].tolist()
        if k < ENTRIES:
            assert float(batch["teacher"][row, column, k]) == one["tail"]

    # All other positions have a distribution, too.
    used = {(row, column) for row, column, _, _ in places}
    for row in range(2):
        for column in range(6):
            assert float(batch["teacher"][row, column].exp().sum()) == pytest.approx(1, rel=1e-5)
            if (row, column) not in used:
                assert sorted(batch["teacher_entry"][row, column].tolist()) == list(range(k))
