"""The decode kernel in the emulator, with its race checks: any cache, any split, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import decode_calls
from decode_calls import Cache, Call, Kernel, Results, calls, check_results, make_cache, run
from everything import EVERYTHING, examples, one_of
from flash4_torch.configs import decode
from flash4_torch.configs.decode import DecodeForm
from flash4_torch.configs.types import Features
from flash4_torch.testing import emulate
from kernel_traits import chosen_to_cover

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

ARCHS = ("sm_90a", "sm_100a")
BAND = {"left": True, "right": True}
FEATURES = {
    "plain": Features("bfloat16", 64, 64),
    "causal": Features("float16", 128, 128, right=True),
    "window, sinks": Features("bfloat16", 96, 40, sinks="bfloat16", **BAND),
    "softcap": Features("bfloat16", 72, 136, softcap=True, scaled=True, right=True),
    "wide": Features("bfloat16", 256, 256, left=True),
    "large softcap, sinks": Features(
        "float16", 8, 200, softcap=True, scaled=True, large_softcap=True, sinks="float32", **BAND
    ),
    "scaled": Features("bfloat16", 192, 128, scaled=True, right=True),
}
FORMS = [
    DecodeForm(paged, cluster, ragged, lengths, parts=clusters, runs=runs)
    for paged, lengths, runs in (
        (True, True, True),
        (True, True, False),
        (False, True, False),
        (False, False, False),
    )
    for ragged in (True, False)
    for cluster, clusters in ((8, True), (1, False), (4, False), (2, False), (8, False))
]
IN_GROUPS = [
    (arch, name, Kernel(features, rows, form._replace(groups=True, parts=True)))
    for form in FORMS
    if form.cluster == 1
    for name, features in FEATURES.items()
    for rows in decode.group_rows(features, form)
    for arch in ARCHS
]
KERNELS = [
    (arch, name, Kernel(features, rows, form._replace(causal_flags=flags)))
    for form in FORMS
    for rows in decode.ROWS
    for name, features in FEATURES.items()
    for flags in {False, features.right}
    for arch in ARCHS
]


def in_fp8(kernel: Kernel) -> Kernel:
    """The kernel for an FP8 cache, whose head sizes are multiples of 16."""
    features = kernel.features
    sizes = {"D": -(-features.D // 16) * 16, "Dv": -(-features.Dv // 16) * 16}
    return kernel._replace(
        features=features._replace(**sizes), form=kernel.form._replace(cache_dtype=decode.FP8)
    )


def with_more_keys(kernel: Kernel) -> Kernel:
    return kernel._replace(form=kernel.form._replace(keys=decode.MORE_KEYS))


KERNELS_FP8 = [(arch, name, in_fp8(kernel)) for arch, name, kernel in [*KERNELS, *IN_GROUPS]]
WITH_MORE_KEYS = [
    (arch, name, with_more_keys(kernel))
    for arch, name, kernel in [*KERNELS, *KERNELS_FP8]
    if decode.MORE_KEYS in decode.block_keys(kernel.features, kernel.form, kernel.rows)
]
KERNELS_WGMMA = {
    (rows, keys): [
        ("sm_90a", name, Kernel(features, rows, own._replace(causal_flags=flags, keys=keys)))
        for name, features in FEATURES.items()
        for flags in {False, features.right}
        for form in FORMS
        for own in [decode.with_blocks(features, form._replace(wgmma=True), rows)]
        if rows in decode.wgmma_rows(features, form) and keys in decode.block_keys(features, form, rows)
    ]
    for rows, keys in (
        (decode.WARPGROUP_ROWS, decode.KEYS),
        (decode.SHARED_ROWS, decode.KEYS),
        (decode.SHARED_ROWS, decode.MORE_KEYS),
    )
}


IN_GROUPS_BY_WGMMA = [
    ("sm_90a", name, Kernel(kernel.features, rows, decode.with_blocks(kernel.features, own, rows)))
    for arch, name, kernel in IN_GROUPS
    if arch == "sm_90a" and kernel.rows == decode.ROWS[0]
    for own in [kernel.form._replace(wgmma=True)]
    for rows in decode.wgmma_rows(kernel.features, own)[::-1]
]
WITHOUT_CLUSTERS = {
    "sm_80": decode.AMPERE,
    "sm_86": decode.GA102,
    "sm_89": decode.ADA,
    "sm_120a": decode.ADA,
}
KERNELS_SM80 = [
    (arch, name, of_cache(Kernel(features, rows, own)))
    for form in FORMS
    if form.cluster == 1
    for parts, groups in ((True, False), (True, True), (False, False))
    for rows in decode.ROWS[::-1]
    for name, features in FEATURES.items()
    for of_cache in (Kernel._make, in_fp8)
    for arch, gpu in WITHOUT_CLUSTERS.items()
    for own in [form._replace(parts=parts, groups=groups, gpu=gpu)]
    if rows in decode.rows_of(features, own)
]


Case = tuple[str, str, Kernel]
A_FEW = dict(
    enumerate(
        [
            *one_of(607, KERNELS),
            *one_of(811, KERNELS_FP8),
            *one_of(397, KERNELS_WGMMA[decode.WARPGROUP_ROWS, decode.KEYS]),
            *one_of(131, KERNELS_WGMMA[decode.SHARED_ROWS, decode.KEYS]),
            *one_of(61, KERNELS_WGMMA[decode.SHARED_ROWS, decode.MORE_KEYS]),
            *one_of(223, WITH_MORE_KEYS),
            *one_of(197, IN_GROUPS),
            *one_of(31, IN_GROUPS_BY_WGMMA),
            *one_of(785, KERNELS_SM80),
        ]
    )
)


def settings_of(case: Case) -> set[tuple[object, ...]]:
    """Everything that a kernel can be, and how the product, the cache and groups go with its kind of GPU."""
    arch, _, (features, rows, form) = case
    kind = "sm_80" if arch in WITHOUT_CLUSTERS else arch
    has = {name for name in Features._fields[3:] if getattr(features, name)}
    switches = {item for item in form._asdict().items() if isinstance(item[1], bool)}
    how = {(kind, name, getattr(form, name)) for name in ("wgmma", "cache_dtype", "groups")}
    return {
        ("rows", rows),
        ("keys", form.keys),
        ("cluster", form.cluster > 1),
        *((name,) for name in has),
        *switches,
        *how,
    }


CHOSEN = [
    A_FEW[i]
    for i in (A_FEW if EVERYTHING else chosen_to_cover({i: settings_of(case) for i, case in A_FEW.items()}))
]


@pytest.mark.parametrize(("arch", "name", "kernel"), CHOSEN)
@given(data=st.data())
@settings(max_examples=examples(2, 12))
def test_results_are_right_whatever_the_schedule(
    arch: str, name: str, kernel: Kernel, data: st.DataObject
) -> None:
    call = data.draw(calls(kernel))
    found = run(arch, kernel, call, schedule="late")
    check_results(kernel.features, call, found)
    again = run(arch, kernel, call, schedule="fuzz", seed=data.draw(st.integers(0, 9)))
    assert torch.equal(found.out, again.out) and torch.equal(found.lse, again.lse)


SMALL = Features("bfloat16", 64, 64, right=True)
FORM = DecodeForm(paged=True, cluster=8, ragged=True, lengths=True, parts=True, runs=True)
PAGED = Kernel(SMALL, 16, FORM)
BY_WGMMA = Kernel(SMALL, 64, FORM._replace(wgmma=True))
BY_ROLES = BY_WGMMA._replace(rows=decode.SHARED_ROWS)


def one_sequence(kernel: Kernel, tokens: int, keys: int, page_size: int = 16, **more: object) -> Call:
    """A call of two heads for each of two KV heads."""
    features, cache_dtype = kernel.features, kernel.form.cache_dtype
    generator, dtype = torch.Generator().manual_seed(keys), getattr(torch, features.dtype)
    of_cache = getattr(torch, cache_dtype) if cache_dtype else dtype
    q, k, v = (
        (torch.randn(shape, generator=generator).to(dtype).to(kind),)
        for kind, *shape in (
            (dtype, tokens, 4, features.D),
            (of_cache, keys, 2, features.D),
            (of_cache, keys, 2, features.Dv),
        )
    )
    if cache_dtype:
        more = {"k_scale": torch.tensor([[0.5, 1.1]]), "v_scale": torch.tensor([[3.0, 0.7]]), **more}
    return Call(q, k, v, make_cache(k, v, generator, "rows", page_size), features.D**-0.5, **more)


@pytest.mark.parametrize(
    ("arch", "kernel"),
    one_of(2, [("sm_90a", PAGED), ("sm_100a", PAGED), ("sm_90a", BY_ROLES), ("sm_90a", BY_WGMMA)]),
)
def test_any_page_number_is_safe(arch: str, kernel: Kernel) -> None:
    """Whatever the table holds, the launch reads nothing but its tensors and ends."""
    call = one_sequence(kernel, tokens=2, keys=600, num_splits=3)
    call.cache.table.fill_(7)
    call.cache.table[0, ::2] = torch.tensor(decode_calls.GARBAGE).repeat(9)[
        : call.cache.table[0, ::2].numel()
    ]
    run(arch, kernel, call)


ANY_INT32 = st.one_of(st.integers(-3, 300), st.integers(-(2**31), 2**31 - 1))


@pytest.mark.parametrize("paged", [True, False])
@given(tokens=st.lists(ANY_INT32, min_size=3, max_size=3), keys=st.lists(ANY_INT32, min_size=2, max_size=2))
@example(tokens=[0, 2**31 - 1, 5], keys=[2**31 - 1, -1])
@example(tokens=[-9, 3, -(2**31)], keys=[300, 2**31 - 1])
@settings(max_examples=examples(3, 30))
def test_any_lengths_are_safe(paged: bool, tokens: list[int], keys: list[int]) -> None:
    """Whatever the lengths are, the launch touches nothing but its tensors and ends."""
    one = one_sequence(PAGED, tokens=3, keys=200, num_splits=2)
    q, k, v = ((x[0], x[0]) for x in (one.q, one.k, one.v))
    cache = make_cache(k, v, torch.Generator().manual_seed(0), "rows", 16 if paged else None)
    kernel, call = PAGED._replace(form=FORM._replace(paged=paged)), replace(one, q=q, k=k, v=v, cache=cache)
    with emulate.device("sm_90a") as device:
        numbers = (torch.tensor(x, dtype=torch.int32) for x in (tokens, keys))
        decode_calls.launch(device, kernel, call, **dict(zip(("tokens", "keys"), numbers, strict=True)))


def test_an_empty_cache_has_no_keys() -> None:
    call = one_sequence(PAGED, tokens=2, keys=0, num_splits=2)
    k, v, _ = call.cache
    empty = replace(call, cache=Cache(k[:0], v[:0], torch.zeros(1, 3, dtype=torch.int32)))
    with emulate.device("sm_90a") as device:
        out, lse = decode_calls.launch(device, PAGED, empty, keys=torch.tensor([40], dtype=torch.int32))
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("rows", "page_size", "form"),
    one_of(
        2,
        [
            pytest.param(16, 1, {}, id="mma"),
            pytest.param(64, 48, {"wgmma": True}, id="wgmma"),
            pytest.param(128, 16, {"wgmma": True}, id="roles"),
        ],
    ),
)
@given(left=st.integers(0, 600), right=st.integers(-150, 0), num_splits=st.integers(1, 4))
@settings(max_examples=examples(2, 20))
def test_keys_that_no_token_sees_are_not_read(
    rows: int, page_size: int, form: dict[str, object], left: int, right: int, num_splits: int
) -> None:
    """Neither they nor their places in the table matter."""
    own = FORM._replace(runs=page_size % decode.RUN == 0)._replace(**form)
    kernel = Kernel(SMALL._replace(left=True), rows, own)
    call = one_sequence(kernel, 3, 700, page_size, left=left, right=right, num_splits=num_splits)
    clean = run("sm_90a", kernel, call)
    first, last = max(697 - left, 0), max(699 + right, 0)
    # Hidden keys of pages that have others, too.
    keys = torch.tensor([j for j in range(700) if not first <= j <= last], dtype=torch.long)
    for x in call.cache[:2]:
        x[call.cache.table[0, keys // page_size].long(), keys % page_size] = torch.nan
    hidden = torch.ones(call.cache.table.shape[1], dtype=torch.bool)
    hidden[first // page_size : last // page_size + 1] = False
    call.cache.table[0, hidden] = torch.tensor(decode_calls.GARBAGE).repeat(200)[: int(hidden.sum())].int()
    found = run("sm_90a", kernel, call)
    assert torch.equal(found.out, clean.out) and torch.equal(found.lse, clean.lse)


def test_pages_may_be_far_apart() -> None:
    """Pages are more than 2**31 elements from each other; memory in between is never touched."""
    call = one_sequence(PAGED, tokens=1, keys=40, page_size=32, num_splits=2)
    k, v, table = call.cache
    far, room = 2**31 + 64, 5 * 2**31
    wide = []
    for x in (k, v):
        empty = torch.empty(room, dtype=x.dtype)
        places = empty.as_strided((len(x), *x.shape[1:]), (far, *x.stride()[1:]))
        places.copy_(x)
        wide.append(places)
    found = run("sm_90a", PAGED, replace(call, cache=Cache(*wide, table)))
    check_results(SMALL, call, found)


IN_FP8 = FORM._replace(cache_dtype=decode.FP8)
IN_SMEM = [
    *((rows, form) for form in (FORM, IN_FP8) for rows in one_of(3, decode.ROWS)),
    *((kernel.rows, kernel.form) for kernel in (BY_WGMMA, BY_ROLES)),
]


CONFLICTS = [(*kernel, *heads) for heads in ((64, 64), (192, 128), (32, 96), (16, 256)) for kernel in IN_SMEM]


# CI runs each form, and each of the head sizes.
@pytest.mark.parametrize(("rows", "form", "D", "Dv"), one_of(len(IN_SMEM) + 1, CONFLICTS))
def test_no_bank_conflicts(rows: int, form: DecodeForm, D: int, Dv: int) -> None:
    """Copies and matrix loads take the fewest passes through the banks that their bytes need."""
    kernel = Kernel(SMALL._replace(D=D, Dv=Dv), rows, form)
    call = one_sequence(kernel, tokens=9, keys=200, num_splits=2)
    with emulate.device("sm_90a") as device:
        decode_calls.launch(device, kernel, call)
    moved = [
        line
        for line in device.reports[-1].lines
        if any(name in line.ptx for name in ("cp.async.cg", "ldmatrix", "stmatrix"))
    ]
    assert len(moved) > 3 and sum(sum(line.shared_bytes) for line in moved) > 0
    for line in moved:
        assert sum(line.shared_passes) * 128 == sum(line.shared_bytes), line.ptx


RINGS = [
    (D, page_size, keys, left, in_regs)
    for D, page_size, keys in (
        (64, 8, decode.MORE_KEYS),
        (192, 16, decode.KEYS),
        (128, 16, decode.MORE_KEYS),
        (64, 8, decode.KEYS),
        (128, 16, decode.KEYS),
        (96, 1, decode.KEYS),
    )
    for left in (False, True)
    for in_regs in ("q_in_regs", "")
]
RINGS_OF_GROUPS = [
    (D, page_size, keys, left, in_regs)
    for D, page_size, keys, left, _ in RINGS[::-2]
    for in_regs in ("group_in_regs", "q_in_regs", "")
    if keys == decode.KEYS
    and decode.SHARED_ROWS
    in decode.wgmma_rows(SMALL._replace(D=D, Dv=D), FORM._replace(cluster=1, groups=True))
]


@pytest.mark.parametrize(
    ("D", "page_size", "keys", "left", "in_regs", "groups"),
    [
        *((*ring, False) for ring in one_of(24, RINGS)),
        *((*ring, True) for ring in one_of(18, RINGS_OF_GROUPS)),
    ],
)
def test_load_warps_go_round_their_ring(
    D: int, page_size: int, keys: int, left: bool, in_regs: str, groups: bool
) -> None:
    """A split has several times as many blocks as there are stages, and both warpgroups have rows."""
    features = SMALL._replace(D=D, Dv=D, left=left)
    form = FORM._replace(
        cluster=2 if groups else 1,
        parts=groups,
        groups=groups,
        runs=page_size % decode.RUN == 0,
        wgmma=True,
        keys=keys,
        **{in_regs: True} if in_regs else {},
    )
    kernel = Kernel(features, decode.SHARED_ROWS, form)
    more = {"num_splits": 2, "split_keys": 128} if groups else {}
    call = one_sequence(kernel, tokens=40, keys=1500, page_size=page_size, left=1100, **more)
    found = run("sm_90a", kernel, call, schedule="late")
    check_results(features, call, found)
    for seed in range(examples(1, 3)):
        again = run("sm_90a", kernel, call, schedule="fuzz", seed=seed)
        assert torch.equal(found.out, again.out) and torch.equal(found.lse, again.lse)


FEW = [
    ("sm_90a", in_fp8(with_more_keys(PAGED))),
    (
        "sm_90a",
        PAGED._replace(features=FEATURES["window, sinks"], form=FORM._replace(groups=True, cluster=1)),
    ),
    ("sm_80", in_fp8(PAGED._replace(form=FORM._replace(cluster=1, gpu=decode.AMPERE)))),
    ("sm_100a", PAGED._replace(features=FEATURES["softcap"], form=FORM._replace(paged=False, runs=False))),
    ("sm_90a", in_fp8(PAGED._replace(form=FORM._replace(groups=True, cluster=4)))),
    ("sm_90a", PAGED._replace(features=FEATURES["wide"], form=FORM._replace(ragged=False, parts=False))),
    ("sm_120a", PAGED._replace(features=FEATURES["causal"], form=FORM._replace(cluster=1, gpu=decode.ADA))),
]


@pytest.mark.parametrize(("arch", "kernel"), one_of(7, FEW))
@given(data=st.data())
@settings(max_examples=examples(2, 20))
def test_rows_that_no_lane_looks_at_change_no_bit(arch: str, kernel: Kernel, data: st.DataObject) -> None:
    """A tile of few rows has the results of one that looks at all 16."""
    call = data.draw(calls(kernel, most_rows=decode.FEW_ROWS))
    plain = run(arch, kernel, call)
    few = kernel._replace(form=kernel.form._replace(few_rows=True))
    found = run(arch, few, call, schedule="fuzz", seed=data.draw(st.integers(0, 9)))
    check_results(kernel.features, call, found)
    assert torch.equal(found.out, plain.out) and torch.equal(found.lse, plain.lse)


@given(keys=st.integers(0, 3000), num_splits=st.integers(2, 26))
@settings(max_examples=examples(4, 40))
def test_splits_are_not_shorter_than_they_are_worth(keys: int, num_splits: int) -> None:
    """A sequence has as many splits as there may be, if each has LEAST_BLOCKS blocks, and their clusters."""
    call = one_sequence(PAGED, tokens=1, keys=keys, num_splits=num_splits)
    partial = decode_calls.make_partial(PAGED, call)
    with emulate.device("sm_90a") as device:
        found = decode_calls.launch(device, PAGED, call, partial=partial)
    check_results(SMALL, call, found)
    blocks = -(-keys // decode.KEYS)
    splits = max(min(num_splits, blocks // decode.LEAST_BLOCKS), 1)
    stored, clusters = int((~partial.lse.isnan()).flatten(1).any(-1).sum()), -(-splits // decode.CLUSTER)
    assert stored == (clusters if clusters > 1 else 0)


FP8 = in_fp8(PAGED)
ON_SM80 = FP8._replace(form=FP8.form._replace(cluster=1, gpu=decode.AMPERE))


@pytest.mark.parametrize(("arch", "kernel"), [("sm_90a", FP8), ("sm_80", ON_SM80)])
@given(
    in_k=st.booleans(),
    head=st.integers(0, 1),
    key=st.integers(0, 99),
    column=st.integers(0, 63),
    bits=st.sampled_from([0x7F, 0xFF]),
)
@settings(max_examples=examples(3, 20))
def test_nan_of_an_fp8_cache_stays_nan(
    arch: str, kernel: Kernel, in_k: bool, head: int, key: int, column: int, bits: int
) -> None:
    call = one_sequence(kernel, tokens=1, keys=100, num_splits=2)
    (k,), (v,) = call.k, call.v
    (k if in_k else v).view(torch.uint8)[key, head, column] = bits
    cache = make_cache([k], [v], torch.Generator().manual_seed(0), "rows", 16)
    found = run(arch, kernel, replace(call, cache=cache))
    nan = torch.zeros_like(found.out, dtype=torch.bool)
    nan[:, 2 * head : 2 * head + 2, slice(None) if in_k else column] = True
    assert torch.equal(found.out.isnan(), nan) and torch.equal(found.lse.isnan()[:, 0], nan.all(-1)[0])


def test_integers_widen_every_fp8_number() -> None:
    """Each value of V alone, which a token with one key gets back, and each one of K, as a score."""
    numbers = torch.arange(256, dtype=torch.uint8).view(decode_calls.FP8)
    numbers = numbers[~numbers.float().isnan()]
    count = len(numbers)
    k = torch.zeros(1, 2, 64).to(decode_calls.FP8)
    call = one_sequence(ON_SM80, tokens=1, keys=1)
    kernel = ON_SM80._replace(features=ON_SM80.features._replace(right=False))
    for start in range(0, count, 64):
        own = numbers[start : start + 64]
        row = torch.zeros(64).to(decode_calls.FP8)
        row[: len(own)] = own
        both = torch.stack([row, row])[None]
        for keys, values in ((k, both), (both, k)):
            cache = make_cache([keys], [values], torch.Generator().manual_seed(0), "rows", 16)
            one = replace(call, k=(keys,), v=(values,), cache=cache)
            check_results(kernel.features, one, run("sm_80", kernel, one))


@given(powers=st.lists(st.integers(-126, 120), min_size=4, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=examples(4, 30))
def test_any_q_fits_an_fp8_cache(powers: list[int], seed: int) -> None:
    """Rows of bfloat16 may be larger and smaller than any float16, also next to each other."""
    generator = torch.Generator().manual_seed(seed)
    call = one_sequence(FP8, tokens=1, keys=70)
    sizes = torch.tensor(powers, dtype=torch.float64).exp2()[None, :, None]
    q = ((torch.randn(1, 4, 64, generator=generator) * sizes).bfloat16(),)
    kernel = FP8._replace(features=FP8.features._replace(right=False))
    for one in (replace(call, q=q), replace(call, q=q, scale=2.0**-120)):
        check_results(kernel.features, one, run("sm_90a", kernel, one))


INVARIANT = {
    "window, softcap, sinks": Features(
        "float16", 72, 96, left=True, right=True, softcap=True, scaled=True, sinks="float32"
    ),
    "plain": SMALL,
}


@dataclass(frozen=True)
class Tokens:
    """The last tokens of one sequence, and how its keys are split."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    left: int
    split_keys: int

    def results(
        self, draw: st.DrawFn, arch: str, kernel: Kernel, ends: Sequence[int], neighbours: Sequence[int] = ()
    ) -> Results:
        """Results of a launch in which a sequence ends at each of `ends`, next to others of some lengths."""
        q, k, v = [], [], []
        for start, end in pairwise(ends):
            keys = len(self.k) - len(self.q) + end
            q.append(self.q[start:end])
            k.append(self.k[:keys])
            v.append(self.v[:keys])
        for length in neighbours:
            q.append(self.q[:3])
            k.append(torch.randn(length, *self.k.shape[1:]).to(self.k.dtype))
            v.append(torch.randn(length, *self.v.shape[1:]).to(self.v.dtype))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        page_size = draw(decode_calls.page_sizes(kernel.form))
        layout, more = draw(st.sampled_from(decode_calls.LAYOUTS)), draw(st.integers(0, 2))
        sizes = {}
        if kernel.form.cache_dtype:
            k, v = ([x.to(decode_calls.FP8) for x in parts] for parts in (k, v))
            own = torch.linspace(0.3, 1.2, self.k.shape[1])
            sizes = {name: own.expand(len(k), -1) for name in ("k_scale", "v_scale")}
        call = Call(
            tuple(q),
            tuple(k),
            tuple(v),
            make_cache(k, v, generator, layout, page_size),
            **sizes,
            scale=0.2,
            softcap=5.0,
            left=self.left,
            sinks=self.sinks,
            num_splits=1 + more,
            split_keys=self.split_keys,
            more_tokens=draw(st.integers(0, 9)) if kernel.form.ragged else 0,
        )
        out, lse = run(arch, kernel, call, schedule="fuzz", seed=draw(st.integers(0, 9)))
        return Results(out[: len(self.q)], lse[:, : len(self.q)])


@st.composite
def last_tokens(draw: st.DrawFn, features: Features) -> Tokens:
    group, Hk = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    Sk = draw(st.one_of(st.integers(520, 700), st.integers(1, 400)))
    Sq = draw(st.integers(min(Sk, 5), min(Sk, examples(12, 40))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    shapes = (Sq, Hk * group, features.D), (Sk, Hk, features.D), (Sk, Hk, features.Dv)
    tensors = (torch.randn(shape, generator=generator) for shape in shapes)
    return Tokens(
        *(x.to(getattr(torch, features.dtype)) for x in tensors),
        sinks=torch.randn(Hk * group, generator=generator) if features.sinks else None,
        left=draw(st.one_of(st.integers(100, 400), st.integers(0, 300))),
        split_keys=draw(st.sampled_from([64, 128, 192])),
    )


@pytest.mark.parametrize(
    ("rows", "cluster", "in_regs"),
    one_of(
        12,
        [
            (decode.SHARED_ROWS, 2, True),
            (64, 2, True),
            (64, 2, False),
            (64, 8, False),
            (64, 4, True),
            (16, 1, False),
            (16, 2, False),
            (64, 1, False),
            (64, 1, True),
            (decode.SHARED_ROWS, 1, False),
            (decode.SHARED_ROWS, 1, True),
            (decode.SHARED_ROWS, 2, False),
        ],
    ),
)
def test_too_few_groups_cost_no_keys(rows: int, cluster: int, in_regs: bool) -> None:
    """The last group takes all that is left, where a bound on the length was too low."""
    form = FORM._replace(groups=True, cluster=cluster, wgmma=rows > 16, group_in_regs=in_regs)
    form = form._replace(alone=in_regs and cluster == 2)
    kernel = Kernel(SMALL, rows, form)
    call = one_sequence(kernel, tokens=1, keys=1300, num_splits=1, split_keys=64)
    # Later keys have larger scores, so that maxima rise.
    k = tuple(x * torch.linspace(0.1, 8.0, len(x))[:, None, None].to(x.dtype) for x in call.k)
    call = replace(call, k=k, cache=make_cache(k, call.v, torch.Generator().manual_seed(0), "rows", 16))
    whole = decode_calls.make_partial(kernel, call)
    one = whole._replace(out=whole.out[:1].clone(), lse=whole.lse[:1].clone())
    with emulate.device("sm_90a") as device:
        found = decode_calls.launch(device, kernel, call, partial=one)
    check_results(SMALL, call, found)


@pytest.mark.parametrize("rows", one_of(2, [decode.WARPGROUP_ROWS, decode.SHARED_ROWS]))
def test_groups_in_registers_follow_one_another(rows: int) -> None:
    """A CTA that has several of them gives the bits of one CTA for each, which merges in shared memory."""
    form, found = FORM._replace(groups=True, cluster=1, wgmma=True), []
    for in_regs, num_splits in ((True, 1), (False, 3)):
        kernel = Kernel(SMALL, rows, form._replace(group_in_regs=in_regs))
        call = one_sequence(kernel, tokens=40, keys=2300, num_splits=num_splits, split_keys=128)
        found.append(run("sm_90a", kernel, call, schedule="fuzz", seed=num_splits))
        check_results(SMALL, call, found[-1])
    assert torch.equal(found[0].out, found[1].out) and torch.equal(found[0].lse, found[1].lse)


@given(data=st.data())
@settings(max_examples=examples(1, 20))
def test_a_row_has_the_same_bits_by_wgmma(data: st.DataObject) -> None:
    """Launches that multiply by wgmma have them with one another."""
    kernel = Kernel(INVARIANT["window, softcap, sinks"], 64, FORM._replace(groups=True, wgmma=True))
    tokens = data.draw(last_tokens(kernel.features))
    count, each = len(tokens.q), range(len(tokens.q) + 1)
    whole = tokens.results(data.draw, "sm_90a", kernel, [0, count])
    shared, halves = decode.SHARED_ROWS, [0, count // 2, count]
    places = "", "q_in_regs", "group_in_regs"
    cases = [
        (64, 2, halves, "group_in_regs"),
        (64, 4, halves, "group_in_regs"),
        *((64, cluster, ends, "") for cluster, ends in ((4, each), (2, halves))),
        *((64, 1, each, place) for place in ("", "group_in_regs")),
        *((shared, data.draw(st.integers(1, 2)), halves, place) for place in places),
    ]
    for rows, cluster, ends, place in one_of(8, cases):
        own = kernel.form._replace(cluster=cluster, **{place: True} if place else {})
        own = own._replace(alone=cluster == 2 and place == "group_in_regs")
        other = Kernel(kernel.features, rows, own)
        found = tokens.results(data.draw, "sm_90a", other, ends, [100])
        assert torch.equal(found.out, whole.out) and torch.equal(found.lse, whole.lse)


GPUS = {**dict.fromkeys(ARCHS, decode.HOPPER), **WITHOUT_CLUSTERS}
INVARIANT_CASES = [(name, arch, cache) for name in INVARIANT for arch in GPUS for cache in ("", decode.FP8)]


@pytest.mark.parametrize(("name", "arch", "cache_dtype"), one_of(84, INVARIANT_CASES))
@given(data=st.data())
@settings(max_examples=examples(2, 20))
def test_a_row_has_the_same_bits_in_any_batch(
    name: str, arch: str, cache_dtype: str, data: st.DataObject
) -> None:
    """Tokens at once, in chunks among other sequences, or one by one; in tiles and splits of any number."""
    gpu, draw = GPUS[arch], data.draw
    form = FORM._replace(groups=True, gpu=gpu, cluster=gpu.clusters[-1])
    kernel = Kernel(INVARIANT[name], decode.group_rows(INVARIANT[name], form)[-1], form)
    kernel = in_fp8(kernel) if cache_dtype else kernel
    features, _, form = kernel
    two, four = (min(size, gpu.clusters[-1]) for size in (2, 4))
    tokens = draw(last_tokens(features))
    count, lengths = len(tokens.q), st.lists(st.integers(0, 500), max_size=2)
    whole = tokens.results(draw, arch, kernel, [0, count], draw(lengths))
    chunks = sorted({0, count, *draw(st.sets(st.integers(0, count), max_size=3))})
    each = range(count + 1)
    others = [
        tokens.results(draw, arch, Kernel(features, 32, form._replace(cluster=two)), chunks, draw(lengths)),
        tokens.results(
            draw, arch, Kernel(features, 16, form._replace(cluster=four, paged=False, ragged=False)), each
        ),
        tokens.results(draw, arch, Kernel(features, 16, form._replace(cluster=two)), each),
        tokens.results(
            draw, arch, Kernel(features, draw(st.sampled_from(decode.ROWS)), form._replace(cluster=1)), chunks
        ),
    ]
    for found in others:
        assert torch.equal(found.out, whole.out) and torch.equal(found.lse, whole.lse)
