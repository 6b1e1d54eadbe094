"""`attention_kvcache` against the definition: any cache, any lengths, every backend that runs here."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import opcheck

import flash4_torch
from cache_calls import CacheCall, cache_calls, check_results
from decode_calls import LAYOUTS, make_cache
from everything import examples, one_of
from flash4_torch import ahead
from flash4_torch.backends.compiled import SM90A, TARGETS, Target
from flash4_torch.backends.kvcache import decode_kernel, gathered
from flash4_torch.compile import Key
from flash4_torch.configs import decode
from flash4_torch.errors import ArgumentError, BackendError, KeywordError, NoGradientError
from flash4_torch.fast_path import kvcache as fast_path
from flash4_torch.kvcache.attend import coarse_bound
from flash4_torch.kvcache_problem import CacheInputs, CacheOptions
from flash4_torch.ops.kvcache import describe
from kvcache_on_cpu import Finding

attend = flash4_torch.attention_kvcache
HALF = (torch.bfloat16, torch.float16)
INT = torch.int32


@given(call=cache_calls())
@settings(max_examples=examples(30, 400))
def test_results_are_right(call: CacheCall) -> None:
    check_results(call, call.run())


@given(call=cache_calls())
@settings(max_examples=examples(20, 400))
def test_results_are_right_where_no_host_knows_the_lengths(call: CacheCall) -> None:
    with mock.patch.object(gathered, "_by_sequence", gathered._all_at_once):
        check_results(call, call.run())


@given(
    call=st.one_of(
        cache_calls(HALF, multiple=8, most_keys=150, float8=False),
        cache_calls(HALF, multiple=16, most_keys=150),
    ),
    arch=st.sampled_from(["sm_90a", "sm_80", "sm_86", "sm_89", "sm_120a"]),
)
@settings(max_examples=examples(5, 100))
def test_results_of_the_kernel_are_right(call: CacheCall, arch: str) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH4_BACKEND", "emulator")
        patch.setenv("FLASH4_ARCH", arch)
        check_results(call, call.run())


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_many_heads_of_a_kv_head_are_right(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of 100 query heads fills two tiles, by warpgroup MMAs unless bits are fixed."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    monkeypatch.setenv("FLASH4_ARCH", "sm_90a")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        tuple(torch.randn(S, H, 64, generator=generator).bfloat16() for S in lengths)
        for lengths, H in (((1, 1), 100), ((300, 70), 1), ((300, 70), 1))
    )
    cache = make_cache(k, v, generator, "rows", 48)
    call = CacheCall(q, k, v, cache, causal=True, options={"batch_invariant": batch_invariant})
    check_results(call, call.run())


@pytest.mark.parametrize("arch", one_of(3, ["sm_90a", "sm_100a", "sm_80"]))
@given(
    call=cache_calls((torch.bfloat16,), multiple=8, most_keys=150, float8=False, page_sizes=[16, None, 48])
)
@settings(max_examples=examples(3, 40))
def test_many_tokens_and_few_are_served_together(arch: str, call: CacheCall) -> None:
    """Sequences with many tokens go to the forward kernel, the others to the one that splits keys.

    Where the forward reads no pages, all of them go to the latter.
    """
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    call = replace(call, causal=bool(torch.as_tensor(call.causal).any()), sinks=None, softcap=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "MOST_ROWS", 2)
        patch.setenv("FLASH4_BACKEND", "emulator")
        patch.setenv("FLASH4_ARCH", arch)
        check_results(call, call.run())


@given(data=st.data(), call=cache_calls((torch.float32, torch.bfloat16)))
@settings(max_examples=examples(15, 200))
def test_equally_many_tokens_need_no_cu_seqlens(data: st.DataObject, call: CacheCall) -> None:
    """(B, Sq, Hq, D) gives what the same tokens give packed, with `out` and without."""
    Sq = min(map(len, call.q))
    call = replace(call, q=tuple(q[len(q) - Sq :] for q in call.q), padding=0)
    if not Sq:
        return
    B, (_, Hq, D), Dv = len(call.q), call.q[0].shape, call.v[0].shape[-1]
    packed, packed_lse = call.run()
    q = torch.cat(call.q).view(B, Sq, Hq, D)
    given_out = {}
    if data.draw(st.booleans()):
        given_out = {"out": torch.full((B, Sq, Hq + 1, Dv + 3), torch.nan).to(q.dtype)[:, :, :Hq, :Dv]}
    out, lse = attend(q, *call.cache[:2], **call.arguments(), **given_out)
    assert torch.equal(out.flatten(0, 1), packed)
    assert torch.equal(lse.transpose(0, 1).reshape(Hq, B * Sq), packed_lse)
    assert not given_out or out is given_out["out"]


def one_sequence(Sq: int, Sk: int, dtype: torch.dtype = torch.float32) -> CacheCall:
    q, k, v = ((torch.randn(S, H, 16).to(dtype),) for S, H in ((Sq, 4), (Sk, 2), (Sk, 2)))
    return CacheCall(q, k, v, make_cache(k, v, torch.Generator().manual_seed(0), "rows", 16), causal=True)


@given(data=st.data(), call=cache_calls((torch.bfloat16,)))
@settings(max_examples=examples(12, 200))
def test_bits_depend_on_the_sequence_alone(data: st.DataObject, call: CacheCall) -> None:
    """Tokens at once, in chunks, in another cache and beside other sequences give the same bits."""
    call = replace(
        call, causal=True, window=(call.window[0], None), scales=None, options={"batch_invariant": True}
    )
    if call.cache.k.dtype != torch.bfloat16:
        call = replace(call, k=_bfloat16(call.k), v=_bfloat16(call.v))
    b = data.draw(st.sampled_from([b for b, q in enumerate(call.q) if len(q)]))
    q, k, v = call.q[b], call.k[b], call.v[b]
    Sq, Sk = len(q), len(k)
    q = q[max(0, Sq - Sk) :]
    Sq = len(q)
    ends = sorted({Sq, *data.draw(st.lists(st.integers(1, max(Sq, 1)), max_size=3))})
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))

    def run(qs: list[Tensor], ks: list[Tensor], vs: list[Tensor]) -> tuple[Tensor, Tensor]:
        page_size = data.draw(st.one_of(st.none(), st.integers(1, 40)))
        cache = make_cache(ks, vs, generator, data.draw(st.sampled_from(LAYOUTS)), page_size)
        return replace(call, q=tuple(qs), k=tuple(ks), v=tuple(vs), cache=cache).run()

    if not Sq:
        return
    whole, whole_lse = run([q], [k], [v])
    chunks = [(start, end, Sk - Sq + end) for start, end in pairwise([0, *ends])]
    parts, parts_lse = run(
        [q[start:end] for start, end, _ in chunks] + [call.q[0]],
        [k[:keys] for *_, keys in chunks] + [call.k[0]],
        [v[:keys] for *_, keys in chunks] + [call.v[0]],
    )
    assert torch.equal(parts[:Sq], whole) and torch.equal(parts_lse[:, :Sq], whole_lse)


def _bfloat16(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.float().bfloat16() for x in parts)


@given(call=cache_calls((torch.float32, torch.bfloat16)), data=st.data())
@settings(max_examples=examples(15, 200))
def test_later_calls_are_like_the_first(call: CacheCall, data: st.DataObject) -> None:
    """They take the fast path, and read the lengths and the table that there are then."""
    fast_path.clear()
    first, later = call.run_unwatched(), call.run_unwatched()
    prepared = isinstance(call.causal, bool)
    assert sum(map(len, _prepared_sizes())) == prepared
    assert all(map(torch.equal, later, first))
    b = data.draw(st.integers(0, len(call.k) - 1))
    length = data.draw(st.integers(0, len(call.k[b])))
    k, v = ((*x[:b], x[b][:length], *x[b + 1 :]) for x in (call.k, call.v))
    found = replace(call, k=k, v=v).run_unwatched()
    check_results(replace(call, k=k, v=v), found)
    assert sum(map(len, _prepared_sizes())) == prepared


def _prepared_sizes() -> list[list[Any]]:
    """The sizes that are prepared, of each kind of calls."""
    return [[call for call in calls.by_sizes.values() if call] for calls in fast_path._calls.values()]


def test_later_calls_look_at_lengths_too() -> None:
    call = one_sequence(3, 20)
    for _ in range(2):
        call.run_unwatched()
    with pytest.raises(ArgumentError, match="seqused_k is"):
        call.run_unwatched(seqused_k=torch.tensor([99], dtype=INT))


@pytest.mark.parametrize("columns", [16, 17])
@pytest.mark.parametrize("backend", ["", "emulator"])
def test_nothing_of_no_sequence_is_touched(
    backend: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of `out` after the last token stay as they are, also where a kernel cannot write in place."""
    if backend:
        pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
        monkeypatch.setenv("FLASH4_BACKEND", backend)
    call = one_sequence(3, 20, torch.bfloat16)
    q = torch.cat([*call.q, torch.randn(2, 4, 16).bfloat16()])
    for _ in range(2):
        out = torch.full((5, 4, columns), 7.0).bfloat16()[..., :16]
        attend(q, *call.cache[:2], out=out, cu_seqlens_q=torch.tensor([0, 3], dtype=INT), **call.arguments())
        assert (out[3:] == 7.0).all() and not (out[:3] == 7.0).any()


def test_autograd_notices_that_out_has_changed() -> None:
    call = one_sequence(3, 20)
    for _ in range(2):
        out, w = torch.zeros(1, 3, 4, 16), torch.ones(16, requires_grad=True)
        product = (out * w).sum()
        with torch.no_grad():
            attend(call.q[0][None], *call.cache[:2], out=out, **call.arguments())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_no_sequences() -> None:
    k = torch.randn(3, 16, 2, 8)
    table, none = torch.zeros(0, 4, dtype=INT), torch.zeros(0, dtype=INT)
    out, lse = attend(torch.randn(0, 2, 4, 8), k, k, block_table=table, seqused_k=none, return_lse=True)
    assert out.shape == (0, 2, 4, 8) and lse.shape == (0, 4, 2)


def test_a_full_dense_cache_needs_no_lengths() -> None:
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 24)
    expected = flash4_torch.attention(q, k, v, causal=True)
    torch.testing.assert_close(attend(q, k, v, causal=True), expected)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("given_out", [True, False])
def test_torch_library_accepts_the_operators(packed: bool, given_out: bool) -> None:
    call = one_sequence(3, 20)
    inputs: list[Any] = [call.q[0], *call.cache, call.cu_seqlens_q if packed else None, call.lengths]
    options = (3, 32, 0.25, None, 0, 0.0, 0, False)
    arguments = (*inputs, None, torch.randn(4), None, None, *options)
    if given_out:
        opcheck(torch.ops.flash4.attention_kvcache_out.default, (*arguments, torch.empty(3, 4, 16)))
    else:
        opcheck(torch.ops.flash4.attention_kvcache.default, arguments)


def test_compiled_graphs_have_no_breaks() -> None:
    call = one_sequence(3, 20)

    def step(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, out: Tensor
    ) -> tuple[Tensor, ...]:
        _, lse = attend(q, k, v, block_table=table, seqused_k=lengths, causal=True, out=out, return_lse=True)
        return out * 2, lse

    arguments = (call.q[0][None], *call.cache, call.lengths)
    shape = (1, 3, 4, 16)
    expected, found = torch.zeros(shape), torch.zeros(shape)
    eager = step(*arguments, expected)
    compiled = torch.compile(step, fullgraph=True)(*arguments, found)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, compiled, eager))


def test_a_gradient_is_refused_by_name() -> None:
    call = one_sequence(3, 20)
    out, _ = attend(call.q[0][None].requires_grad_(), *call.cache[:2], **call.arguments())
    with pytest.raises(NoGradientError, match="attention_kvcache has no gradient"):
        out.sum().backward()


def test_what_is_written_to_has_no_history() -> None:
    """`out` stays as it was to autograd, step by step; a backward through the result is refused by name."""
    call = one_sequence(3, 20)
    q, out = call.q[0][None].requires_grad_(), torch.zeros(1, 3, 4, 16)
    for _ in range(3):
        results = attend(q * 2, *call.cache[:2], **call.arguments(), out=out)
        assert not out.requires_grad and out.grad_fn is None
        for result in results:
            with pytest.raises(NoGradientError, match="attention_kvcache has no gradient"):
                result.sum().backward()
    with torch.no_grad():
        assert attend(q, *call.cache[:2], **call.arguments(), out=out)[0] is out


# Forward mode's first use loads decompositions that are written in TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_tangents_are_refused_by_name() -> None:
    """A function without a derivative loses no tangent silently, whether calls are repeated or not."""
    call = one_sequence(3, 20)
    q, k, v = call.q[0][None], *call.cache[:2]
    new = torch.randn(3, k.shape[2], k.shape[3])
    slots = torch.arange(3)
    outs, lses = torch.randn(2, 3, 4, 16), torch.randn(2, 4, 3)
    calls: dict[str, tuple[Any, Any]] = {
        "attention_kvcache": (q, lambda x: attend(x, k, v, **call.arguments())),
        "append_kvcache": (new, lambda x: flash4_torch.append_kvcache(x, new, k, v, slot_mapping=slots)),
        "merge_states": (outs, lambda x: flash4_torch.merge_states(x, lses)),
    }
    for name, (primal, function) in calls.items():
        function(primal)
        for _ in range(2):
            with forward_ad.dual_level():
                function(primal)
                with pytest.raises(NoGradientError, match=f"{name} has no gradient"):
                    function(forward_ad.make_dual(primal, torch.ones_like(primal)))


Q, K, TABLE = torch.randn(2, 1, 4, 8), torch.randn(5, 16, 2, 8), torch.zeros(2, 3, dtype=INT)
LENGTHS = torch.tensor([3, 40], dtype=INT)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank of q": ({"q": torch.randn(4, 8)}, "q is"),
    "dtype of q": ({"q": Q.int()}, "q is"),
    "dtype of a cache": ({"k_cache": K.half(), "v_cache": K.half()}, "k_cache is"),
    "dtypes of caches": ({"v_cache": K.half()}, "v_cache is"),
    "D": ({"q": torch.randn(2, 1, 4, 16)}, "k_cache is"),
    "heads": ({"q": torch.randn(2, 1, 3, 8)}, "q is .* transpose"),
    "pages": ({"v_cache": torch.randn(5, 8, 2, 8)}, "v_cache is"),
    "batch": ({"q": torch.randn(3, 1, 4, 8)}, "block_table is"),
    "entries": ({"block_table": None, "q": torch.randn(6, 1, 4, 8), "seqused_k": None}, "k_cache is"),
    "tokens": ({"max_seqlen_q": 3}, "max_seqlen_q is 3"),
    "no lengths": ({"seqused_k": None}, "seqused_k is"),
    "lengths' shape": ({"seqused_k": LENGTHS[:1]}, "seqused_k is"),
    "lengths' dtype": ({"seqused_k": LENGTHS.long()}, "seqused_k is"),
    "too many keys": ({"seqused_k": torch.tensor([3, 49], dtype=INT)}, "seqused_k is .* 48"),
    "negative keys": ({"seqused_k": torch.tensor([3, -1], dtype=INT)}, "seqused_k is"),
    "table's dtype": ({"block_table": TABLE.long()}, "block_table is"),
    "no such page": ({"block_table": TABLE + 5}, "block_table is"),
    "cu_seqlens_q of equal ones": ({"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=INT)}, "cu_seqlens_q is"),
    "packed without them": ({"q": torch.randn(2, 4, 8)}, "cu_seqlens_q is None"),
    "causal": ({"causal": torch.ones(3, dtype=torch.bool)}, "causal is"),
    "scale of a cache": ({"k_scale": torch.ones(())}, "k_scale is"),
    "num_splits": ({"num_splits": 0}, "num_splits is 0"),
    "out": ({"out": torch.empty(2, 1, 4, 9)}, "out is"),
    "expanded out": ({"out": torch.empty(1, 1, 4, 8).expand(2, 1, 4, 8)}, "out is .* must be apart"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks is"),
    "window": ({"window": (-3, 1)}, "window is"),
    "bound": ({"max_seqlen_k": 39}, "seqused_k is .* 39"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    arguments, message = BAD[name]
    good = {"q": Q, "k_cache": K, "v_cache": K, "block_table": TABLE, "seqused_k": LENGTHS}
    attend(**good)
    with pytest.raises(ArgumentError, match=message):
        attend(**(good | arguments))


def test_another_librarys_keyword_is_explained() -> None:
    with pytest.raises(KeywordError, match="it is called 'block_table' here"):
        attend(Q, K, K, page_table=TABLE, seqused_k=LENGTHS)


def test_a_forced_backend_that_cannot_serve_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", "sm90")
    with pytest.raises(BackendError, match=r"attention_kvcache B=2 .* pages of 16"):
        attend(Q, K, K, block_table=TABLE, seqused_k=LENGTHS)


def test_a_backend_of_other_calls_serves_gathered_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = attend(Q, K, K, block_table=TABLE, seqused_k=LENGTHS)
    monkeypatch.setenv("FLASH4_BACKEND", "tiled")
    with flash4_torch.testing.backends_used() as used:
        found = attend(Q, K, K, block_table=TABLE, seqused_k=LENGTHS)
    assert {name for _, name in used} == {"tiled"}
    torch.testing.assert_close(found, expected)


@given(
    target=st.sampled_from(list(TARGETS.values())),
    Sq=st.sampled_from([1, 3, 20, 100, 3000]),
    B=st.sampled_from([1, 40]),
    group=st.sampled_from([1, 4, 16]),
    page_size=st.sampled_from([None, 16, 64, 256]),
    packed=st.booleans(),
    float8=st.booleans(),
    batch_invariant=st.booleans(),
)
@settings(max_examples=examples(40, 300))
def test_warm_up_knows_every_kernel(
    target: Target,
    Sq: int,
    B: int,
    group: int,
    page_size: int | None,
    packed: bool,
    float8: bool,
    batch_invariant: bool,
) -> None:
    """What calls over common caches find is what `warmup` compiles for their words."""
    pytest.importorskip("tvm_ffi", reason="nvidia-cutlass-dsl is not installed")
    q = torch.empty(B * Sq, 2 * group, 64, dtype=torch.bfloat16)
    table = None if page_size is None else torch.empty(B, 4096 // page_size, dtype=INT)
    shape = (B, 4096, 2, 64) if page_size is None else (9, page_size, 2, 64)
    cache = torch.empty(shape, dtype=torch.float8_e4m3fn if float8 else q.dtype)
    packed = packed and page_size is not None
    ends = torch.empty(B + 1, dtype=INT) if packed else None
    inputs = CacheInputs(q, cache, cache, table, ends, torch.empty(B, dtype=INT))
    options = CacheOptions(Sq, 4096, 0.125, window_right=0, batch_invariant=batch_invariant)
    backend, problem = Finding(target), describe(inputs, options)
    assert not decode_kernel.limits(problem)
    assert backend.prepare(inputs, problem, None) is not None
    known = {(key.entry, key.static) for key in _known(target.arch, group)}
    assert backend.found and known.issuperset(backend.found)


@given(
    Sq=st.integers(1, 20),
    group=st.integers(1, 130),
    D=st.sampled_from([64, 128, 256]),
    float8=st.booleans(),
    batch_invariant=st.booleans(),
    num_splits=st.integers(0, 3),
    B=st.sampled_from([2, 60]),
    keys=st.sampled_from([512, 8192]),
)
@settings(max_examples=examples(60, 300))
def test_wgmma_multiplies_many_rows_whose_bits_may_differ(
    Sq: int, group: int, D: int, float8: bool, batch_invariant: bool, num_splits: int, B: int, keys: int
) -> None:
    """Batch-invariant calls have them only where each call of so many query heads has them."""
    q = torch.empty(B * Sq, 2 * group, D, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(B, keys, 2, D, dtype=torch.float8_e4m3fn if float8 else q.dtype, device="meta")
    options = CacheOptions(Sq, keys, 0.125, num_splits=num_splits, batch_invariant=batch_invariant)
    problem = describe(CacheInputs(q, cache, cache, seqused_k=torch.empty(B, dtype=INT)), options)
    for target in TARGETS.values():
        kernel = decode_kernel.decide(target, problem, 132)
        # D 256 leaves no room for results of splits next to tiles of 64 rows.
        may = (
            target is SM90A
            and not float8
            and (group > 32 and D < 256 if batch_invariant else Sq * group > 32)
        )
        assert kernel.form.wgmma == may
        # D 256 leaves no room for two warpgroups that share K and V, nor D 192 next to results of splits, and
        # few blocks are not worth it; where bits must not depend on a batch, each SM needs a group of splits.
        shares = Sq * group > decode.WARPGROUP_ROWS and D < (192 if batch_invariant else 256)
        tiles = B * 2 * -(-Sq * group // decode.SHARED_ROWS)
        if batch_invariant:
            shares = shares and tiles * -(-keys // 2048) >= 0.5 * 132
        else:
            shares = shares and keys > 512 and tiles * keys // decode.KEYS >= 3 * 132
        rows = decode.SHARED_ROWS if shares else decode.WARPGROUP_ROWS
        assert kernel.rows == rows if may else kernel.rows in decode.ROWS
        assert kernel.form.few_rows == (Sq * group <= decode.FEW_ROWS)


@functools.cache
def _known(arch: str, group: int) -> list[Key]:
    words = ["causal+kvcache", "plain+kvcache"]
    return ahead.kernels(arch, [64], ["bfloat16"], words, [group], gradients=False)


@pytest.mark.parametrize("length", [-1, 0, 2**63 - 1, 2**63])
def test_bounds_out_of_range_are_left_to_the_check(length: int) -> None:
    assert coarse_bound(length) == length


@given(st.integers(1, 1 << 40))
@example(1)
@example(64)
@example(1024)
@settings(max_examples=100)
def test_coarse_bounds(length: int) -> None:
    """They bound the length, closely, and stay for a while; a bound is its own."""
    bound = coarse_bound(length)
    assert length <= bound < max(length + length / 8, length + 64)
    assert coarse_bound(bound) == bound
    step = bound // 16 if bound > 1024 else 64
    assert len({coarse_bound(n) for n in range(bound, bound - min(step, 500), -1)}) == 1
