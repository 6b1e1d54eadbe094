"""Steps of a server: which kernels they may need, and what a step of new sizes decides anew."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from everything import examples
from flash4_torch import ahead
from flash4_torch.backends import constants
from flash4_torch.backends.compiled import DECODE, TARGETS, Target
from flash4_torch.errors import ArgumentError, NoGradientError
from flash4_torch.fast_path import kvcache as fast_path
from flash4_torch.kernels.common.kvcache import MergePlan
from flash4_torch.kvcache import steps
from flash4_torch.kvcache.attend import coarse_bound
from flash4_torch.kvcache_problem import CacheExtent, CacheInputs
from kvcache_on_cpu import NUM_SMS, gpu

INT = torch.int32
FLOAT8 = torch.float8_e4m3fn
attend = flash4_torch.attention_kvcache


@dataclass
class Layer:
    """A layer of a model, as an engine describes it."""

    Hk: int = 2
    group: int = 4
    D: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, T: int = 1, B: int = 1, columns: int = 1) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Tensors of a step with so many tokens, sequences, and columns of the table."""
        cache = torch.zeros(2, self.page_size, self.Hk, 2 * self.D, dtype=self.cache_dtype)
        k_cache, v_cache = cache.split(self.D, -1)
        q = torch.zeros(T, self.Hk * self.group, self.D, dtype=self.dtype)
        where = {
            "block_table": torch.zeros(B, columns, dtype=INT),
            "seqused_k": torch.ones(B, dtype=INT),
            "cu_seqlens_q": torch.arange(B + 1, dtype=INT),
        }
        return (q, k_cache, v_cache), where


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    Hk, group = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2, 4, 5, 16, 100]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    side = draw(st.sampled_from([None, None, 0, 127, 4095]))
    return Layer(
        Hk,
        group,
        draw(st.sampled_from([64, 128, 192, 256])),
        draw(st.sampled_from([16, 64, 256])),
        dtype,
        draw(st.sampled_from([dtype, FLOAT8])),
        {
            "window": (side, side),
            "causal": draw(st.sampled_from([True, True, False])),
            "softcap": draw(st.sampled_from([0.0, 30.0])),
            "sinks": torch.zeros(Hk * group, dtype=dtype) if draw(st.booleans()) else None,
            "batch_invariant": draw(st.booleans()),
            "scale": 0.1,
        },
    )


def up_to(most: int) -> st.SearchStrategy[int]:
    """Numbers of every magnitude."""
    short = st.integers(1, min(most, 200))
    return st.one_of(short, st.integers(1, most), st.just(most)).map(lambda n: min(n, most))


SIZES = st.tuples(up_to(512), up_to(8192), up_to(131072))
"""Sequences, tokens of the longest one, and its keys."""


@pytest.mark.parametrize(
    "target", [TARGETS[arch] for arch in ("sm_90a", "sm_100a", "sm_80")], ids=lambda t: t.arch
)
@given(
    layer=layers(),
    most_tokens=st.sampled_from([1, 48, 512, 8192]),
    most_keys=st.sampled_from([100, 4096, 131072]),
    sizes=st.lists(SIZES, min_size=40, max_size=40),
)
@example(
    layer=Layer(group=100, options={"causal": True}),
    most_tokens=512,
    most_keys=131072,
    sizes=[(512, 1, 131072), (1, 1, 64)],  # the same token in a tile of 128 rows, and of 64
)
@settings(max_examples=examples(10, 400))
def test_no_step_needs_another_kernel(
    target: Target, layer: Layer, most_tokens: int, most_keys: int, sizes: list[tuple[int, int, int]]
) -> None:
    """What is prepared holds for every batch of as many tokens and keys, and not for many more kernels."""
    tensors, where = layer.tensors()
    with gpu(target) as backend:
        step = steps.attend(
            *tensors,
            most_sequences=most_tokens,
            most_tokens=most_tokens,
            most_keys=most_keys,
            **where,
            **layer.options,
        )
        prepared = {key.static for key in ahead.kernels_of_steps([step], target, NUM_SMS)}
        inputs = CacheInputs(*tensors, where["block_table"], where["cu_seqlens_q"], where["seqused_k"])
        *_, Hq, Hk, page_size = step.extent
        for n, Sq, Sk in sizes:
            Sq, Sk = min(Sq, most_tokens), coarse_bound(min(Sk, most_keys))
            B = min(n, most_tokens)
            least = max(B, Sq)
            for T in {least, (least + B * Sq) // 2, B * Sq}:
                problem = step.of_sizes(CacheExtent(B, T, Sq, Sk, Hq, Hk, page_size))
                # Tokens that overlap take little memory.
                room = torch.zeros(8 * T + Hq * layer.D, dtype=layer.dtype)
                q = room.as_strided((T, Hq, layer.D), (8, layer.D, 1))
                assert backend.prepare(inputs._replace(q=q), problem, None) is not None
        assert {static for _, static in backend.found} <= prepared
    assert len(prepared) <= 150


def same(a: Any, b: Any) -> bool:
    """Whether launches have equal numbers, and tensors of one shape, layout and dtype."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return type(a) is type(b) and (not isinstance(a, (int, float, str)) or a == b)


SMALL = st.tuples(up_to(70), up_to(300), up_to(9000), st.integers(1, 3))
"""Sequences, tokens of the longest one, its keys, and columns of the table."""


@given(
    layer=layers(),
    arch=st.sampled_from(["sm_90a", "sm_100a", "sm_80"]),
    first=SMALL,
    later=st.lists(SMALL, min_size=4, max_size=4),
    bounds=st.booleans(),
    given_out=st.booleans(),
)
@settings(max_examples=examples(40, 600))
def test_a_step_of_new_sizes_launches_what_the_slow_path_does(
    layer: Layer,
    arch: str,
    first: tuple[int, int, int, int],
    later: list[tuple[int, int, int, int]],
    bounds: bool,
    given_out: bool,
) -> None:
    """Its kernels, their parameters and what is allocated; a kind of calls is checked once."""

    def step(B: int, Sq: int, Sk: int, columns: int) -> tuple[Tensor, Tensor]:
        T = B + Sq - 1
        tensors, where = layer.tensors(T, B, columns)
        sizes = {"max_seqlen_q": Sq, "max_seqlen_k": coarse_bound(Sk)} if bounds else {}
        out = torch.empty_like(tensors[0]) if given_out else None
        return attend(*tensors, out=out, return_lse=True, **where, **sizes, **layer.options)

    with gpu(TARGETS[arch]) as backend:
        step(*first)
        for sizes in later:
            # The third time it is recognised.
            for _ in range(3):
                backend.launches.clear()
                fast = step(*sizes)
            assert len(fast_path._calls) == 1 and backend.launches
            own = list(backend.launches)
            backend.launches.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fast_path, "lookup", lambda *args: (None, None))
                slow = step(*sizes)
            assert all(map(same, fast, slow)) and len(own) == len(backend.launches)
            for a, b in zip(own, backend.launches, strict=True):
                # Memory for results of splits comes after parameters.
                at = -2 if getattr(a.static[0], "splits", False) else -1
                assert a[:2] == b[:2] and same(a.args[:at], b.args[:at])
                assert same(a.args[at + 1 :] if at + 1 else (), b.args[at + 1 :] if at + 1 else ())
                # Prepared parameters are converted; those of a merge are the rows of sequences.
                assert same(*(tuple(launch.args[at]) for launch in (a, b)))


def test_a_call_like_the_last_one_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are checked at once. One of other sizes is written down, and this one is known after it."""
    written: list[Any] = []
    found = fast_path._signature

    def signature(*args: Any) -> Any:
        written.append(found(*args))
        return written[-1]

    monkeypatch.setattr(fast_path, "_signature", signature)
    with gpu(TARGETS["sm_90a"]) as backend:
        for sizes, needs in zip(
            [(9, 3), (9, 3), (9, 3), (9, 3), (8, 3), (9, 3)], [1, 1, 1, 0, 1, 0], strict=True
        ):
            tensors, where = Layer().tensors(*sizes)
            written.clear()
            attend(*tensors, max_seqlen_q=7, max_seqlen_k=64, **where)
            assert len(written) == needs and backend.launches.pop().args[0].shape[0] == sizes[0]


def _off_by_8_bytes(x: Tensor) -> Tensor:
    return torch.zeros(x.numel() + 4, dtype=x.dtype)[4:].view(x.shape)


OTHERS: dict[str, Any] = {
    "place": _off_by_8_bytes,
    "strides": lambda q: torch.zeros(*q.shape[:-1], q.shape[-1] + 8, dtype=q.dtype)[..., :-8],
    "dtype": lambda q: q.half(),
    "sign": lambda q: torch._neg_view(q),
    "gradient": lambda q: q.clone().requires_grad_(),
    "subclass": lambda q: q.as_subclass(type("Own", (Tensor,), {})),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_that_differs_unseen_is_not_recognised(other: str) -> None:
    """Its q has the same sizes; it is served as if no call had been before it."""
    (q, *caches), where = Layer().tensors(9, 3)

    def launches(q: Tensor) -> list[Any]:
        backend.launches.clear()
        try:
            attend(q, *caches, max_seqlen_q=7, max_seqlen_k=64, **where)
        except (ArgumentError, NoGradientError) as error:
            return [str(error)]
        return [launch.args[0].dtype for launch in backend.launches] + [
            (launch.args[0].stride(), launch.args[0].data_ptr() % 16) for launch in backend.launches
        ]

    changed = OTHERS[other](q)
    with gpu(TARGETS["sm_90a"]) as backend:
        alone = launches(changed)
    with gpu(TARGETS["sm_90a"]) as backend:
        for _ in range(4):
            usual = launches(q)
        assert launches(changed) == alone and launches(q) == usual


def test_tokens_and_columns_decide_nothing() -> None:
    """A step with others is prepared already."""
    with gpu(TARGETS["sm_90a"]) as backend:
        asked = []
        for T, columns in ((40, 1), (41, 1), (41, 1), (50, 3)):
            tensors, where = Layer().tensors(T, 7, columns)
            attend(*tensors, max_seqlen_q=30, max_seqlen_k=1024, **where)
            asked.append(len(backend.found))
        assert asked[1] == asked[2] == asked[3]
        (calls,) = fast_path._calls.values()
        assert list(calls.by_sizes) == [(7, 30, 1024)]


def test_a_chunk_among_decoding_sequences_takes_the_tiles_that_fit_each() -> None:
    """Tiles have the rows of one token, as most sequences do; splits share the SMs that a chunk leaves."""
    with gpu(TARGETS["sm_90a"]) as backend:
        for decoding, chunk in ((31, 256), (31, 512), (1, 40), (0, 256)):
            backend.launches.clear()
            layer = Layer(Hk=1, group=8, D=128)
            tensors, where = layer.tensors(decoding + chunk, decoding + 1)
            attend(*tensors, max_seqlen_q=chunk, max_seqlen_k=32768, causal=True, **where)
            forward, decode = backend.launches
            assert forward.static[0].splits
            assert decode.entry == DECODE and decode.static[1] == 16
        # As many sequences as long as the longest one fill the GPU: nothing is split.
        tensors, where = Layer(Hk=1, group=8, D=128).tensors(32 * 256, 32)
        backend.launches.clear()
        attend(*tensors, max_seqlen_q=256, max_seqlen_k=32768, causal=True, **where)
        assert not backend.launches[0].static[0].splits


@pytest.mark.parametrize("is_full", [False, True])
def test_lengths_that_sizes_say_are_made_once(is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless too many are kept already; none is given up, which a captured launch may read."""
    kept: dict[Any, Tensor] = {}
    monkeypatch.setattr(constants, "_kept", kept)
    monkeypatch.setattr(constants, "_MOST", 0 if is_full else 9)
    q, cache = torch.zeros(2, 80, 4, 64).bfloat16(), torch.zeros(3, 90, 2, 64).bfloat16()
    with gpu(TARGETS["sm_90a"]) as backend:
        for _ in range(4):
            attend(q, cache, cache)
        first, *others = (launch.args[7:9] for launch in backend.launches)
    ends, (table, used, _) = first
    assert (ends.tolist(), table.tolist(), used.tolist()) == ([0, 80, 160], [[0], [1]], [90, 90])
    for later, (own_table, own_used, _) in others:
        assert torch.equal(later, ends) and torch.equal(own_table, table) and torch.equal(own_used, used)
        assert (later is ends and own_table is table and own_used is used) == (not is_full)
    assert len(kept) == (0 if is_full else 3)


SCALE = torch.ones(3, 2)
BAD: dict[str, dict[str, Any]] = {
    "block_table": {"block_table": torch.zeros(4, 2, dtype=INT)},
    "seqused_k": {"seqused_k": torch.ones(2, dtype=INT)},
    "out": {"out": torch.empty(8, 8, 64, dtype=torch.bfloat16)},
    "max_seqlen_q": {"max_seqlen_q": -1},
    "max_seqlen_k": {"max_seqlen_k": 10.0},
    "k_scale": {"B": 4, "k_scale": SCALE},
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("backend", ["gathered", "sm_90a"])
def test_bad_sizes_of_a_known_kind_are_named(name: str, backend: str) -> None:
    """Also where the fast path has served the same call with others."""
    layer = Layer(cache_dtype=FLOAT8)
    with gpu(TARGETS[backend]) if backend in TARGETS else nullcontext():
        for B, T in ((3, 9), (3, 9), (4, 10)):
            tensors, where = layer.tensors(T, B)
            out = torch.empty_like(tensors[0])
            sizes = {"max_seqlen_q": 7, "max_seqlen_k": 16, "k_scale": torch.ones(B, 2)}
            attend(*tensors, out=out, **(where | sizes))
        bad = dict(BAD[name])
        tensors, where = layer.tensors(9, bad.pop("B", 3))
        good = {"out": torch.empty_like(tensors[0]), "max_seqlen_q": 7, "k_scale": torch.ones(3, 2)}
        with pytest.raises(ArgumentError, match=f"{name} is"):
            attend(*tensors, **(where | good | bad))


def test_a_step_appends_and_merges_with_prepared_kernels() -> None:
    """Whatever the dtype of slots, and whether the cache has 8-bit numbers with scales."""
    for dtype, slots, scale in product((torch.bfloat16, FLOAT8), (INT, torch.int64), (None, torch.ones(()))):
        if dtype != FLOAT8 and scale is not None:
            continue
        tensors, _ = Layer(cache_dtype=dtype).tensors()
        k, v = torch.zeros(2, 5, 2, 64, dtype=torch.bfloat16)
        call = {"slot_mapping": torch.arange(5, dtype=slots), "k_scale": scale, "v_scale": scale}
        for arch in ("sm_90a", "sm_80"):
            with gpu(TARGETS[arch]) as backend:
                flash4_torch.append_kvcache(k, v, *tensors[1:], **call)
                known = ahead.kernels_of_steps(
                    [steps.append(k, v, *tensors[1:], **call)], TARGETS[arch], NUM_SMS
                )
                assert [(key.entry, key.static) for key in known] == backend.found
    parts = torch.zeros(1, 1, 4, 8, 64, dtype=torch.bfloat16)
    (merge,) = ahead.kernels_of_steps([(parts, parts)], TARGETS["sm_90a"], NUM_SMS)
    assert merge.static[0] == MergePlan("bfloat16", 64, 2)
