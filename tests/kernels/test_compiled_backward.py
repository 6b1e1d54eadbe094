"""The backward up to its launches: the kernels' arguments, and the use of their results."""

from __future__ import annotations

import itertools
import math
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from flash4_torch import testing
from flash4_torch.backends.compiled import (
    GROUP_REDUCE,
    MASK_TRANSPOSE,
    SM90A,
    SM100A,
    Target,
    backward,
    limits,
    masks,
)
from flash4_torch.backends.compiled.targets import SM80
from flash4_torch.configs import sm80_backward, sm90_backward, sm100_backward
from flash4_torch.configs.sizes import BackwardSizes
from flash4_torch.configs.types import SHARED_MEMORY, Features, Scope
from flash4_torch.kernels.common.mask_tables import MaskPlan
from flash4_torch.problem import Extent
from on_cpu import gpu, name_of
from test_compiled import EACH_KERNEL, half, problem
from test_laws import packed


@EACH_KERNEL
@given(packed(), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_varlen(
    target: Target,
    drawn: tuple[list[int], list[int], dict[str, Any]],
    dtype: torch.dtype,
    deterministic: bool,
) -> None:
    q_lengths, k_lengths, kwargs = drawn
    inputs = [
        torch.randn(sum(lengths), H, d).bfloat16().requires_grad_()
        for lengths, H, d in ((q_lengths, 4, 8), (k_lengths, 2, 8), (k_lengths, 2, 5))
    ]
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=dtype) for n in (q_lengths, k_lengths)]
    longest = {f"max_seqlen_{x}": max(n, default=0) for x, n in (("q", q_lengths), ("k", k_lengths))}
    dout, dlse = torch.randn(sum(q_lengths), 4, 5).bfloat16(), torch.randn(4, sum(q_lengths))

    def gradients(dtype: torch.dtype = torch.bfloat16) -> Any:
        torch.manual_seed(3)
        out, lse = flash4_torch.attention_varlen(
            *(x.to(dtype) for x in inputs),
            cu_seqlens_q=ends[0],
            cu_seqlens_k=ends[1],
            return_lse=True,
            **{**longest, **kwargs, "deterministic": deterministic},
        )
        return torch.autograd.grad((out, lse), inputs, (dout.to(dtype), dlse.to(lse.dtype)))

    with gpu(target), testing.backends_used() as used, testing.poisoned_memory():
        ours = gradients()
    assert used[("attention_varlen_backward", name_of(target))] == 1
    for found, exact, peer in zip(ours, gradients(torch.float64), gradients(), strict=True):
        assert found.is_contiguous()
        testing.assert_close_as_peer(found, exact.double(), peer)


def launched(dout: Tensor | None = None, target: Target = SM90A, **kwargs: Any) -> Any:
    """The main kernel's launch for plain q, k and v."""
    q, k, v = (half(2, 24, 4, 16).requires_grad_() for _ in range(3))
    with gpu(target) as machine:
        out = flash4_torch.attention(q, k, v, **kwargs)
        out.backward(torch.ones_like(out) if dout is None else dout)
    (launch,) = machine.backwards
    return launch


@pytest.mark.parametrize(
    "dout", [half(2, 24, 4, 16), half(2, 4, 24, 16).transpose(1, 2), half(2, 24, 8, 32)[:, :, 2:6, 8:24]]
)
def test_a_readable_gradient_is_not_copied(dout: Tensor) -> None:
    assert launched(dout).args[3].data_ptr() == dout.data_ptr()


@pytest.mark.parametrize(
    "dout",
    [half(1, 1, 1, 1).expand(2, 24, 4, 16), half(2, 24, 4, 32)[..., ::2], half(2, 24, 4, 19)[..., 1:17]],
)
def test_others_are(dout: Tensor) -> None:
    assert torch.equal(launched(dout).args[3], dout)


@pytest.mark.parametrize(
    ("shape", "copied"),
    [((24, 24), True), ((2, 4, 24, 24), True), ((2, 1, 1, 24), False), ((24, 1), False), ((1, 1), False)],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("few", [0, 2 * 4 * 24 * 24])
def test_masks_are_turned(
    shape: tuple[int, ...], copied: bool, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel transposes many numbers; few stay in place, and bool masks, of which bits are read."""
    monkeypatch.setattr(masks, "_FEW", few)
    copied = copied and not few
    mask = torch.rand(shape).gt(0.3).to(dtype)
    for prepared in (False, True):
        launch, built = launched_by(prepared, attn_mask=mask)
        turned, _ = launch.args[13]
        assert torch.equal(turned, mask.expand(*turned.shape[:2], 24, turned.shape[2]).transpose(2, 3))
        shares = turned.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
        assert shares == (not copied or dtype == torch.bool)
        assert (MASK_TRANSPOSE in built) == copied


@pytest.mark.parametrize(
    ("shape", "strides", "transposed"),
    [
        ((1, 1, 128, 128), None, True),
        ((1, 1, 64, 64), None, False),
        ((1, 1, 130, 100), None, False),  # queries begin at any byte
        ((1, 1, 130, 100), (1, 1, 112, 1), True),
        ((2, 1, 128, 100), (128 * 112 + 8, 1, 112, 1), False),
        ((1, 1, 128, 128), (1, 1, 1, 128), False),  # neighbours already
        ((1, 1, 128, 128), (1, 1, 2048, 16), False),  # neither are neighbours
        ((1, 1, 260, 260), None, True),
    ],
)
def test_small_bool_masks_are_transposed_where_vectors_load_them(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, transposed: bool
) -> None:
    dense = torch.empty(shape).stride() if strides is None else strides
    mask = torch.ones(4 * dense[0] + 4 * 300 * 300, dtype=torch.bool).as_strided(shape, dense)
    assert masks._is_transposed(MaskPlan("bool", 128, 64), mask) == transposed
    assert not masks._is_transposed(MaskPlan("bfloat16", 128, 64), mask) or mask.numel() > masks._FEW


def launched_by(prepared: bool, **kwargs: Any) -> tuple[Any, list[str]]:
    """The main kernel's launch of a first call, or of one like it afterwards; the entries that were found."""
    q, k, v = (half(2, 24, 4, 16).requires_grad_() for _ in range(3))
    with gpu() as machine:
        for _ in range(3 if prepared else 1):
            flash4_torch.attention(q, k, v, **kwargs).sum().backward()
    return machine.backwards[-1], [entry for entry, *_ in machine.built]


@pytest.mark.parametrize(
    ("Sq", "dims"), [(24, (0, 1)), (21, (1,)), (24, (2,)), (24, (3,)), (24, (0, 1, 2, 3))]
)
@pytest.mark.parametrize("target", [SM90A, SM80], ids=lambda target: target.arch)
def test_what_a_mask_repeats_is_not_copied(
    target: Target, Sq: int, dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expanded masks give the gradients of those that broadcast; kernels get what is repeated once."""
    monkeypatch.setattr(masks, "_FEW", 0)
    q, k, v = half(2, Sq, 4, 16), half(2, 24, 4, 16), half(2, 24, 4, 16)
    sizes = 2, 4, Sq, 24
    mask = torch.randn([1 if d in dims else n for d, n in enumerate(sizes)])
    results = []
    for attn_mask in (mask, mask.expand(sizes), mask.expand(sizes).contiguous()):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        with gpu(target) as machine:
            flash4_torch.attention(*inputs, attn_mask=attn_mask).sum().backward()
        results.append([x.grad for x in inputs])
        turned, _ = machine.backwards[0].args[13]
        if attn_mask is not mask and attn_mask.stride() != (4 * Sq * 24, Sq * 24, 24, 1) and target is SM90A:
            outer = [1 if d in dims else n for d, n in zip((0, 1, 3), (2, 4, 24), strict=True)]
            assert list(turned.shape) == [*outer, Sq]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dims", [(2,), (3,), (2, 3), (0, 3), (1,), (0, 1, 2, 3)])
@pytest.mark.parametrize("room", [0, 1, 2])
@pytest.mark.parametrize("target", [SM90A, SM80], ids=lambda target: target.arch)
def test_a_number_of_a_mask_is_not_added_to_from_all_scores(
    target: Target, room: int, dims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels add to one number for each score of the mask's heads, and of all heads in deterministic calls,
    where there is room.
    """
    Sk = 26 + room  # what is decided for sizes is kept
    sizes = [2, 4, 24, Sk]
    shape = [1 if d in dims else n for d, n in enumerate(sizes)]
    of_heads = [*shape[:2], 24, Sk]
    monkeypatch.setattr(backward, "_MOST_DMASK", (1, math.prod(of_heads), math.prod(sizes))[room])
    inputs = [half(2, S, 4, 16).requires_grad_() for S in (24, Sk, Sk)]
    mask = torch.randn(sizes)
    mask = mask[tuple(slice(n) for n in shape)].clone().requires_grad_()
    has_order = (shape, of_heads, sizes)[room] == sizes
    with gpu(target) as machine, testing.backends_used() as used:
        out = flash4_torch.attention(*inputs, attn_mask=mask, deterministic=False)
        (ours,) = torch.autograd.grad(out.sum(), mask)
        flash4_torch.attention(*inputs, attn_mask=mask, deterministic=True).sum().backward()
        expected = [of_heads if room else shape] + [sizes] * has_order
        assert [list(launch.args[14].mT.shape) for launch in machine.backwards] == expected
    assert used[("attention_backward", name_of(target))] == 1 + has_order
    exact, peer = (
        torch.autograd.grad(testing.reference(*inputs, attn_mask=mask, dtype=t)[0].sum(), mask)[0]
        for t in (torch.float64, torch.bfloat16)
    )
    testing.assert_close_as_peer(ours, exact.double(), peer, noise=0.05)


def test_a_mask_that_is_turned_already_is_read_in_place() -> None:
    mask = torch.rand(24, 24).T
    turned, _ = launched(attn_mask=mask).args[13]
    assert turned.data_ptr() == mask.data_ptr() and turned.stride(3) == 1


@pytest.mark.parametrize(
    ("order", "copied"), [((0, 1, 2, 3), False), ((0, 1, 3, 2), False), ((0, 2, 3, 1), True)]
)
def test_masks_that_are_copied_by_tiles_are_read_in_place(order: tuple[int, ...], copied: bool) -> None:
    """Either keys or queries of a floating mask have to be neighbours, where its tiles are copied."""
    mask = torch.rand([(2, 4, 24, 24)[d] for d in order]).permute([order.index(d) for d in range(4)])
    turned, _ = launched(target=SM80, attn_mask=mask).args[13]
    assert torch.equal(turned, mask.transpose(2, 3))
    assert (turned.data_ptr() != mask.data_ptr()) == copied


@pytest.mark.parametrize(("B", "Sq", "Sk"), [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
def test_nothing_is_launched_for_nothing(B: int, Sq: int, Sk: int) -> None:
    q, k = half(B, Sq, 2, 13).requires_grad_(), half(B, Sk, 2, 13).requires_grad_()
    mask = torch.randn(1, 1, Sq, Sk).requires_grad_()
    with gpu() as machine, testing.poisoned_memory():
        out = flash4_torch.attention(q, k, k, attn_mask=mask)
        grads = torch.autograd.grad(out.sum(), (q, k, mask))
    assert not machine.backwards
    for grad, x in zip(grads, (q, k, mask), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize(
    ("mask", "S", "served"),
    [
        ("....", 512, True),
        ("1...", 512, True),
        ("1..1", 512, True),
        ("....", 9000, True),
        ("1...", 9000, False),
    ],
)
def test_sums_in_any_order_are_not_deterministic(mask: str, S: int, served: bool) -> None:
    call = problem(backward=True, mask=f"float32:{mask}", dmask=True, deterministic=True)
    call = call._replace(extent=call.extent._replace(Sq=S, Sk=S))
    assert limits(SM90A, call._replace(spec=call.spec._replace(deterministic=False))) == ()
    assert (not limits(SM90A, call)) == served


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("heads", "S", "whole"),
    [
        *[(2048, 256, True), (1024, 512, True), (1024, 513, False), (132, 512, True), (133, 512, False)],
        *[(119, 256, True), (118, 256, False), (1, 128, True), (1, 129, False)],
    ],
)
def test_whole_heads_are_short_and_keep_all_sms_busy(
    heads: int, S: int, whole: bool, deterministic: bool
) -> None:
    extent = Extent(heads, S, S, 1, 1)
    call = problem(backward=True, D=128, Dv=128, deterministic=deterministic, extent=extent)
    kernels = backward.decide(SM90A, call, 132, lambda entry, static: lambda *args: None)
    assert (kernels.config.scope == Scope.KV_HEAD) == (kernels.postprocess is None) == whole
    assert kernels.is_ordered == (deterministic and not whole)
    shapes = backward.shapes_of(*[torch.empty(heads, S, 1, 128, device="meta")] * 3, None, kernels)
    assert shapes.dq_acc[0] == (min(heads, 132) if whole else heads)
    assert kernels.config.preprocesses == (kernels.preprocess is None) == (whole and heads <= 132)


@pytest.mark.parametrize(
    ("Hk", "group", "S", "dlse", "alone"),
    [
        *[(2, 1, 128, False, True), (2, 1, 128, True, False), (2, 4, 128, False, True)],
        *[(132, 4, 128, False, True), (133, 4, 128, False, False), (1, 5, 128, False, False)],
    ],
)
def test_a_small_backward_is_one_launch(Hk: int, group: int, S: int, dlse: bool, alone: bool) -> None:
    """It is one if each KV head has a CTA, and few rows, whose lse has no gradient."""
    extent = Extent(1, S, S, Hk * group, Hk)
    call = problem(backward=True, extent=extent, group=group, dlse=dlse)
    asked: list[str] = []

    def find(entry: str, static: Any) -> Any:
        asked.append(entry)
        return lambda *args: None

    kernels = backward.decide(SM90A, call, 132, find)
    assert kernels.config.preprocesses == (asked == [SM90A.backward]) == alone


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("Hk", "S", "right", "apart"),
    [
        *[(3, 1024, 0, True), (3, 1023, 0, False), (4, 1024, 0, False), (12, 1024, 0, False)],
        *[(1, 4096, 0, True), (1, 4096, 9, True), (1, 16384, None, False)],
    ],
)
def test_many_query_heads_of_long_calls_are_apart(
    Hk: int, S: int, right: int | None, apart: bool, deterministic: bool
) -> None:
    """Sections then consist of query heads, as if none shared its KV head."""
    flags: dict[str, Any] = {"backward": True, "D": 128, "Dv": 128, "deterministic": deterministic}
    flags["band"] = problem().band._replace(right=right)
    call = problem(**flags, group=12 // Hk, extent=Extent(2, S, S, 12, Hk))
    asked: list[str] = []

    def find(entry: str, static: Any) -> Any:
        asked.append(entry)
        return lambda *args: None

    kernels = backward.decide(SM90A, call, 132, find)
    assert (
        (kernels.config.scope == Scope.Q_HEAD)
        == (kernels.group_reduce is not None)
        == (GROUP_REDUCE in asked)
        == apart
    )
    alike = problem(**flags, group=1, extent=Extent(2, S, S, 12, 12))
    config = kernels.config._replace(scope=Scope.KEY_TILE)
    section = backward.params_of(SM90A, alike, config, 132)
    assert (kernels.params == section) or not apart


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
def test_gradients_of_heads_apart(varlen: bool) -> None:
    shapes = ((1100, 4, 128), (1100, 1, 128), (1100, 1, 64))
    q, k, v = (half(*shape).requires_grad_() for shape in shapes)
    ends = torch.tensor([0, 60, 1100], dtype=torch.int32)

    def run(*inputs: Tensor) -> Tensor:
        if varlen:
            lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 1040, "max_seqlen_k": 1040}
            return flash4_torch.attention_varlen(*inputs, causal=True, **lengths)
        return flash4_torch.attention(*(x[None] for x in inputs), causal=True)

    with gpu() as machine, testing.poisoned_memory():
        ours = torch.autograd.grad(run(q, k, v).sum(), (q, k, v))
    assert [(launch.config.scope == Scope.Q_HEAD) for launch in machine.backwards] == [True]
    peer = torch.autograd.grad(run(q, k, v).sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for a, b, c in zip(ours, torch.autograd.grad(run(*exact).sum(), exact), peer, strict=True):
        testing.assert_close_as_peer(a, b, c)


SIZES = st.one_of(st.integers(1, 300), st.sampled_from([1024, 16384]), st.integers(1, 1 << 30))


TABLES = {
    "sm80": sm80_backward.LARGE,
    "sm86": sm80_backward.SMALL,
    "sm90, on request": sm80_backward.ON_REQUEST,
    "sm90": sm90_backward,
    "sm100": sm100_backward,
}


@pytest.mark.parametrize("configs", TABLES.values(), ids=TABLES)
@given(
    D=st.integers(1, 64),
    Dv=st.integers(1, 64),
    flags=st.tuples(*[st.booleans()] * 3),
    Sk=SIZES,
    end_masked=st.booleans(),
    alone=st.sampled_from([0, 1, 256, 1024, 5000]),
    group=st.sampled_from([1, 1, 3, 4]),
)
def test_what_is_chosen_is_reachable_and_fits(
    configs: ModuleType | sm80_backward.Table,
    D: int,
    Dv: int,
    flags: tuple[bool, ...],
    Sk: int,
    end_masked: bool,
    alone: int,
    group: int,
) -> None:
    varlen, left, right = flags
    features = Features("bfloat16", 8 * D, 8 * Dv, varlen, left, right)
    if configs.limits(features):
        return
    config = configs.backward(features, BackwardSizes(Sk, end_masked, alone, group))
    assert config in configs.reachable(features, group) and config in configs.reachable(features)
    has = configs.memory(features) if isinstance(configs, sm80_backward.Table) else SHARED_MEMORY
    assert config.shared_memory(features) <= has
    is_ragged = not (end_masked and right) and (varlen or Sk % config.cluster_keys != 0)
    assert config.ragged_k or not is_ragged
    # Some have one kernel for both.
    assert config.ragged_k == is_ragged or config._replace(ragged_k=False) not in configs.reachable(features)


@EACH_KERNEL
def test_the_kernel_agrees_that_it_can_run_every_config(target: Target) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    Plan = import_module(target.backward.partition(":")[0].replace(".launch", ".plan")).Plan
    table = target.backward_configs
    sizes, flag = (8, 40, 64, 72, 96, 128, 136, 192, 200, 256), (False, True)
    for D, Dv, mask, *flags in itertools.product(sizes, sizes, ("", "bool", "float32"), *[flag] * 6):
        names = ("varlen", "left", "right", "softcap", "dropout", "deterministic")
        uses = dict(zip(names, flags, strict=True))
        features = Features("bfloat16", D, Dv, mask=mask, scaled=uses["softcap"] or mask == "float32", **uses)
        if uses["varlen"] and mask:
            continue
        for config in [] if table.limits(features) else table.reachable(features):
            plan = Plan(backward.main_features(features, config), config)
            plan.check()
            # The host sizes and fills by these plans what the kernels read.
            assert plan.mask == backward.mask_plan(mask, config)
            before, behind = backward.row_plans(features, config, dlse=False)
            assert (behind is None) == (config.scope == Scope.KV_HEAD)
            assert (before is None) == config.preprocesses
            blocks = {each.blocks for each in (before, behind) if each is not None}
            assert len(blocks) <= 1 and all(each.queries == plan.queries for each in blocks)


@given(st.integers(1, 4), st.integers(1, 1 << 21), st.integers(1, 20), st.integers(1, 9), st.booleans())
@example(1, 1 << 19, 16, 1, True)
@example(1, 1 << 19, 8, 4, True)
def test_sections_hold_heads_that_there_are(B: int, S: int, Hk: int, group: int, causal: bool) -> None:
    band = problem().band._replace(right=0 if causal else None)
    call = problem(backward=True, group=group, extent=Extent(B, S, S, Hk * group, Hk), band=band)
    section = backward.params_of(SM90A, call, backward.config_of(SM90A, call, 132), 132)
    assert 1 <= section.heads_per_section <= B * Hk
    assert section.run_length == 0 or (causal and group > 1)
    assert causal or section.heads_per_section == 1
    # With more rows CTAs do not find each other's rows in the L2 cache.
    assert section.heads_per_section == 1 or section.heads_per_section * S <= 1 << 20


@pytest.mark.parametrize("target", [SM90A, SM100A])
@given(st.integers(1, 4), st.integers(2048, 1 << 21), st.integers(1, 20))
def test_tiles_of_a_mask_come_as_those_of_a_causal_call(target: Target, B: int, S: int, Hk: int) -> None:
    """Both differ in length: where one head followed another, the last one's longest tile would end alone."""
    call = problem(backward=True, extent=Extent(B, S, S, Hk, Hk))
    masked = call._replace(spec=call.spec._replace(mask="bool:1111"))
    causal = call._replace(band=call.band._replace(right=0))
    heads = [
        backward.params_of(target, x, backward.config_of(target, x, 132), 132).heads_per_section
        for x in (masked, causal)
    ]
    assert heads[0] == heads[1] and (heads[0] > 1 or B * Hk == 1 or S > 1 << 18)
