"""The kernel that transposes an attn_mask for the backward, and makes its tables on the way."""

import functools
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import compiled_files
from everything import examples, one_of
from flash4_torch.backends.compiled import MASK_TRANSPOSE
from flash4_torch.compile import Key
from flash4_torch.kernels.aux_kernels.mask_transpose import compile_mask_transpose
from flash4_torch.kernels.common.mask_tables import MaskPlan, place
from flash4_torch.testing import emulate
from test_mask_blocks import POISON, kinds, shown_by

PLANS = [
    *[MaskPlan("bool", *block) for block in ((128, 64), (32, 64), (256, 128))],
    *[MaskPlan("bfloat16", *block) for block in ((128, 64), (128, 128))],
    MaskPlan("float16", 64, 64),
    *[MaskPlan("float32", *block) for block in ((64, 64), (128, 128))],
]
ARCHS = ("sm_90a", "sm_100a")
compiled = functools.cache(lambda arch, plan: compile_mask_transpose(plan))
SIZES = st.sampled_from((1, 7, 8, 16, 63, 64, 65, 127, 128, 129, 192)) | st.integers(1, 270)


@st.composite
def masks(draw, plan):
    """(Bm, Hm, Sk, Sq), whose rows are keys and mostly neighbours, with blocks of all three kinds, perhaps
    with gaps and a base that is not aligned.
    """
    B, H, Sq, Sk = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(SIZES), draw(SIZES)
    torch.manual_seed(draw(st.integers(0, 99)))
    order = draw(st.sampled_from([(0, 1, 3, 2), (0, 1, 3, 2), (3, 0, 1, 2), (2, 3, 1, 0), (0, 1, 2, 3)]))
    sizes = B, H, Sk, Sq
    # Keys to a multiple of 16 bytes, so that rows are aligned though their number is odd.
    gap = draw(st.sampled_from((0, -Sk % 16, -Sk % 16, 1)))
    start = draw(st.sampled_from((0, 0, 0, 1)))
    grid = torch.randint(0, 3, [B, H, -(-Sk // plan.rows), -(-Sq // plan.keys)])
    kind = grid.repeat_interleave(plan.rows, 2)[:, :, :Sk].repeat_interleave(plan.keys, 3)[..., :Sq]
    noise = torch.rand(sizes) < draw(st.sampled_from((0.0003, 0.5)))
    seen = (kind == 2) ^ ((kind == 1) & noise) | ((kind == 1) & (torch.rand(()) < 0.5) & ~noise)
    mask = seen
    if plan.dtype != "bool":
        bias = torch.where(torch.rand(sizes) < 0.01, torch.randn(sizes), 0.0)
        mask = torch.where(seen, bias, -torch.inf).to(getattr(torch, plan.dtype))
    shape = [sizes[d] for d in order]
    shape[-1] += gap
    memory = torch.zeros(start + torch.Size(shape).numel(), dtype=mask.dtype)
    held = memory[start:].view(shape)[..., : sizes[order[-1]]].permute([order.index(d) for d in range(4)])
    return held.copy_(mask)


def run(arch, plan, mask):
    """The copy without what lies beyond the mask's end, bits, blocks and rank."""
    B, H, Sk, Sq = mask.shape
    at = place(plan, *mask.shape)
    buffer = torch.full((at.words,), POISON, dtype=torch.int32)
    copy = None
    if plan.dtype != "bool":
        copy = torch.full((B, H, Sk, -(-Sq // 8) * 8), torch.nan, dtype=mask.dtype)
    touched = (mask, buffer) if copy is None else (mask, copy, buffer)
    with emulate.device(arch) as device, device.touching(*touched):
        compiled(arch, plan)(mask, copy, buffer)
    bits = buffer[: at.blocks].view(*mask.shape[:3], at.NB, -1) if at.blocks else None
    blocks = buffer[at.blocks : at.rank].view(B, H, at.MB, at.NB)
    return copy, bits, blocks, buffer[at.rank :].view(B, H, at.MB, at.NB + 1)


def check(arch, plan, mask):
    copy, bits, blocks, rank = run(arch, plan, mask)
    if copy is None:
        assert torch.equal(shown_by(bits, plan, mask.shape[3]), mask)
    else:
        assert torch.equal(copy[..., : mask.shape[3]], mask)
        assert not copy.isnan().any()
    visible, mixed = kinds(plan, mask)
    assert torch.equal(rank, torch.nn.functional.pad(visible.cumsum(-1), (1, 0)).int())
    for index in itertools.product(*map(range, visible.shape[:3])):
        n = visible[index].nonzero()[:, 0]
        assert torch.equal(blocks[index][: len(n)], (2 * n + mixed[index][n]).int())


@pytest.mark.parametrize(("arch", "plan"), one_of(3, [*zip(itertools.cycle(ARCHS), PLANS)]), ids=str)
@settings(max_examples=examples(8, 40), deadline=None, derandomize=True)
@given(data=st.data())
def test_copy_and_tables(arch, plan, data):
    check(arch, plan, data.draw(masks(plan)))


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[3], PLANS[-1]], ids=str)
def test_one_pair_tells_a_block(plan):
    """Wherever it is in a block, a pair that is visible, or that is masked, is seen."""
    for query, key in ((0, 0), (plan.keys - 1, plan.rows - 1), (33, 17), (plan.keys + 5, plan.rows + 40)):
        for hidden in (False, True):
            seen = torch.full((1, 1, 2 * plan.keys, plan.rows + 56), hidden)
            seen[..., query, key] = not hidden
            mask = seen if plan.dtype == "bool" else torch.where(seen, 0.0, -torch.inf)
            check("sm_90a", plan, mask.to(getattr(torch, plan.dtype)).transpose(2, 3))


@pytest.mark.parametrize("plan", [PLANS[3], PLANS[-1]], ids=str)
def test_not_a_number_is_visible_and_a_change(plan):
    mask = torch.full((1, 1, 300, 80), -torch.inf, dtype=getattr(torch, plan.dtype)).mT.contiguous().mT
    mask[..., 290, 70] = torch.nan
    copy, _, blocks, rank = run("sm_90a", plan, mask)
    assert copy[..., 290, 70].isnan() and copy.isnan().sum() == 1 + (copy.shape[3] > 80)
    assert rank[..., -1].tolist() == [[[0, 0, 1]]] and blocks[0, 0, 2, 0] == 70 // plan.keys * 2 + 1


def test_more_blocks_than_threads():
    plan = PLANS[0]
    mask = torch.zeros(1, 1, 64 * 1100, 16, dtype=torch.bool)
    mask[..., 63 : 64 * 600, :] = True
    mask[..., -3:, :] = True
    check("sm_90a", plan, mask.transpose(2, 3))


def test_nothing_spills(tmp_path_factory):
    keys = [
        Key(MASK_TRANSPOSE, (plan,), arch)
        for arch, plan in [*itertools.product(ARCHS, PLANS), ("sm_80", PLANS[0])]
    ]
    for key, code in compiled_files.codes(one_of(4, keys), tmp_path_factory).items():
        assert not code.spills and not code.stack, (key, code)
