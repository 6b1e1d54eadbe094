"""Deterministic gradients of captured tensors: exact sums, whose bits no order of additions changes."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import EVERYTHING, examples
from exact_sum_kernel import THREADS, summed
from flash4_torch.backends.flex import totals
from flash4_torch.errors import BackendError
from flash4_torch.kernels.common.exact_sums import MAX_ADDITIONS, WORD_BITS, WORDS
from flash4_torch.problem import Extent
from flash4_torch.testing import backends_used
from flex_calls import ARCHS, Call, check_gradients, drawn_blocks, emulated, made, tensors, with_blocks
from flex_mods import H, drawn_mask

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-149


def whole(total: Tensor) -> int:
    """The sum in units of the least float32 number."""
    return sum(x << (WORD_BITS * n) for n, x in enumerate(total[:WORDS].tolist()))


def units(x: float) -> int:
    return int(Fraction(x) / Fraction(SUBNORMAL))


@settings(max_examples=examples(40, 2000))
@given(st.lists(FLOATS, min_size=1, max_size=64), st.randoms(use_true_random=False))
@example([LARGEST] * 64, None)
@example([-LARGEST, SUBNORMAL, LARGEST, -2 * SUBNORMAL], None)
@example([1.0, 2.0**-126, -1.0, 0.0, -0.0], None)
@example([-(2.0**-40)] * 33 + [2.0**-40] * 31, None)
def test_a_sum_is_exact_in_any_order(numbers: list[float], random: object) -> None:
    """It is the one of whole numbers, has the same bits for every order, and is rounded well."""
    found = summed(torch.tensor(numbers))
    again = list(numbers)
    again.reverse() if random is None else random.shuffle(again)
    assert torch.equal(found, summed(torch.tensor(again)))
    assert whole(found) == sum(map(units, numbers))
    # fsum is exact, too, and rounds once.
    wanted = math.fsum(numbers)
    assert abs(totals.rounded(found).item() - wanted) <= 2.0**-51 * abs(wanted)


def test_every_exponent_has_its_place() -> None:
    """All bits of a mantissa count, whatever two words it falls into; none goes beyond the last word."""
    for first in range(1, 255, THREADS):
        for sign in (1, -1):
            bits = [e << 23 | 0x7FFFFF for e in range(first, min(first + THREADS, 255))]
            numbers = sign * torch.tensor(bits, dtype=torch.int32).view(torch.float32)
            found = summed(numbers)
            assert whole(found) == sum(map(units, numbers.tolist()))
            assert found[WORDS] == 0


@pytest.mark.parametrize("x", [LARGEST, -LARGEST, (2.0**24 - 1) * SUBNORMAL, (1 - 2.0**-24) * 2.0**37])
def test_a_sum_has_room_for_as_many_additions_as_it_says(x: float) -> None:
    """Words overflow as their products by the number of additions would."""
    once = summed(torch.tensor([x]))
    total = once * MAX_ADDITIONS
    assert whole(total) == units(x) * MAX_ADDITIONS
    assert totals.rounded(total).item() == pytest.approx(x * MAX_ADDITIONS, rel=2.0**-51, abs=0)


@pytest.mark.parametrize(
    ("numbers", "wanted"),
    [
        ([math.inf, 1.0, math.inf], math.inf),
        ([-math.inf, LARGEST], -math.inf),
        ([math.inf, -math.inf, 1.0], math.nan),
        ([1.0, -math.nan], math.nan),
        ([math.nan, math.inf], math.nan),
    ],
    ids=str,
)
def test_what_is_not_finite_is_noted(numbers: list[float], wanted: float) -> None:
    for order in (numbers, numbers[::-1]):
        found = totals.rounded(summed(torch.tensor(order))).item()
        assert found == wanted or (math.isnan(found) and math.isnan(wanted))


@pytest.mark.parametrize("arch", ARCHS if EVERYTHING else ["sm_80"])
@pytest.mark.parametrize("reads_score", [True, False] if EVERYTHING else [True])
def test_gradients_have_the_same_bits(arch: str, reads_score: bool) -> None:
    """Whatever the order in which CTAs add to one place: a scalar, tables by head, row, column and both."""
    torch.manual_seed(3)
    Sq, Sk = 200, 231
    gain, slopes, rows, columns, table = learned = [
        torch.randn(shape).requires_grad_() for shape in ((), (H,), (Sq,), (Sk, 1), (7, 2))
    ]

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score * gain * slopes[h] if reads_score else score + gain * slopes[h]
        return score + rows[i] * columns[j, 0] + table[(i + j) & 3, b]

    call = made(tensors(Sq, Sk), mod, drawn_mask(30, 2, 20), learned, deterministic=True)
    call = with_blocks(call, drawn_blocks(7, Sq, Sk, 128, 48), 128, 48)
    with backends_used() as used:
        check_gradients(call, arch, {"schedule": "late"})
    assert used[("flex_attention_backward", "emulator")] == 1

    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    out, _ = replace(call, q=q, k=k, v=v).results()
    dout = torch.randn(out.shape).to(out.dtype)
    wanted = [q, k, v, *learned]
    first, *others = (
        emulated(
            lambda: torch.autograd.grad(out, wanted, dout, retain_graph=True),
            arch,
            {"schedule": "fuzz", "seed": seed},
            num_sms,
        )
        for seed, num_sms in ((0, 3), (1, 8), *([(2, 1), (3, 2)] if EVERYTHING else []))
    )
    for found in others:
        assert all(map(torch.equal, first, found))


def test_what_is_not_finite_is_as_in_float32() -> None:
    """Square roots at 0 give infinities; their sums over heads and rows of both signs are NaN."""
    torch.manual_seed(5)
    Sq, Sk = 40, 20
    rows, table = torch.ones(Sq), torch.ones(2, H, Sq, Sk)
    rows[3] = table[0, 1, 7, 5] = table[1, 2, 9, 0] = 0
    learned = [rows.requires_grad_(), table.requires_grad_()]

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + rows[i].sqrt() + table[b, h, i, j].sqrt()

    qkv, dout = tensors(Sq, Sk), torch.randn(2, Sq, H, 64).bfloat16()
    exact, plain = (_gradients(made(qkv, mod, None, learned, deterministic=x), dout) for x in (True, False))
    for found, wanted in zip(exact, plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert exact[0].isnan().nonzero().tolist() == [[3]]
    assert exact[1].isinf().nonzero().tolist() == [[0, 1, 7, 5], [1, 2, 9, 0]]


def _gradients(call: Call, dout: Tensor) -> tuple[Tensor, ...]:
    """Gradients of captured tensors, by the kernels of one architecture."""
    out, _ = replace(call, q=call.q.requires_grad_()).results()
    found = lambda: torch.autograd.grad(out, list(call.learned), dout)  # noqa: E731
    return emulated(found, "sm_80", {"schedule": "late"})


def test_many_elements_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact sum takes 96 bytes."""
    monkeypatch.setattr(totals, "MAX_EXACT", 100)
    rows = torch.randn(101).requires_grad_()
    call = made(tensors(101, 40), lambda s, b, h, i, j: s + rows[i], None, [rows], deterministic=True)
    with pytest.raises(BackendError, match="want 101 gradients, and it has deterministic sums for up to 100"):
        check_gradients(call, "sm_90a", {"schedule": "eager"})


def test_more_additions_than_a_sum_has_room_for_are_refused() -> None:
    """Each of the gathers may add to one place once a score."""
    extent = Extent(4, 1 << 15, 1 << 15, 32, 32)
    assert totals.limits(1, extent, 1) == []
    assert "sums of up to 137438953472 gradients" in totals.limits(1, extent, 2)[0]
    assert "for each of 137443147776 scores" in totals.limits(1, extent._replace(Sk=(1 << 15) + 1), 1)[0]
