"""Floating masks whose blocks are all partial are not examined again; results are right whatever comes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import flash4_torch
from everything import examples, one_of
from flash4_torch import testing
from flash4_torch.backends.compiled import mask_kinds
from flash4_torch.kernels.common.mask_tables import MaskPlan, place

PLAN = MaskPlan("bfloat16", 64, 128)
SIZES = (2, 3, 130, 700)
CPU = torch.device("cpu")


def tables_of(plan, sizes, visible=True, partial=True):
    """The tables of a mask whose first block is as told, and all others partial."""
    at = place(plan, *sizes)
    rows = sizes[0] * at.HB * at.MB
    state = torch.full((rows, at.NB), 3)
    state[0, 0] = visible + 2 * partial if visible else 0
    listed = torch.full((rows, at.NB), -7)
    rank = torch.zeros(rows, at.NB + 1, dtype=torch.int64)
    for r in range(rows):
        seen = [n for n in range(at.NB) if state[r, n] & 1]
        listed[r, : len(seen)] = torch.tensor([2 * n + (state[r, n] >> 1) for n in seen])
        rank[r] = torch.tensor([sum(m < n for m in seen) for n in range(at.NB + 1)])
    bits = torch.zeros(at.blocks)
    return torch.cat([bits, listed.flatten(), rank.flatten()]).int()


def kind():
    return mask_kinds.MaskKind(PLAN, SIZES, CPU, True)


def test_dense_masks_are_examined_once_in_a_while():
    own, dense = kind(), tables_of(PLAN, SIZES)
    for _ in range(3):
        assert own.known_tables() is None
        own.observe(dense)
        for _ in range(mask_kinds._CALLS):
            found = own.known_tables()
            NB = place(PLAN, *SIZES).NB
            assert found.tolist() == [2 * n + 1 for n in range(NB)] + list(range(NB + 1))


@pytest.mark.parametrize(("visible", "partial"), [(False, False), (True, False)])
def test_masks_with_other_blocks_are_always_examined(visible, partial):
    """Tables of a dense one are noticed, though not all tables are looked at."""
    own, dense = kind(), tables_of(PLAN, SIZES)
    sparse = tables_of(PLAN, SIZES, visible, partial)
    for _ in range(2 * mask_kinds._CALLS):
        assert own.known_tables() is None
        own.observe(sparse)
    for _ in range(mask_kinds._CALLS + 1):
        if own.known_tables() is None:
            own.observe(dense)
    assert own.known_tables() is not None
    for _ in range(mask_kinds._CALLS + 1):
        if own.known_tables() is None:
            own.observe(sparse)
    assert own.known_tables() is None


def test_deterministic_calls_examine_each():
    own, dense = kind(), tables_of(PLAN, SIZES)
    own.observe(dense)
    assert own.known_tables() is not None
    assert own.known_tables(deterministic=True) is None


def test_a_single_row_is_looked_at_later():
    """Generation has masks of a new size in each step, which nobody needs to know."""
    sizes = (2, 3, 1, 700)
    own, dense = mask_kinds.MaskKind(PLAN, sizes, CPU, True), tables_of(PLAN, sizes)
    for _ in range(mask_kinds._CALLS):
        own.observe(dense)
        assert own.known_tables() is None
    own.observe(dense)
    assert own.known_tables() is not None


@pytest.mark.parametrize(("Sq", "most"), [(130, 512), (1, 256)])
def test_masks_of_few_keys_are_never_examined(Sq, most):
    """Next to many scores they are."""
    for Sk, is_small in ((1, True), (most, True), (most + 1, False)):
        own = mask_kinds.MaskKind(PLAN, (2, 3, Sq, Sk), CPU, True)
        assert (own.known_tables() is not None) is is_small
        assert mask_kinds.MaskKind(PLAN, (2, 3, Sq, Sk), CPU, False).known_tables() is None


def test_an_answer_may_come_late(monkeypatch):
    """Masks are examined until it is there, and nothing is asked during a capture."""
    own = mask_kinds.MaskKind(PLAN, SIZES, torch.device("cuda", 0), True)
    monkeypatch.setattr(mask_kinds.tile_counters, "is_capturing", lambda index: True)
    monkeypatch.setattr(mask_kinds.constants, "all_partial", lambda device, NB: NB)
    own.observe(torch.empty(0))
    own._answer, own._is_asked = torch.tensor(mask_kinds._PENDING), True
    assert own.known_tables() is None
    own.observe(torch.empty(0))
    own._answer.fill_(1)
    assert own.known_tables() == place(PLAN, *SIZES).NB


@pytest.mark.parametrize("arch", one_of(3, ("sm_90a", "sm_100a", "sm_80")))
@settings(max_examples=examples(1, 4))
@given(data=st.data())
def test_results_next_to_any_mask_of_a_dense_kind(arch, data):
    """A second mask is not examined. Its results have the bits of the first call's if it is the same, and are
    right if half of it is -inf.
    """
    emulate = pytest.importorskip("flash4_torch.testing.emulate")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    B, H, Sq, Sk = 2, 4, data.draw(st.sampled_from((150, 70))), data.draw(st.sampled_from((600, 680)))
    shape = data.draw(st.sampled_from([(B, H, Sq, Sk), (B, 1, Sq, Sk), (1, H, Sq, Sk), (Sq, Sk)]))
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float32)))
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, n, H, 64).bfloat16() for n in (Sq, Sk, Sk))
    bias = torch.randn(shape).to(dtype)
    hidden = bias.clone()
    hidden[..., Sk // 2 :] = -torch.inf
    mask_kinds._kind.cache_clear()
    found, launched = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH4_BACKEND", "emulator")
        patch.setenv("FLASH4_ARCH", arch)
        for mask in (bias, bias, hidden):
            with emulate.device(arch, num_sms=3) as device:
                found.append(flash4_torch.attention(q, k, v, attn_mask=mask, return_lse=True))
            launched.append(["mask_blocks" in report.kernel for report in device.reports])
    assert launched[0][0] and launched[1:] == [launched[0][1:]] * 2
    for first, second in zip(*found[:2], strict=True):
        assert torch.equal(first, second)
    exact, peer = (
        testing.reference(q, k, v, attn_mask=hidden, dtype=t) for t in (torch.float64, torch.bfloat16)
    )
    for own, truth, plain in zip(found[2], exact, peer, strict=True):
        testing.assert_close_as_peer(own, truth, plain)


@pytest.mark.parametrize("how", ["argument", "switch"])
def test_masks_of_deterministic_calls_are_examined(how, monkeypatch):
    emulate = pytest.importorskip("flash4_torch.testing.emulate")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (5, 600, 600))
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    monkeypatch.setenv("FLASH4_ARCH", "sm_90a")
    mask = torch.randn(5, 600)
    mask_kinds._kind.cache_clear()
    examined = []
    for deterministic in (False, False, True, True):
        torch.use_deterministic_algorithms(deterministic and how == "switch")
        try:
            with emulate.device("sm_90a", num_sms=3) as device:
                chosen = deterministic and how == "argument"
                flash4_torch.attention(q, k, v, attn_mask=mask, deterministic=chosen)
        finally:
            torch.use_deterministic_algorithms(False)
        examined.append(any("mask_blocks" in report.kernel for report in device.reports))
    assert examined == [True, False, True, True]


@pytest.mark.parametrize("arch", one_of(2, ("sm_90a", "sm_80")))
@settings(max_examples=examples(2, 8))
@given(data=st.data())
def test_rows_of_a_mask_begin_anywhere(arch, data):
    """Rows at multiples of 2, 4, 8 or 16 bytes."""
    emulate = pytest.importorskip("flash4_torch.testing.emulate")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    Sq, Sk = data.draw(st.sampled_from((5, 258))), 256 + data.draw(st.sampled_from((0, 1, 2, 4, 8)))
    gap, first = data.draw(st.sampled_from((0, 2, 3))), data.draw(st.sampled_from((0, 1, 4)))
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float32)))
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (Sq, Sk, Sk))
    mask = torch.randn(Sq, first + Sk + gap).to(dtype)[:, first : first + Sk]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH4_BACKEND", "emulator")
        patch.setenv("FLASH4_ARCH", arch)
        with emulate.device(arch, num_sms=3), testing.poisoned_memory():
            out = flash4_torch.attention(q, k, v, attn_mask=mask)
    exact, peer = (
        testing.reference(q, k, v, attn_mask=mask, dtype=t) for t in (torch.float64, torch.bfloat16)
    )
    testing.assert_close_as_peer(out, exact[0], peer[0])
