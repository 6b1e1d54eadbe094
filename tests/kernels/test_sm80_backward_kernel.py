"""The backward by mma.sync in the emulator, with its race checks: every switch, against exact results."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from everything import examples, one_of
from flash4_torch.configs.types import Sm80Backward
from kernel_calls import check_gradients, drawn
from kernel_calls import static as static_of
from kernel_runs import (
    every_tile_is_drawn_once,
    gradients_are_alone,
    gradients_are_right,
    run_backward,
    sums_have_an_order,
    unseen_keys_have_no_gradient,
)
from kernel_traits import few, of_few
from sm80_kernels import backwards

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

static = partial(static_of, Sm80Backward)
CAUSAL = {"right": True}
WINDOW = {"left": True, "right": True}
SOFTCAP = {"softcap": True, "scaled": True}
ROUNDED = {"round_weights": True}
OWN = {"own_in_regs": True, "dq_row_mmas": 2}
# (warps, column warps, queries, stages)
STATICS = {
    "full": static(64, 64, (8, 1, 64, 2)),
    "causal": static(64, 64, (4, 1, 64, 2), "float16", **CAUSAL),
    "no tail": static(64, 64, (4, 1, 64, 1), ragged_k=False, **CAUSAL),
    "three stages": static(64, 64, (4, 1, 64, 3), "float16", **WINDOW),
    "128 columns": static(128, 128, (8, 1, 64, 1), **CAUSAL),
    "128 columns, rounded": static(128, 128, (8, 1, 64, 2), "float16", **ROUNDED, **WINDOW),
    "128 queries": static(64, 64, (8, 1, 128, 1), **ROUNDED, **CAUSAL),
    "96 columns": static(96, 96, (4, 1, 64, 2), "float16", **CAUSAL),
    "96 columns, eight warps": static(96, 80, (8, 1, 64, 1), **WINDOW),
    "72 and 40 columns, eight warps": static(72, 40, (8, 1, 64, 1), **CAUSAL),
    "few columns": static(8, 24, (8, 2, 64, 1), "float16", **CAUSAL),
    "two column warps": static(64, 128, (8, 2, 64, 2), **CAUSAL),
    "two column warps, one stage": static(192, 128, (4, 2, 64, 1), "float16", **WINDOW),
    "wide": static(256, 256, (8, 2, 64, 1), **CAUSAL),
    "wide, four column warps": static(200, 256, (4, 4, 64, 1), "float16", left=True),
    "varlen": static(64, 64, (8, 1, 64, 2), varlen=True, **CAUSAL),
    "varlen, shared": static(40, 72, (8, 2, 64, 1), "float16", varlen=True),
    "in order": static(64, 64, (8, 1, 64, 2), deterministic=True),
    "in order, causal": static(128, 64, (8, 1, 64, 1), "float16", deterministic=True, **CAUSAL),
    "in order, packed": static(64, 64, (4, 2, 64, 2), varlen=True, deterministic=True, **WINDOW),
    "softcap": static(64, 64, (8, 1, 64, 2), **SOFTCAP, **CAUSAL),
    "scaled": static(64, 32, (4, 1, 64, 1), "float16", scaled=True),
    "bool mask": static(64, 64, (8, 1, 64, 2), mask="bool"),
    "bool mask, shared": static(64, 128, (8, 2, 64, 1), "float16", mask="bool", **CAUSAL),
    "bool mask, four column warps": static(256, 64, (4, 4, 64, 1), mask="bool"),
    "bfloat16 mask": static(64, 64, (4, 1, 64, 2), mask="bfloat16", scaled=True, **WINDOW),
    "float16 mask": static(64, 64, (4, 1, 64, 1), "float16", mask="float16", scaled=True, dmask=True),
    "float32 mask": static(64, 64, (8, 2, 64, 1), mask="float32", dmask=True, deterministic=True, **SOFTCAP),
    "dropout": static(64, 64, (8, 1, 64, 2), dropout=True),
    "dropout, 128 queries": static(64, 64, (8, 1, 128, 1), "float16", dropout=True, **ROUNDED, **CAUSAL),
    "dropout, bool mask": static(128, 128, (8, 2, 64, 1), dropout=True, mask="bool"),
    "dropout, four column warps": static(64, 256, (4, 4, 64, 1), "float16", dropout=True, **CAUSAL),
    "dropout, halves of dQ": static(256, 208, (4, 4, 64, 1), dropout=True, **ROUNDED, **CAUSAL),
    "dropout, windows": static(64, 48, (4, 1, 64, 2), "float16", dropout=True, varlen=True, **WINDOW),
    "dropout, two MMAs": static(128, 128, (8, 2, 64, 2), key_mmas=2, dropout=True, **CAUSAL),
    "dropout, two MMAs, wide": static(256, 200, (8, 4, 64, 1), "float16", key_mmas=2, dropout=True),
    "dropout, two MMAs, alone": static(40, 64, (4, 1, 64, 1), key_mmas=2, dropout=True, varlen=True),
    "varlen, everything": static(
        128, 64, (8, 1, 64, 1), varlen=True, dropout=True, deterministic=True, **SOFTCAP, **WINDOW
    ),
    "two MMAs": static(128, 128, (8, 2, 64, 2), key_mmas=2, **CAUSAL),
    "two MMAs, wide": static(256, 200, (8, 4, 64, 1), "float16", key_mmas=2, left=True),
    "two MMAs, in order": static(
        96, 80, (4, 2, 64, 1), key_mmas=2, varlen=True, deterministic=True, **SOFTCAP, **WINDOW
    ),
    "two MMAs, bool mask": static(96, 80, (8, 2, 64, 2), "float16", key_mmas=2, mask="bool", left=True),
    "two MMAs, bfloat16 mask": static(
        64, 40, (8, 2, 64, 2), key_mmas=2, mask="bfloat16", scaled=True, **CAUSAL
    ),
    "two MMAs, float32 mask": static(
        128, 200, (8, 4, 64, 1), "float16", key_mmas=2, mask="float32", scaled=True, dmask=True
    ),
    "two MMAs, alone": static(40, 64, (4, 1, 64, 2), "float16", key_mmas=2, ragged_k=False, **CAUSAL),
    "own in registers": static(128, 96, (8, 2, 64, 2), key_mmas=2, **OWN, **CAUSAL),
    "own in registers, eights": static(96, 128, (8, 2, 64, 2), "float16", key_mmas=2, **OWN, ragged_k=False),
    "own in registers, copies after S": static(
        80, 96, (8, 2, 64, 2), key_mmas=2, copies_after_scores=True, **OWN, **WINDOW
    ),
    "own in registers, dropout": static(80, 96, (8, 2, 64, 2), key_mmas=2, dropout=True, **OWN, **WINDOW),
    "own in registers, dropout, copies after S": static(
        96, 72, (8, 2, 64, 2), "float16", key_mmas=2, copies_after_scores=True, dropout=True, **OWN, **CAUSAL
    ),
    "own in registers, in order, copies after S": static(
        72, 96, (8, 2, 64, 2), key_mmas=2, copies_after_scores=True, deterministic=True, **OWN, **CAUSAL
    ),
    "own in registers, in order": static(
        96, 40, (8, 2, 64, 1), "float16", key_mmas=2, deterministic=True, varlen=True, **OWN, **CAUSAL
    ),
    "own in registers, four column warps": static(256, 192, (8, 4, 64, 1), key_mmas=2, **OWN),
    "own in registers, two parts": static(96, 64, (8, 2, 128, 1), query_parts=2, **OWN, **WINDOW),
    "32 rows of dQ, two parts": static(
        64, 48, (4, 1, 64, 2), "float16", key_mmas=2, query_parts=2, dq_row_mmas=2, dropout=True
    ),
    "two parts": static(64, 64, (4, 1, 64, 2), key_mmas=2, query_parts=2, scores_by_parts=True, **CAUSAL),
    "two parts, no loop": static(64, 64, (4, 1, 64, 2), "float16", key_mmas=2, query_parts=2),
    "two parts, no loop, packed": static(48, 64, (4, 1, 64, 2), key_mmas=2, query_parts=2, varlen=True),
    "two parts, window": static(
        40, 24, (4, 1, 64, 2), "float16", key_mmas=2, query_parts=2, scores_by_parts=True, **WINDOW
    ),
    "two parts, in order": static(
        64, 40, (4, 1, 64, 1), "float16", key_mmas=2, query_parts=2, deterministic=True, varlen=True, **WINDOW
    ),
    "two parts, dropout": static(
        64, 64, (4, 1, 64, 2), key_mmas=2, query_parts=2, scores_by_parts=True, dropout=True, **CAUSAL
    ),
    "two parts, dropout, packed": static(
        64, 48, (4, 1, 64, 2), "float16", key_mmas=2, query_parts=2, dropout=True, varlen=True
    ),
    "two parts, bool mask": static(40, 64, (4, 1, 64, 2), key_mmas=2, query_parts=2, mask="bool", left=True),
    "two parts, shared": static(
        128, 64, (8, 2, 128, 1), "float16", query_parts=2, scores_by_parts=True, mask="bool"
    ),
    "two parts, bfloat16 mask": static(
        64, 64, (4, 1, 64, 1), query_parts=2, mask="bfloat16", scaled=True, dmask=True
    ),
    "512 columns": static(512, 448, (8, 4, 64, 1), **CAUSAL),
    "512 columns, in order": static(
        264, 512, (8, 4, 64, 1), "float16", deterministic=True, varlen=True, dropout=True, **WINDOW
    ),
    "320 columns, two MMAs": static(320, 264, (8, 4, 64, 1), "float16", key_mmas=2, dropout=True, **CAUSAL),
    "eight queries": static(320, 512, (8, 4, 32, 1), "float16", dropout=True, **CAUSAL),
    "eight queries, two stages": static(512, 264, (8, 4, 32, 2), varlen=True, **WINDOW),
    "eight queries, narrow": static(
        64, 40, (8, 4, 32, 1), "float16", deterministic=True, varlen=True, **SOFTCAP, **CAUSAL
    ),
    "eight queries, 16 keys": static(448, 264, (4, 4, 32, 1), "float16", **CAUSAL),
    "eight queries, everything": static(
        512, 328, (4, 4, 32, 1), varlen=True, dropout=True, deterministic=True, **SOFTCAP, **WINDOW
    ),
    "eight queries, bool mask": static(
        296, 320, (4, 4, 32, 1), mask="bool", deterministic=True, dropout=True, **CAUSAL
    ),
    "eight queries, float16 mask": static(
        384, 72, (8, 4, 32, 1), "float16", mask="float16", scaled=True, dmask=True, left=True
    ),
    "eight queries, float32 mask": static(
        256, 192, (8, 4, 32, 1), mask="float32", dmask=True, dropout=True, **SOFTCAP
    ),
    "eight queries, float32 mask, 16 keys": static(64, 512, (4, 4, 32, 1), mask="float32", scaled=True),
}
FLOAT32 = {
    "float32": static(64, 64, (4, 1, 64, 2), "float32", **CAUSAL),
    "TF32": static(64, 64, (4, 1, 64, 1), "float32", tf32=True),
    "shared": static(128, 128, (8, 2, 64, 1), "float32", **WINDOW),
    "shared, TF32": static(72, 128, (8, 2, 64, 1), "float32", tf32=True, ragged_k=False, **CAUSAL),
    "four column warps": static(128, 40, (8, 4, 64, 1), "float32", mask="bool", dropout=True, **CAUSAL),
    "varlen": static(
        40, 64, (8, 2, 64, 2), "float32", varlen=True, deterministic=True, dropout=True, **WINDOW
    ),
    "float32 mask": static(
        64,
        64,
        (8, 2, 64, 1),
        "float32",
        mask="float32",
        dmask=True,
        softcap=True,
        large_softcap=True,
        scaled=True,
    ),
    "two MMAs, bool mask": static(128, 72, (8, 4, 64, 1), "float32", key_mmas=2, mask="bool", **CAUSAL),
    "256 columns": static(256, 192, (8, 4, 64, 1), "float32", varlen=True, **CAUSAL),
    "eight queries": static(192, 256, (8, 4, 32, 1), "float32", deterministic=True, dropout=True, **CAUSAL),
    "eight queries, TF32": static(256, 136, (8, 4, 32, 1), "float32", tf32=True, varlen=True, **WINDOW),
    "read ahead": static(128, 128, (8, 4, 64, 1), "float32", key_mmas=2, reads_ahead=True, **WINDOW),
    "read ahead, 192 columns": static(192, 136, (8, 2, 32, 1), "float32", reads_ahead=True, **CAUSAL),
    "read ahead, eight queries": static(256, 256, (8, 4, 32, 1), "float32", reads_ahead=True, dropout=True),
    "read ahead, TF32": static(
        64, 72, (8, 2, 64, 1), "float32", tf32=True, reads_ahead=True, varlen=True, **WINDOW
    ),
    "eight queries, float32 mask": static(
        128, 96, (8, 4, 32, 1), "float32", mask="float32", dmask=True, dropout=True, **SOFTCAP
    ),
    "16 keys, TF32": static(192, 160, (2, 2, 32, 1), "float32", tf32=True, mask="bool", **CAUSAL),
}
STATICS.update({f"float32: {name}": kernel for name, kernel in FLOAT32.items()})
MASKED = {name: kernel for name, kernel in STATICS.items() if kernel[0].float_mask}
ALWAYS = (
    "full",
    "wide, four column warps",
    "two parts, dropout",
    "own in registers, dropout, copies after S",
    "float32: TF32",
    "float32: varlen",
    "float16 mask",
    "320 columns, two MMAs",
    "eight queries, narrow",
    "eight queries, everything",
)
PLACED = backwards()
FEW = few(STATICS, *ALWAYS)


@pytest.mark.parametrize("name", FEW)
# No shrinking: a launch is slow, and its error says what is wrong.
@settings(max_examples=examples(2, 5), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    gradients_are_right(STATICS[name], data)


AHEAD = [name for name, (_, config) in STATICS.items() if config.reads_ahead]


@pytest.mark.parametrize("name", of_few(FEW, AHEAD))
def test_reading_ahead_changes_no_bit(name: str) -> None:
    """dK and dV are the same; sums of dQ have no order."""
    features, config = STATICS[name]
    kernels = ((features, config._replace(reads_ahead=ahead)) for ahead in (True, False))
    now, then = (run_backward(kernel, drawn(kernel)) for kernel in kernels)
    assert torch.equal(now.dk, then.dk) and torch.equal(now.dv, then.dv)


@pytest.mark.parametrize(
    "name", [*one_of(91, list(PLACED)), *one_of(10, [n for n in PLACED if "sm_90a" in n][::-1])]
)
@settings(max_examples=examples(2, 3), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_every_config_of_the_tables(name: str, data: st.DataObject) -> None:
    """Whatever a table takes is right on a GPU that the table is for."""
    arch, kernel = PLACED[name]
    gradients_are_right(kernel, data, arch)


# CI compiles the first one anyway.
@pytest.mark.parametrize(
    "name",
    one_of(
        4,
        [
            "own in registers, dropout, copies after S",
            "own in registers, copies after S",
            "own in registers, in order, copies after S",
            "512 columns",
        ],
    ),
)
def test_blocks_of_a_tile_overlap(name: str) -> None:
    """Tiles of six blocks have right gradients, though a warp may begin a block, or its copies, before others
    have used the one before: a single block, which `test_values` may draw, would need none of what orders
    them.
    """
    kernel = STATICS[name]
    p = 0.3 if kernel[0].dropout else 0.0
    call = drawn(kernel, lengths=((150,), (200,)), left=200, right=60, p=p)
    for schedule in ("late", "fuzz"):
        check_gradients(kernel, call, run_backward(kernel, call, schedule=schedule))


@pytest.mark.parametrize(
    "name", of_few(FEW, ["in order, causal", "in order, packed", "eight queries, narrow"])
)
def test_sums_have_an_order(name: str) -> None:
    sums_have_an_order(STATICS[name])


@pytest.mark.parametrize("name", of_few(FEW, ["in order, causal", "full"]))
def test_every_tile_is_drawn_once(name: str) -> None:
    every_tile_is_drawn_once(STATICS[name], 3)


@pytest.mark.parametrize("name", of_few(FEW, ["no tail", "varlen, everything", "eight queries, narrow"]))
def test_unseen_keys_have_no_gradient(name: str) -> None:
    unseen_keys_have_no_gradient(STATICS[name])


@pytest.mark.parametrize("name", of_few(FEW, ["varlen", "eight queries, narrow"]))
@pytest.mark.parametrize("poison", one_of(2, [math.nan, math.inf]))
def test_sequences_do_not_see_their_neighbours(name: str, poison: float) -> None:
    gradients_are_alone(STATICS[name], poison)


def test_gradients_of_a_part_have_its_dropout() -> None:
    features, config = STATICS["dropout"]
    kernel = features._replace(dropout_of_part=True), config
    state = torch.tensor([5, 7, 32, 48, 3, 8, 2])
    call = drawn(kernel, lengths=((130,) * 2, (150,) * 2), p=0.4, rng_state=state)
    check_gradients(kernel, call, run_backward(kernel, call))


# The order in memory of a mask's dimensions (B, Hq, Sq, Sk), the last one's pitch, and which are broadcast.
LIES = {
    "vectors": ((0, 1, 2, 3), 160, ()),
    "vectors of one query": ((0, 1, 2, 3), 160, (2,)),
    "vectors of one head": ((0, 1, 2, 3), 152, (1,)),
    "numbers": ((0, 1, 2, 3), 151, ()),
    "numbers, queries side by side": ((0, 1, 3, 2), 144, (0,)),
    "numbers, heads side by side": ((0, 2, 3, 1), 3, ()),
    "numbers of one key": ((0, 1, 2, 3), 1, (3,)),
}


@pytest.mark.parametrize("lies", one_of(3, list(LIES)))
@pytest.mark.parametrize("name", of_few(FEW, list(MASKED)))
def test_masks_lie_in_any_order(name: str, lies: str) -> None:
    """Tiles of a mask are copied as they lie, whatever surrounds it in memory."""
    kernel, (order, pitch, broadcast) = STATICS[name], LIES[lies]
    sizes = [1 if d in broadcast else n for d, n in enumerate((2, 2, 130, 150))]
    dtype = getattr(torch, kernel[0].mask)
    memory = torch.full([*(sizes[d] for d in order[:3]), pitch], math.nan, dtype=dtype)
    mask = memory[..., : sizes[order[3]]].permute([order.index(d) for d in range(4)])
    mask.copy_(torch.randn(sizes, generator=torch.Generator().manual_seed(1)))
    mask[:, :, 64:128, :128] = 0.0  # a block that the mask leaves alone
    mask[:, :, 20:, 140:] = -math.inf
    call = drawn(kernel, lengths=((130,) * 2, (150,) * 2), mask=mask)
    check_gradients(kernel, call, run_backward(kernel, call))
