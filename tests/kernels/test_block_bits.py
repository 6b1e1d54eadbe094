"""attn_mask's tables of what blocks and mask_mod show, against both by brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import examples, one_of
from flash4_torch.backends.flex import bits
from flash4_torch.flex.attention import traced
from flash4_torch.flex.block_mask import create_block_mask
from flash4_torch.flex_problem import FlexInputs
from flash4_torch.kernels.common import mask_tables
from flash4_torch.kernels.common.mask_tables import PANEL, MaskPlan
from flash4_torch.ops import CallOptions
from flash4_torch.ops.flex import describe
from flash4_torch.reference.flex import EMPTY, FULL, PARTIAL
from flash4_torch.testing import emulate
from test_block_tables import POISON, compiled, lists_of

B, H = 2, 4
BLOCKS = st.tuples(*[st.sampled_from([16, 48, 64, 128, 1000]) | st.integers(5, 90)] * 2)
LONGEST = 330


class Function(NamedTuple):
    """A mask_mod, and what it depends on besides positions: "b", "h" or nothing."""

    of: Callable[..., Tensor]
    reads: str = ""


torch.manual_seed(0)
DOCUMENTS, FACTORS = torch.arange(LONGEST) // 70, torch.rand(B, 5)
FUNCTIONS: dict[str, Function | None] = {
    "documents": Function(lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i + 40 >= j)),
    "heads": Function(lambda b, h, i, j: (i * j + h) % 3 != 0, "h"),
    "entries": Function(lambda b, h, i, j: FACTORS[b, j % 5] * i < 60.0, "b"),
    "nothing": None,
}


def shown_by(function: Function | None, state: Tensor, block: tuple[int, int], lengths: Any) -> Tensor:
    """What is shown, (B, H, Sq, Sk)."""
    lanes = [
        torch.arange(n).view([-1 if at == dim else 1 for dim in range(4)])
        for at, n in enumerate((B, H, *lengths))
    ]
    whole = state.expand(B, H, -1, -1)[:, :, (lanes[2] // block[0])[0, 0], (lanes[3] // block[1])[0, 0]]
    shown = torch.ones((), dtype=torch.bool) if function is None else function.of(*lanes)
    return (whole == FULL) | (whole == PARTIAL) & shown


def made(arch: str, inputs: FlexInputs, plan: MaskPlan, is_transposed: bool, schedule: str) -> Any:
    """The mask as kernels take it, in memory that had something else."""

    def find(entry: str, static: tuple[object, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            listed, full, states, _, captured, _, mask, tables = args
            tables.fill_(POISON)
            states.fill_(77)
            tensors = () if captured is None else captured[0] or ()
            touched = *listed, *(full or ()), states, *tensors, mask, tables
            with emulate.device(arch, schedule=schedule) as device, device.touching(*touched):
                compiled(arch, entry, static)(*args)

        return launch

    problem = describe(inputs, CallOptions(1.0))
    return bits.tables_of(inputs, problem, None)(plan, find, is_transposed)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("arch", one_of(3, ["sm_90a", "sm_100a", "sm_80"]))
@settings(max_examples=examples(12, 100), deadline=None, derandomize=True)
@given(
    lengths=st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST)),
    block=BLOCKS,
    outer=st.tuples(st.sampled_from([1, B]), st.sampled_from([1, H])),
    tile=st.sampled_from([(64, 176, 2), (192, 80, 1), (16, 128, 4)][: examples(2, 3)]),
    is_transposed=st.booleans(),
    has_full=st.booleans(),
    seed=st.integers(0, 99),
    schedule=st.sampled_from(["eager", "fuzz"]),
)
def test_tables_are_what_blocks_and_mask_mod_show(
    arch: str,
    name: str,
    lengths: tuple[int, int],
    block: tuple[int, int],
    outer: tuple[int, int],
    tile: tuple[int, int, int],
    is_transposed: bool,
    has_full: bool,
    seed: int,
    schedule: str,
) -> None:
    """Tiles that see nothing have no bits, nor have keys beyond the end."""
    torch.manual_seed(seed)
    function = FUNCTIONS[name]
    state = torch.randint(
        0, 3 if has_full else 2, (*outer, *(-(-n // own) for n, own in zip(lengths, block, strict=True)))
    )
    lists = *lists_of(state, PARTIAL, (1, 1), torch.int64), *lists_of(state, FULL, (1, 1), torch.int32)
    if function is None:
        state = torch.where(state == EMPTY, EMPTY, FULL)
    q, k = torch.empty(B, lengths[0], H, 8), torch.empty(B, lengths[1], H, 8)
    mask_mod = None if function is None else function.of
    mods = traced(
        q, k, None, mask_mod, create_block_mask(lambda b, h, i, j: i >= j, None, None, *lengths, "cpu")
    )
    fields = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    mods = mods._replace(
        **dict(zip(fields, lists if has_full else (*lists[:2], None, None), strict=True)),
        q_block=block[0],
        kv_block=block[1],
    )
    rows, keys, heads = tile
    plan = MaskPlan("bool", rows, keys, 1 if is_transposed else heads)
    mask, tables = made(arch, FlexInputs(q, k, k, mods), plan, is_transposed, schedule)

    wanted = shown_by(function, state, block, lengths)
    reads = "" if function is None else function.reads
    if outer[0] == 1 and reads != "b":
        wanted = wanted[:1]
    if outer[1] == 1 and reads != "h":
        wanted = wanted[:, :1]
    if is_transposed:
        wanted = wanted.transpose(2, 3)
    assert mask.shape == wanted.shape
    check(plan, tables, wanted)


def check(plan: MaskPlan, tables: Tensor, wanted: Tensor) -> None:
    at = mask_tables.place(plan, *wanted.shape)
    words, blocks, rank, rest = tables.tensor_split([at.blocks, at.rank, at.words])
    assert not rest.numel()
    words = words.view(*wanted.shape[:3], at.NB, 4 * plan.panels)
    lists = len(wanted), at.HB, at.MB
    blocks, rank = blocks.view(*lists, at.NB), rank.view(*lists, at.NB + 1)
    for b, n, m in torch.cartesian_prod(*map(torch.arange, lists)).view(-1, 3).tolist():
        heads, rows = slice(n * plan.heads, (n + 1) * plan.heads), slice(m * plan.rows, (m + 1) * plan.rows)
        parts = wanted[b, heads, rows].split(plan.keys, 2)
        seen = [2 * c + int(not x.all()) for c, x in enumerate(parts) if x.any()]
        assert blocks[b, n, m, : len(seen)].tolist() == seen
        assert rank[b, n, m].tolist() == [sum(x // 2 < c for x in seen) for c in range(at.NB + 1)]
        for c in (x // 2 for x in seen):
            found = unpacked(words[b, heads, rows, c])
            assert torch.equal(found[..., : parts[c].shape[2]], parts[c])
            assert not found[..., parts[c].shape[2] :].any()


def unpacked(words: Tensor) -> Tensor:
    """The bits of (.., words) by the order of their keys."""
    key = torch.arange(words.shape[-1] // 4 * PANEL)
    own = words[..., key // PANEL * 4 + key % 8 // 2]
    return (own >> (key % PANEL // 8 * 2 + key % 2) & 1).bool()
