"""The host side of the forward over paged caches: who serves a call, by which kernel, and its launch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everything import examples, one_of
from flash4_torch.backends.compiled import SM90A, TARGETS, Target, forward, paged
from flash4_torch.backends.compiled.paged import PagedProblem
from flash4_torch.backends.compiled.workspace import Need, Workspace
from flash4_torch.configs import sm90
from flash4_torch.configs.sizes import Sizes
from flash4_torch.configs.types import widest_box
from flash4_torch.kvcache_problem import CacheInputs, CacheOptions
from flash4_torch.ops.kvcache import describe
from flash4_torch.problem import CallOptions
from flash4_torch.testing import emulate
from kernel_calls import Results, check_results, drawn
from kernel_runs import compiled
from paged_calls import PagedCall, in_pages
from test_configs import features

PAGED = {arch: target for arch, target in TARGETS.items() if target.has_pages}
EACH_TARGET = pytest.mark.parametrize("target", PAGED.values(), ids=PAGED)
CAUSAL = CallOptions(0.125, window_right=0)


def tensors(page_size: int = 32, D: int = 64, Dv: int = 64, **changes: Any) -> dict[str, Any]:
    """Arguments of `described` that it serves."""
    cache = torch.zeros(5, page_size, 2, D + Dv, dtype=torch.bfloat16)
    return {
        "q": torch.zeros(100, 4, D, dtype=torch.bfloat16),
        "k_cache": cache[..., :D],
        "v_cache": cache[..., D:],
        "block_table": torch.zeros(3, 7, dtype=torch.int32),
        "sinks": None,
        "options": CAUSAL,
        **changes,
    }


def described(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    sinks: torch.Tensor | None,
    options: CallOptions,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> PagedProblem:
    """The problem of a call of `attention_kvcache`."""
    B = len(block_table)
    ends, lengths = torch.zeros(B + 1, dtype=torch.int32), torch.zeros(B, dtype=torch.int32)
    inputs = CacheInputs(q, k_cache, v_cache, block_table, ends, lengths, None, sinks)
    longest = len(q) if max_seqlen_q is None else max_seqlen_q
    room = k_cache.shape[1] * block_table.shape[1] if max_seqlen_k is None else max_seqlen_k
    numbers = options.scale, options.window_left, options.window_right, options.softcap
    return paged.problem_of(describe(inputs, CacheOptions(longest, room, *numbers)))


@EACH_TARGET
@given(
    page_size=st.integers(1, 40).map(lambda n: 16 * n),
    D=st.integers(1, 32).map(lambda n: 8 * n),
    Dv=st.integers(1, 32).map(lambda n: 8 * n),
    lengths=st.tuples(st.integers(1, 9000), st.integers(1, 90000)),
    right=st.sampled_from([None, 0]),
    softcap=st.sampled_from([0.0, 30.0]),
)
@settings(max_examples=60)
def test_every_page_has_a_kernel(
    target: Target,
    page_size: int,
    D: int,
    Dv: int,
    lengths: tuple[int, int],
    right: int | None,
    softcap: float,
) -> None:
    """Its boxes divide pages and blocks, and it is one that the table names."""
    options = CallOptions(0.1, window_right=right, softcap=softcap)
    problem = described(
        **tensors(page_size, D, Dv, options=options), max_seqlen_q=lengths[0], max_seqlen_k=lengths[1]
    )
    assert not paged.limits(target, problem)
    asked: list[Any] = []
    kernel = paged.decide(target, problem, 132, lambda entry, static: asked.append((entry, *static)))
    ((entry, found, config),) = asked
    assert entry == target.forward and config == kernel.config
    assert page_size % found.page_box == config.keys % found.page_box == 0
    own = forward.features_of(problem.problem)
    assert found._replace(page_box=0, splits=False) == own
    assert (kernel.splits is not None) == found.splits
    widest = found._replace(page_box=widest_box(page_size), splits=False)
    every = forward.reachable(target, widest, problem.problem.spec.group)
    assert (widest._replace(splits=found.splits), config) in every
    assert kernel.params.max_seqlen == lengths[0]


@given(features(), st.sampled_from([32, 64, 128]), st.sampled_from([None, 1, 32]))
@settings(max_examples=100)
def test_tiles_for_pages_are_chosen_for_larger_boxes(found: Any, page_box: int, heads: int | None) -> None:
    """Rows of as many warpgroups have boxes at least as wide; others are for few tiles.

    A softcap takes more registers next to pages, and other tiles.
    """
    found = found._replace(mask="", dropout=False, varlen=True, softcap=False)
    paged, dense = (
        sm90.row(found._replace(page_box=box), Sizes(4096, 16384, heads=heads, num_sms=132))
        for box in (page_box, 0)
    )
    if paged.config.warpgroups == dense.config.warpgroups:
        assert widest_box(page_box, paged.config.keys) >= widest_box(page_box, dense.config.keys)
    assert dense.least_box == 0 and paged.least_box <= page_box


def problem_of(**changes: Any) -> PagedProblem:
    return described(**tensors(**changes))


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


REFUSED: dict[str, tuple[PagedProblem, str]] = {
    "page size": (problem_of(page_size=24), "the page size is 24, and it serves multiples of 16"),
    "head size": (problem_of(D=264), "D is 264 and Dv is 64, and it serves up to 256"),
    "causal flags": (problem_of()._replace(causal_flags=True), "causal is a tensor"),
    "columns": (
        problem_of(k_cache=half(5, 32, 2, 128)[..., ::2]),
        "it reads pages in place: columns side by side, all else at multiples of 16 bytes",
    ),
    "rows": (problem_of(v_cache=half(5, 32, 2, 68)[..., :64]), "it reads pages in place"),
    "one head for all": (problem_of(k_cache=half(5, 32, 1, 64).expand(5, 32, 2, 64)), "in place"),
    "odd head size": (problem_of(v_cache=half(5, 32, 2, 60)), "it reads pages in place"),
    "cache dtype": (
        problem_of(k_cache=half(5, 32, 2, 64).to(torch.float8_e4m3fn)),
        "the cache is torch.float8_e4m3fn, and it serves caches of q's dtype, torch.bfloat16",
    ),
    "dtype": (problem_of(q=torch.zeros(9, 4, 64)), "the dtype is torch.float32"),
    "sinks": (problem_of(sinks=torch.zeros(4, dtype=torch.float64)), "sinks are float64"),
    "sizes": (problem_of(block_table=half(1, 1).expand(3, 1 << 26)), "in 32 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_said(name: str) -> None:
    problem, reason = REFUSED[name]
    why = paged.limits(SM90A, problem)
    assert any(reason in sentence for sentence in why), why


def unchanged(params: Any) -> Any:
    return params


def new_tensors(needs: tuple[Need, ...]) -> Workspace:
    """Memory full of NaN, of 32 bits, each time."""
    return lambda: tuple(torch.full(shape, math.nan, dtype=dtype) for shape, dtype in needs)


def _found(entry: str, static: tuple[Any, ...]) -> Any:
    return compiled(*static)


def launch(
    target: Target,
    given: PagedCall,
    options: CallOptions,
    out: torch.Tensor,
    lse: torch.Tensor,
    min_seqlen_q: int = 0,
) -> None:
    """A launch as a backend makes it."""
    call = given.call
    problem = described(
        call.q, given.k, given.v, given.table, call.sinks, options, max_seqlen_q=max(call.lengths[0])
    )
    assert not paged.limits(target, problem)
    kernel = paged.decide(target, problem, 2, _found)
    ends = torch.tensor([0, *torch.tensor(call.lengths[0]).cumsum(0)])
    rest = given.table.long(), ends, given.seqused_k.long(), call.sinks, out, lse
    counter = torch.zeros(1, dtype=torch.int32)
    run = paged.sequence(kernel, unchanged, new_tensors, min_seqlen_q)
    run(call.q, given.k, given.v, *rest, counter)
    assert counter.item() == 0


@pytest.mark.parametrize(
    "target", one_of(2, [TARGETS["sm_90a"], TARGETS["sm_100a"]]), ids=lambda target: target.arch
)
@given(page_size=st.sampled_from([16, 48, 64, 256]), strided=st.booleans())
@settings(max_examples=examples(2, 8))
def test_results_are_right(target: Target, page_size: int, strided: bool) -> None:
    """Whatever the strides of out, and the integers' dtype."""
    features = forward.features_of(problem_of().problem)._replace(sinks="bfloat16")
    kernel = features, None
    call = drawn(kernel, lengths=((30, 0, 90), (50, 33, 130)), right=0)
    out, lse = half(120, 2, 64).fill_(math.nan), torch.full((2, 120), math.nan)
    if strided:
        out = half(120, 2, 72).fill_(math.nan)[..., 8:]
    with emulate.device(target.arch):
        launch(target, in_pages(call, page_size, "heads", seed=1), CAUSAL, out, lse)
    check_results(kernel, call, Results(out, lse))


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -math.inf, 1.0, 2.0])])
@pytest.mark.parametrize("missing", ["pages", "blocks"])
def test_a_cache_without_pages_has_no_keys(missing: str, sinks: torch.Tensor | None) -> None:
    kernel = forward.Kernel(lambda *args: pytest.fail("it was launched"), None, None)
    pages, blocks = (0, 3) if missing == "pages" else (3, 0)
    out, lse = half(6, 4, 64).fill_(math.nan), torch.full((4, 6), math.nan)
    k, table = half(pages, 16, 2, 64), torch.zeros(2, blocks, dtype=torch.int32)
    lengths = torch.tensor([0, 2, 6]), torch.zeros(2)
    paged.sequence(kernel, unchanged, new_tensors)(
        half(6, 4, 64), k, k, table, *lengths, sinks, out, lse, torch.zeros(1)
    )
    assert (out == 0).all()
    assert torch.equal(lse, torch.full((4, 6), -math.inf) if sinks is None else sinks[:, None].expand(4, 6))
