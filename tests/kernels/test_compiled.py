"""The backends of our kernels up to the launch: a kernel's arguments, and the use of its results."""

from __future__ import annotations

import importlib.util
import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash4_torch
from cases import Case, cases
from flash4_torch import testing
from flash4_torch.backends import dispatch, tile_counters
from flash4_torch.backends.compiled import (
    SM80_FAMILY,
    SM80_ON_REQUEST,
    SM90A,
    SM100A,
    SM103A,
    TARGETS,
    Compiled,
    Target,
    forward,
    served,
)
from flash4_torch.compile import arch
from flash4_torch.configs.sections import evenly
from flash4_torch.configs.types import Mods
from flash4_torch.emulator.limits import max_shared
from flash4_torch.ops.impl import CallOptions, describe_inputs
from flash4_torch.problem import Extent, Inputs, Problem
from on_cpu import gpu, name_of
from test_laws import packed
from test_matches_reference import NAMES, results_and_gradients

HALVES = (torch.bfloat16, torch.float16)
EACH_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
SM80 = TARGETS["sm_80"]
KERNELS = {target.arch: target for target in (SM80, SM90A, SM100A)}
EACH_KERNEL = pytest.mark.parametrize("target", KERNELS.values(), ids=KERNELS)
"""Other targets share the kernels of these."""


@EACH_KERNEL
@given(cases(HALVES), st.sampled_from([0.0, 0.0, 0.3, 1.0]), st.booleans())
@settings(max_examples=150)
def test_values_and_gradients(target: Target, case: Case, dropout_p: float, deterministic: bool) -> None:
    """The kernels' arguments are complete and right, whatever the call."""
    dropout = {"dropout_p": dropout_p, "rng_state": testing.peek_rng_state()} if dropout_p else {}
    name = name_of(target)
    with gpu(target), testing.backends_used() as used, testing.poisoned_memory():
        out, lse = flash4_torch.attention(
            case.q,
            case.k,
            case.v,
            **case.kwargs,
            dropout_p=dropout_p,
            deterministic=deterministic,
            return_lse=True,
        )
        cotangents = torch.randn_like(out, dtype=torch.float64), torch.randn_like(lse, dtype=torch.float64)
        actual = results_and_gradients(case, out, lse, *cotangents)
    assert used == {("attention", name): 1, ("attention_backward", name): 1}
    assert out.is_contiguous() and lse.is_contiguous()
    exact = results_and_gradients(case, *case.exact(**dropout), *cotangents)
    peer = results_and_gradients(case, *case.exact(case.q.dtype, **dropout), *cotangents)
    # The rounding error of out as stored enters the gradient of every score of its row.
    products, eps = (cotangents[0] * out).detach(), torch.finfo(case.q.dtype).eps
    noise = {"dmask": eps * products.norm().item()}
    if case.q.numel() and case.k.numel():
        scale = case.kwargs["scale"] or case.q.shape[-1] ** -0.5
        of_row = eps / 2 * products.abs().sum(-1).max().item()
        noise["dq"] = of_row * abs(scale) * case.k.detach().abs().max().item()
    for name, a, e, p in zip(NAMES, actual, exact, peer, strict=False):
        testing.assert_close_as_peer(a, e.double(), p, what=name, noise=noise.get(name, 0.0))


@EACH_KERNEL
@given(packed(), st.sampled_from([torch.int32, torch.int64]))
def test_varlen(
    target: Target, problem: tuple[list[int], list[int], dict[str, Any]], dtype: torch.dtype
) -> None:
    q_lengths, k_lengths, kwargs = problem
    q, k, v = (
        torch.randn(sum(lengths), H, d).bfloat16()
        for lengths, H, d in ((q_lengths, 4, 8), (k_lengths, 2, 8), (k_lengths, 2, 5))
    )
    ends = [torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=dtype) for n in (q_lengths, k_lengths)]
    longest = {f"max_seqlen_{x}": max(n, default=0) for x, n in (("q", q_lengths), ("k", k_lengths))}

    def run() -> Any:
        torch.manual_seed(3)
        return flash4_torch.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=ends[0],
            cu_seqlens_k=ends[1],
            return_lse=True,
            **longest | kwargs,
        )

    with gpu(target), testing.backends_used() as used, testing.poisoned_memory():
        ours = run()
    assert set(used) == {("attention_varlen", name_of(target))}
    for a, b in zip(ours, run(), strict=True):
        torch.testing.assert_close(a, b)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def launched(*tensors: torch.Tensor, **kwargs: Any) -> Any:
    """The launch of one call."""
    with gpu() as machine:
        flash4_torch.attention(*tensors, **kwargs)
    (launch,) = machine.launches
    return launch


@pytest.mark.parametrize(
    "layout",
    {
        "contiguous": lambda: half(2, 5, 3, 16),
        "heads first": lambda: half(2, 3, 5, 16).transpose(1, 2),
        "of a joint projection": lambda: half(2, 5, 3, 3, 16)[:, :, 1],
        "sliced": lambda: half(2, 9, 4, 32)[:, 2:7, 1:, 8:24],
        "one row, one head": lambda: half(1, 1, 1, 16),
    }.values(),
)
def test_what_the_copy_engine_reads_is_not_copied(layout: Any) -> None:
    x = layout()
    q, k, v, *_ = launched(x, x, x).args
    assert all(y.data_ptr() == x.data_ptr() and y.stride() == x.stride() for y in (q, k, v))


@pytest.mark.parametrize(
    "layout",
    {
        "no unit stride": lambda: half(2, 5, 3, 32)[..., ::2],
        "odd strides": lambda: half(2, 5, 3, 18)[..., :16],
        "odd base": lambda: half(2 * 5 * 3 * 16 + 1)[1:].view(2, 5, 3, 16),
        "expanded": lambda: half(1, 5, 3, 16).expand(2, 5, 3, 16),
        "expanded heads": lambda: half(2, 5, 1, 16).expand(2, 5, 3, 16),
        "odd stride of a single entry": lambda: half(900).as_strided((1, 5, 3, 16), (241, 48, 16, 1)),
        "odd head size": lambda: half(2, 5, 3, 13),
    }.values(),
)
def test_what_it_does_not_is(layout: Any) -> None:
    x = layout()
    q, k, v, *_ = launched(x, x, x).args
    D = x.shape[-1]
    for y in (q, k, v):
        assert y.data_ptr() != x.data_ptr() and torch.equal(y[..., :D], x) and not y[..., D:].any()


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({}, {}),
        ({"causal": True}, {"right": True}),
        ({"window": (3, 2)}, {"left": True, "right": True}),
        ({"window": (63, 63)}, {}),
        ({"window": (62, None)}, {"left": True}),
        ({"softcap": 2.0}, {"softcap": True, "scaled": True}),
        ({"softcap": 65.0}, {"softcap": True, "scaled": True, "large_softcap": True}),
        ({"scale": 0.0}, {"scaled": True}),
        ({"scale": -1.0}, {"scaled": True}),
        ({"dropout_p": 0.1}, {"dropout": True}),
        ({"deterministic": True}, {}),
        ({"attn_mask": torch.ones(64, dtype=torch.bool)}, {"mask": "bool"}),
        ({"attn_mask": torch.ones(64)}, {"mask": "float32", "scaled": True}),
        ({"sinks": torch.ones(2).bfloat16()}, {"sinks": "bfloat16"}),
    ],
    ids=str,
)
def test_only_what_a_call_uses_is_compiled_in(kwargs: dict[str, Any], expected: dict[str, Any]) -> None:
    x = half(1, 64, 2, 32)
    features = launched(x, x, x, **kwargs).features
    switches = (
        "left",
        "right",
        "softcap",
        "scaled",
        "dropout",
        "deterministic",
        "dmask",
        "large_softcap",
        "tf32",
        "dropout_of_part",
        "segments",
        "splits",
    )
    bare = dict.fromkeys(switches, False)
    assert features._asdict() == {
        "dtype": "bfloat16",
        "D": 32,
        "Dv": 32,
        "varlen": False,
        "mask": "",
        "running": "",
        "sinks": "",
        "page_box": 0,
        "mods": Mods(),
        **bare,
        **expected,
    }


def test_the_last_query_alone_needs_no_causal_mask() -> None:
    assert not launched(half(1, 1, 2, 32), half(1, 99, 2, 32), half(1, 99, 2, 32), causal=True).features.right


@pytest.mark.parametrize("shape", [(1, 1, 1, 900), (2, 1, 1, 900), (1, 3, 20, 900), (2, 3, 20, 1), (20, 900)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_are_read_beforehand(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = torch.rand(shape).gt(0.5).to(dtype)
    with gpu() as machine:
        flash4_torch.attention(half(2, 20, 3, 16), half(2, 900, 3, 16), half(2, 900, 3, 16), attn_mask=mask)
    (launch,), (plan,) = machine.launches, machine.masks
    values, _ = launch.args[9]
    assert values.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    assert (plan.rows, plan.keys) == (launch.config.queries, launch.config.keys)


def problem(target: Target = SM90A, **changes: Any) -> Problem:
    """A plain call on the target's GPU, except for some fields of its problem."""
    x = torch.empty(2, 512, 8, 64, dtype=torch.bfloat16)
    plain = describe_inputs(Inputs(x, x, x), CallOptions(0.125, None, None, 0.0, 0.0, False))
    of_spec = {name: changes.pop(name) for name in tuple(changes) if name in plain.spec._fields}
    spec = plain.spec._replace(**{"device": "cuda", "capability": target.capability, **of_spec})
    return plain._replace(spec=spec, **changes)


def why_not(call: Problem, name: str = "sm90") -> list[str]:
    """The backend's reasons not to serve the call."""
    return dispatch.reasons(call)[name]


@EACH_TARGET
@pytest.mark.parametrize("backward", [False, True])
def test_a_plain_call_on_its_gpu_is_served(target: Target, backward: bool) -> None:
    assert why_not(problem(target, backward=backward), name_of(target)) == []


def test_every_architecture_is_a_target_of_one_backend() -> None:
    assert tuple(TARGETS) == arch.NAMES
    for target in TARGETS.values():
        call = problem(target, softcap=1.0, dropout=True)
        serving = [name for name, why in dispatch.reasons(call).items() if not why]
        assert serving[0] == name_of(target) and arch.of_capability(target.capability) == target.arch


@EACH_TARGET
def test_our_kernels_come_before_torchs_flash_attention(target: Target) -> None:
    """torch's kernel serves the same call after them."""
    serving = [name for name, why in dispatch.reasons(problem(target)).items() if not why]
    assert serving[0] == name_of(target) and "sdpa" in serving[1:]


@pytest.mark.parametrize("target", [SM90A, SM100A, SM103A], ids=lambda target: target.arch)
def test_kernels_for_all_gpus_run_on_request_where_there_are_others(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = problem(target)
    (reason,) = why_not(call, "sm80")
    assert f"compute capability is {target.capability}" in reason
    assert reason.endswith("and this one where FLASH4_BACKEND=sm80 asks for it")
    assert dispatch.own_backend(target.capability) == name_of(target)
    monkeypatch.setenv("FLASH4_BACKEND", "sm80")
    backend = dispatch.choose(call)
    assert backend.name == "sm80" == dispatch.own_backend(target.capability)
    assert isinstance(backend, Compiled)
    assert backend.target(call).arch == target.arch and backend.target(call).forward == SM80.forward
    (reason,) = why_not(problem(capability=(7, 5)), "sm80")
    assert reason.endswith(f"{(12, 0)} and {(12, 1)}")


def test_kernels_for_all_gpus_have_room_on_each() -> None:
    """No GPU is given a table that needs more shared memory than it has."""
    assert len(SM80_FAMILY) == 6
    for target in (*SM80_FAMILY, *SM80_ON_REQUEST):
        major, minor = target.capability
        backward, room = target.backward_configs, max_shared(10 * major + minor)
        assert target.forward_configs.shared_memory <= room
        assert max(backward.shared_memory, backward.shared_memory_unasked) <= room


@EACH_TARGET
def test_weights_are_served_on_every_gpu(target: Target) -> None:
    assert why_not(problem(target, weights=True), name_of(target)) == []


@EACH_TARGET
@pytest.mark.parametrize("other", TARGETS.values(), ids=TARGETS)
def test_no_backend_serves_anothers_gpu(target: Target, other: Target) -> None:
    if name_of(target) != name_of(other):
        (reason,) = why_not(problem(other), name_of(target))
        assert f"compute capability is {other.capability}, and it serves" in reason
        assert str(target.capability) in reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "the tensors are on cpu"),
        ({"capability": (8, 0)}, r"compute capability is \(8, 0\)"),
        ({"dtype": torch.float32}, "the dtype is torch.float32"),
        ({"dtype": torch.float64}, "the dtype is torch.float64"),
        ({"D": 257}, "D is 257"),
        ({"Dv": 264}, "Dv is 264"),
        ({"mask": "float64:1111"}, "attn_mask is float64"),
        ({"backward": True, "D": 264}, "it serves up to 256"),
        ({"extent": Extent(1, 1, (1 << 30) + 1, 1, 1)}, "32 bits"),
        ({"extent": Extent(1 << 20, 1 << 10, 1, 1 << 8, 1)}, "32 bits"),
    ],
)
def test_reasons(changes: dict[str, Any], words: str) -> None:
    (reason,) = why_not(problem(**changes))
    assert re.search(words, reason)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """The backend forgets which packages are missing, before and after."""
    served.missing_packages.cache_clear()
    yield
    served.missing_packages.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is only needed where kernels have not been exported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "cutlass" in name else name)
    (reason,) = why_not(problem())
    assert reason.startswith("nvidia-cutlass-dsl must be installed")
    monkeypatch.setenv("FLASH4_AOT_DIR", "/kernels")
    assert why_not(problem()) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    served.missing_packages.cache_clear()
    (reason,) = why_not(problem())
    assert reason.startswith("apache-tvm-ffi must be installed")


LENGTHS = st.one_of(st.integers(1, 4000), st.sampled_from([1 << 17, 1 << 20]))


@given(st.integers(1, 4), LENGTHS, st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_sections_hold_whole_groups_that_fit_the_cache(
    B: int, S: int, Hk: int, group: int, causal: bool
) -> None:
    """Sections may also be as large as keeps all SMs busy, but never above 48 heads or the heads there are.

    Without a right bound, KV heads are taken one by one, and two by two if they are long.
    """
    band = problem().band._replace(right=0 if causal else None)
    call = problem(group=group, extent=Extent(B, S, S, Hk * group, Hk), band=band)
    config = forward.config_of(SM90A, call, 132)
    section = forward.params_of(SM90A, call, config, 132).heads_per_section
    packs = -(-group // config.pack_gqa)
    if not causal or S == 1:
        assert section == (1 if S <= 8192 else 2 * packs)
        return
    key_heads, rest = divmod(section, packs)
    assert rest == 0 and 1 <= key_heads <= B * Hk
    if key_heads > 1:
        assert section <= 48
        wanted = key_heads * 2 // 3
        tiles = (wanted - 1) * packs * -(-S // config.queries)
        assert wanted * S * (64 + 64) * 2 <= 32 << 20 or tiles < 4 * 132


@pytest.mark.parametrize(
    ("heads", "wanted", "taken"), [(16, 5, 4), (32, 7, 8), (40, 9, 8), (128, 17, 16), (31, 7, 8)]
)
def test_sections_are_of_a_size(heads: int, wanted: int, taken: int) -> None:
    assert evenly(heads, wanted) == taken


@pytest.mark.parametrize(
    ("S", "right", "tail"), [(384, 0, False), (300, 0, False), (300, 1, True), (1, 0, True)]
)
def test_the_end_is_masked_where_the_band_does_not_hide_it(S: int, right: int, tail: bool) -> None:
    band = problem().band._replace(right=right)
    call = problem(D=128, Dv=128, extent=Extent(1, S, S, 4, 4), band=band)
    assert forward.config_of(SM90A, call, 132).ragged_k == tail


def test_bounds_beyond_32_bits_are_cut() -> None:
    call = problem(band=problem().band._replace(left=1 << 40, right=-(1 << 40)))
    assert forward.params_of(SM90A, call, forward.config_of(SM90A, call, 132), 132)[2:4] == (
        1 << 30,
        -(1 << 30),
    )


@pytest.mark.parametrize(("B", "Sq", "Sk"), [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
def test_nothing_is_launched_for_nothing(B: int, Sq: int, Sk: int) -> None:
    q, k = half(B, Sq, 2, 13), half(B, Sk, 2, 13)
    with gpu() as machine, testing.poisoned_memory():
        out, lse = flash4_torch.attention(q, k, k, return_lse=True)
    assert not machine.launches
    assert out.shape == (B, Sq, 2, 13) and not out.any() and (lse == -math.inf).all()


class Streams:
    """A stand-in for the driver, with current streams and a record of the allocations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.current = {0: 11, 1: 11}
        self.capturing = False
        self.allocations: list[int] = []
        self.capture = 0
        for name in ("_of_stream", "_many_of_stream", "_unused", "_reserves", "_of_capture"):
            monkeypatch.setattr(tile_counters, name, {})
        monkeypatch.setattr(tile_counters, "_retired", [])
        monkeypatch.setattr(tile_counters, "capture_of", lambda stream: self.capture)
        monkeypatch.setattr(tile_counters, "current_stream", self.current.__getitem__)
        monkeypatch.setattr(tile_counters, "is_capturing", lambda index: self.capturing)
        monkeypatch.setattr(tile_counters, "_zeros", self.zeros)

    def zeros(self, index: int, n: int, wait: bool = False) -> torch.Tensor:
        # Counters that stay must not come from a graph's memory: another thread allocates them and waits.
        assert wait == (not self.capturing) == (threading.current_thread() is not threading.main_thread())
        self.allocations.append(n)
        return torch.zeros(n, dtype=torch.int32)


def test_streams_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    found = {}
    for _ in range(2):
        for index in (0, 1):
            for stream in range(300):
                streams.current[index] = stream
                counter = tile_counters.counter(index)
                assert counter.shape == (1,) and counter.dtype == torch.int32
                assert found.setdefault((index, stream), counter.data_ptr()) == counter.data_ptr()
    assert len(set(found.values())) == len(found)
    assert len(streams.allocations) == 6


def words_of(counters: torch.Tensor) -> range:
    return range(counters.data_ptr(), counters.data_ptr() + 4 * counters.numel(), 4)


def test_captures_share_counters_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that one stream captures in one capture share; no memory of the graph is taken for them."""
    streams = Streams(monkeypatch)
    eager = [tile_counters.counter(0), tile_counters.counters(0, 100)]
    before = len(streams.allocations)
    streams.capturing = True
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for streams.capture in (1, 2, 1, 3):
        for streams.current[0] in (11, 12):
            made = [tile_counters.counter(0), tile_counters.counters(0, 70), tile_counters.counter(0)]
            assert [len(x) for x in made] == [1, 128, 1]
            assert made[1].data_ptr() == made[2].data_ptr()
            found.setdefault((streams.capture, streams.current[0]), []).extend(made)
    assert len(streams.allocations) == before
    owners: dict[int, object] = {word: "eager" for x in eager for word in words_of(x)}
    for owner, counters in found.items():
        for word in {word for x in counters for word in words_of(x)}:
            assert owners.setdefault(word, owner) == owner


def test_captures_without_a_reserve_have_their_graphs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    streams.capturing = True
    captured = [tile_counters.counter(0) for _ in range(2)]
    assert streams.allocations == [1, 1] and captured[0].data_ptr() != captured[1].data_ptr()


def test_a_reserve_is_filled_by_eager_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_counters, "_RESERVE", 256)
    streams = Streams(monkeypatch)
    first, taken = tile_counters.counter(0), set(words_of(tile_counters.counters(0, 9)))
    for streams.capture in range(20):
        streams.capturing = True
        made = [tile_counters.counters(0, 60) for _ in range(2)]
        assert made[0].data_ptr() == made[1].data_ptr() and len(made[0]) == 64
        assert len(streams.allocations) < 3 + 20 and not taken & set(words_of(made[0]))
        taken |= set(words_of(made[0]))
        streams.capturing = False
        tile_counters.counter(0)
    assert first.data_ptr() in {x.data_ptr() for x in tile_counters._retired}
    assert 64 not in streams.allocations
    streams.capturing = True
    huge = tile_counters.counters(0, 300)
    assert streams.allocations[-1] == 512 == len(huge)
