"""attn_mask in the tuned kernels: the tables made from it, and how they change a tile of scores."""

import functools
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import examples, one_of
from flash4_torch.kernels.aux_kernels.mask_blocks import compile_mask_blocks
from flash4_torch.kernels.common.mask_tables import MaskPlan, place
from flash4_torch.testing import emulate
from mask_kernel import TILE_ROWS, compile_visit

ARCHS = ("sm_90a", "sm_100a")
POISON = -77
# rows, keys, heads: few of them, since each is compiled.
BLOCKS = ((64, 128, 1), (64, 80, 1), (16, 112, 4), (1, 64, 1), (32, 176, 2))
PLANS = [
    MaskPlan(dtype, *BLOCKS[(i + j) % len(BLOCKS)])
    for i, dtype in enumerate(("bool", "bfloat16", "float16", "float32"))
    for j in (range(5) if dtype == "bool" else range(2))
]
PLANS += [
    MaskPlan(dtype, rows, 64, column_major=True)
    for dtype, rows in (("bfloat16", 64), ("float16", 16), ("float32", 128), ("float32", 32))
]
Sk = st.sampled_from((1, 16, 31, 33, 48, 80, 112, 127, 128, 129, 256, 353)) | st.integers(1, 400)
compile_tables = functools.cache(lambda arch, plan: compile_mask_blocks(plan))
compile_visiting = functools.cache(lambda arch, *static: compile_visit(*static))


@st.composite
def masks(draw, plan):
    """(Bm, Hm, Sqm, Sk) with blocks of all three kinds, in some memory order, perhaps with gaps."""
    B, H = draw(st.integers(1, 2)), draw(st.sampled_from((1, plan.heads, 2 * plan.heads)))
    Sq, keys = draw(st.sampled_from((1, plan.rows))) + draw(st.integers(0, 70)), draw(Sk)
    torch.manual_seed(draw(st.integers(0, 99)))
    sizes = [n if draw(st.booleans()) else 1 for n in (B, H, Sq)] + [keys if draw(st.integers(0, 4)) else 1]
    order = draw(st.sampled_from(list(itertools.permutations(range(4))))) if draw(st.booleans()) else range(4)
    back = [list(order).index(d) for d in range(4)]
    gaps = [draw(st.sampled_from((0, 0, 1, 8))) for _ in order]
    memory = torch.empty([sizes[d] + gap for d, gap in zip(order, gaps, strict=True)])
    inside = memory[tuple(slice(sizes[d]) for d in order)]
    # Fully masked blocks, full blocks, and blocks with holes.
    grid = torch.randint(0, 3, [*sizes[:2], -(-sizes[2] // plan.rows), -(-sizes[3] // plan.keys)])
    kind = grid.repeat_interleave(plan.rows, 2)[:, :, : sizes[2]].repeat_interleave(plan.keys, 3)[
        ..., : sizes[3]
    ]
    noise = torch.rand(sizes) < draw(st.sampled_from((0.003, 0.5)))
    seen = (kind == 2) ^ ((kind == 1) & noise) | ((kind == 1) & (torch.rand(()) < 0.5) & ~noise)
    inside.copy_(seen.permute(*order))
    if plan.dtype == "bool":
        mask = memory.bool()
    else:
        bias = torch.where(torch.rand(memory.shape) < 0.01, torch.randn(memory.shape), 0.0)
        mask = torch.where(memory.bool(), bias, -torch.inf).to(getattr(torch, plan.dtype))
    mask = mask[tuple(slice(sizes[d]) for d in order)].permute(*back)
    return mask.expand(-1, -1, -1, keys), (B, H, Sq)


def make_tables(arch, plan, mask, launches=1, **schedule):
    """The tables of `compile_mask_blocks`, views of the buffer by name."""
    at = place(plan, *mask.shape)
    buffer = torch.full((at.words,), POISON, dtype=torch.int32)
    with emulate.device(arch, **schedule) as device, device.touching(mask, buffer):
        compile_tables(arch, plan)(mask, buffer)
    assert len(device.reports) == launches
    bits = buffer[: at.blocks].view(*mask.shape[:3], at.NB, -1) if at.blocks else None
    blocks = buffer[at.blocks : at.rank].view(-1, at.HB, at.MB, at.NB)
    return buffer, bits, blocks, buffer[at.rank :].view(-1, at.HB, at.MB, at.NB + 1)


def pairs(plan, mask):
    """Whether each pair is visible, and whether the mask changes it."""
    return (mask, ~mask) if mask.dtype == torch.bool else (mask != -torch.inf, mask != 0)


def kinds(plan, mask):
    """(Bm, HB, MB, NB): whether a block is visible, whether it is partial."""

    def any_in_block(flags):
        B, H, Sq, keys = flags.shape
        at = place(plan, B, H, Sq, keys)
        full = torch.zeros(B, at.HB * plan.heads, at.MB * plan.rows, at.NB * plan.keys, dtype=torch.bool)
        full[:, :H, :Sq, :keys] = flags
        shape = (B, at.HB, plan.heads, at.MB, plan.rows, at.NB, plan.keys)
        return full.view(shape).any(6).any(4).any(2)

    return [any_in_block(flags) for flags in pairs(plan, mask)]


@pytest.mark.parametrize(("arch", "plan"), one_of(3, [*zip(itertools.cycle(ARCHS), PLANS)]), ids=str)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_tables(arch, plan, data):
    mask, _ = data.draw(masks(plan))
    _, bits, blocks, rank = make_tables(arch, plan, mask)
    visible, mixed = kinds(plan, mask)
    count = visible.cumsum(-1)
    assert torch.equal(rank, torch.nn.functional.pad(count, (1, 0)).int())
    for index in itertools.product(*map(range, visible.shape[:3])):
        n = visible[index].nonzero()[:, 0]
        assert torch.equal(blocks[index][: len(n)], (2 * n + mixed[index][n]).int())
        assert (blocks[index][len(n) :] == POISON).all()
    if plan.dtype == "bool":
        assert torch.equal(shown_by(bits, plan, mask.shape[3]), mask)


LONG = [(MaskPlan("bool", 64, 128), 64, 17000), (MaskPlan("float32", 1, 64), 1, 34000)]
LONG += [(MaskPlan("bool", 32, 176, 2), 40, 8100), (MaskPlan("bfloat16", 16, 80, 4), 16, 6000)]


@pytest.mark.parametrize(("plan", "Sq", "keys"), one_of(2, LONG), ids=str)
@pytest.mark.parametrize("schedule", one_of(1, ["late", "fuzz"]))
def test_many_keys_of_few_queries_are_divided(plan, Sq, keys, schedule):
    torch.manual_seed(0)
    kind = torch.randint(0, 3, (1, plan.heads, 1, -(-keys // 70))).repeat_interleave(70, 3)[..., :keys]
    mask = ((kind == 2) | ((kind == 1) & (torch.rand(1, plan.heads, Sq, keys) < 0.3))).contiguous()
    if plan.dtype != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).to(getattr(torch, plan.dtype))
    _, bits, blocks, rank = make_tables("sm_90a", plan, mask, launches=2, schedule=schedule)
    visible, mixed = kinds(plan, mask)
    assert torch.equal(rank, torch.nn.functional.pad(visible.cumsum(-1), (1, 0)).int())
    for index in itertools.product(*map(range, visible.shape[:3])):
        n = visible[index].nonzero()[:, 0]
        assert torch.equal(blocks[index][: len(n)], (2 * n + mixed[index][n]).int())
    if plan.dtype == "bool":
        assert torch.equal(shown_by(bits, plan, keys), mask)


def shown_by(bits, plan, Sk):
    """The mask that the bits encode; beyond Sk they must all be 0."""
    k = torch.arange(plan.keys)
    word = k // 128 * 4 + k % 8 // 2
    bit = k % 128 // 8 * 2 + k % 2
    shown = (bits.long()[..., word] >> bit & 1).bool().flatten(-2)
    assert not shown[..., Sk:].any()
    return shown[..., :Sk]


TILES = [plan for plan in PLANS if plan.rows * plan.heads == TILE_ROWS]


@pytest.mark.parametrize(("plan", "by_pairs"), one_of(7, [*itertools.product(TILES, (True, False))]), ids=str)
@settings(max_examples=examples(3, 8), deadline=None, derandomize=True)
@given(data=st.data())
def test_a_tile_of_scores(by_pairs, plan, data):
    mask, (B, H, Sq) = data.draw(masks(plan))
    at = place(plan, B, H, Sq, mask.shape[3])
    first = data.draw(st.integers(0, at.NB))
    last = data.draw(st.integers(first, at.NB))
    arch = "sm_90a" if by_pairs else "sm_100a"
    buffer, *_ = make_tables(arch, plan, mask)
    scores = torch.randn(B, at.HB * plan.heads, at.MB * plan.rows, at.NB * plan.keys)
    out = torch.full_like(scores, POISON)
    with emulate.device(arch) as device, device.touching(mask, buffer, scores, out):
        compile_visiting(arch, plan, by_pairs)((mask, buffer), scores, out, first, last)

    visible = pairs(plan, mask)[0]
    scores = scores[:, :H, :Sq, : mask.shape[3]]
    changed = scores if plan.dtype == "bool" else scores + mask.double()
    visited = kinds(plan, mask)[0]
    visited[..., :first] = visited[..., last:] = False
    for dim, size in ((3, plan.keys), (2, plan.rows), (1, plan.heads)):
        if mask.shape[dim] > 1:
            visited = visited.repeat_interleave(size, dim).narrow(dim, 0, mask.shape[dim])
    wanted = torch.where(visited, torch.where(visible, changed, -torch.inf).float(), POISON)
    torch.testing.assert_close(out[:, :H, :Sq, : mask.shape[3]], wanted, rtol=1e-6, atol=1e-6)


def test_not_a_number_is_visible_and_a_change():
    plan = PLANS[-1]
    mask = torch.full((1, 1, 1, 300), -torch.inf, dtype=getattr(torch, plan.dtype))
    mask[..., 290] = torch.nan
    _, _, blocks, rank = make_tables("sm_90a", plan, mask)
    assert rank[..., -1].item() == 1 and blocks[..., 0].item() == 290 // plan.keys * 2 + 1


@pytest.mark.parametrize(("Sq", "launches"), [(1, 2), (43, 1)])
def test_more_blocks_than_threads(Sq, launches):
    """Keys are one part where there are many queries, else several."""
    plan = MaskPlan("bool", 1, 64)
    mask = torch.zeros(1, 1, Sq, 64 * 600, dtype=torch.bool)
    mask[..., 63 : 64 * 550] = True
    mask[..., -3:] = True
    if Sq == 1:
        mask = torch.cat([torch.ones(1, 1, 1, 64 * 500, dtype=torch.bool), mask], 3)
    _, _, blocks, rank = make_tables("sm_100a", plan, mask, launches)
    before, total = mask.shape[3] // 64 - 600, mask.shape[3] // 64
    n = torch.tensor([*range(before + 550), total - 1])
    assert torch.equal(blocks[0, 0, -1, : len(n)], (2 * n + ((n == before) | (n == total - 1))).int())
    wanted = torch.tensor([*range(before + 550), *[before + 550] * 50, before + 551])
    assert torch.equal(rank[0, 0, -1], wanted.int())
