"""Documents served as sequences inside of batch entries, in the emulator with its race checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from everything import EVERYTHING, one_of
from flash4_torch.backends.flex import compiled, intervals, seen_rows
from flash4_torch.masks import Band
from flash4_torch.problem import Extent
from flex_calls import ARCHS, SCHEDULES, Call, check, check_gradients, emulated, made, tensors, with_intervals
from flex_mods import H, Mod

PACKED = ARCHS[:2]
"""Architectures whose kernels take segments."""
# In CI each runs the kernels of one of them.
RESULTS = pytest.mark.parametrize("arch", one_of(2, PACKED))
GRADIENTS = pytest.mark.parametrize("arch", one_of(2, PACKED[::-1]))
PHASES = [Phase.explicit, Phase.generate] if EVERYTHING else [Phase.explicit]


def documents(seed: int, S: int, longest: int, *, same: bool = False) -> Tensor:
    """The number of each position's document, (2, S), of lengths up to `longest`; others for each entry."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(2, S, generator=generator) < 1.5 / longest
    begins[:, ::longest] = True
    return begins[:1].expand(2, S).cumsum(-1) if same else begins.cumsum(-1)


def mask_of(document: Tensor, *, is_causal: bool) -> Mod:
    def together(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        same = document[b, i] == document[b, j]
        return same & (j <= i) if is_causal else same

    return together


def shown(found: intervals.Segments, B: int, S: int) -> Tensor:
    """What segments show, (B, S, S)."""
    seen = torch.zeros(B * S, B * S, dtype=torch.bool)
    for begin, end in found.ends.unfold(0, 2, 1).tolist():
        n = end - begin
        assert 0 < n <= found.longest and begin // S == (end - 1) // S
        i = torch.arange(n)
        seen[begin:end, begin:end] = torch.as_tensor(found.band.visible(i[:, None], i, n, n)).expand(n, n)
    return torch.stack([seen[b * S : (b + 1) * S, b * S : (b + 1) * S] for b in range(B)])


@given(
    seed=st.integers(0, 1 << 20), S=st.integers(1, 90), longest=st.integers(1, 60), is_causal=st.booleans()
)
def test_documents_are_segments(seed: int, S: int, longest: int, is_causal: bool) -> None:
    seen = mask_of(documents(seed, S, longest), is_causal=is_causal)(
        torch.arange(2)[:, None, None], Tensor(), torch.arange(S)[:, None], torch.arange(S)
    )
    places = torch.arange(S)
    first = torch.where(seen, places, S).amin(-1)
    last = torch.where(seen, places, -1).amax(-1)

    def found_in(first: Tensor) -> intervals.Segments | None:
        rows = torch.stack([last - first + 1, first, last])[:, :, None]
        own = seen_rows.judged(rows, Band(), Extent(2, S, S, 1, 1))
        return intervals._segments(own, 2, S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "_MOST_PADDED", 1e9)
        found = found_in(first)
        assert found is not None
        assert torch.equal(shown(found, 2, S), seen)
        # A row that sees one key less, or of another document, is in no segment.
        at = seed % S
        if first[0, at] < last[0, at]:
            first[0, at] += 1
            assert found_in(first) is None


def test_short_documents_keep_bounds() -> None:
    """Tiles that begin with them would be emptier than tiles across them are full of hidden scores."""
    i = torch.arange(2048)
    for length, are_segments in ((64, False), (400, False), (512, True), (700, True), (2048, True)):
        first = i // length * length
        rows = torch.stack([i - first + 1, first, i])[:, None, None]
        own = seen_rows.judged(rows, Band(), Extent(1, 2048, 2048, 1, 1))
        assert (intervals._segments(own, 1, 2048) is not None) == are_segments, length


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether kernels that were chosen have segments; documents may be short."""
    monkeypatch.setattr(intervals, "_MOST_PADDED", 1e9)
    found: list[bool] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(target: Any, problem: Any, *args: Any) -> Any:
            found.append(problem.spec.segments)
            return original(target, problem, *args)

        return chosen

    for name in ("chosen", "chosen_backward"):
        monkeypatch.setattr(compiled, name, noted(getattr(compiled, name)))
    return found


def call_of(seed: int, S: int, longest: int, D: int = 64, *, is_causal: bool = True, **options: Any) -> Call:
    torch.manual_seed(seed)
    mask_mod = mask_of(documents(seed, S, longest, same=seed % 2 == 0), is_causal=is_causal)
    return with_intervals(made(tensors(S, S, D), None, mask_mod, **options), mask_mod)


def heads_first(x: Tensor) -> Tensor:
    """The same numbers with heads before positions in memory, as FlexAttention has them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@RESULTS
def test_results(arch: str, segments: list[bool]) -> None:
    @settings(max_examples=20, phases=PHASES)
    @given(st.integers(0, 1 << 20), st.integers(140, 500), st.integers(3, 300), st.sampled_from(SCHEDULES))
    @example(1, 421, 190, SCHEDULES[0])
    @example(2, 333, 60, SCHEDULES[1])
    def run(seed: int, S: int, longest: int, schedule: dict[str, Any]) -> None:
        call = call_of(seed, S, longest)
        if seed % 3:
            call = replace(call, q=heads_first(call.q), k=heads_first(call.k), v=heads_first(call.v))
        check(call, arch, schedule)

    run()
    assert all(segments)


@GRADIENTS
def test_gradients(arch: str, segments: list[bool]) -> None:
    @settings(max_examples=12, phases=PHASES)
    @given(
        st.integers(0, 1 << 20),
        st.integers(140, 400),
        st.integers(3, 300),
        st.booleans(),
        st.sampled_from(SCHEDULES),
    )
    @example(1, 333, 170, True, SCHEDULES[0])
    @example(3, 270, 60, False, SCHEDULES[1])
    def run(seed: int, S: int, longest: int, is_ordered: bool, schedule: dict[str, Any]) -> None:
        call = call_of(seed, S, longest, is_causal=seed % 5 != 3, deterministic=is_ordered)
        if seed % 3:
            call = replace(call, q=heads_first(call.q), k=heads_first(call.k), v=heads_first(call.v))
        check_gradients(call, arch, schedule, has_dlse=seed % 2 == 1)

    run()
    assert all(segments)


@RESULTS
def test_values_of_other_documents_do_not_matter(arch: str, segments: list[bool]) -> None:
    """Also infinite ones right behind a document."""
    document = (torch.arange(300) >= 150).long().expand(2, 300)
    mask_mod = mask_of(document, is_causal=True)
    q, k, v = tensors(300, 300, 64)
    v[:, 150:] = torch.inf
    call = with_intervals(made((q, k, v), None, mask_mod), mask_mod)
    out, _ = emulated(call.results, arch, SCHEDULES[0])
    assert bool(out[:, :150].isfinite().all()) and not bool(out[:, 150:].isfinite().any())
    assert segments == [True]


@GRADIENTS
def test_gradients_of_other_documents_do_not_matter(arch: str, segments: list[bool]) -> None:
    """Also NaN ones right behind a document, of rows in the same block."""
    document = (torch.arange(300) >= 150).long().expand(2, 300)
    mask_mod = mask_of(document, is_causal=True)
    inputs = [x.requires_grad_() for x in tensors(300, 300, 64)]
    call = with_intervals(made(inputs, None, mask_mod), mask_mod)
    out, _ = call.results()
    dout = torch.randn(out.shape).to(out.dtype)
    dout[:, 150:] = torch.nan
    found = emulated(lambda: torch.autograd.grad(out, inputs, dout), arch, SCHEDULES[0])
    for x in found:
        assert bool(x[:, :150].isfinite().all()) and not bool(x[:, 150:].isfinite().all())
    assert segments == [True]


if EVERYTHING:

    @pytest.mark.parametrize("arch", PACKED)
    @pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_head_sizes(is_causal: bool, D: int, arch: str, segments: list[bool]) -> None:
        call = call_of(D + 1, 390, 200, D, is_causal=is_causal)
        check(call, arch, SCHEDULES[0])
        check_gradients(call, arch, SCHEDULES[1])
        assert all(segments)

    @pytest.mark.parametrize("arch", PACKED)
    @pytest.mark.parametrize("options", [{"softcap": 2.0}, {"window_right": 0}], ids=str)
    def test_beside_other_options(options: dict[str, Any], arch: str, segments: list[bool]) -> None:
        call = call_of(5, 300, 170, is_causal=False, **options)
        call = replace(call, mods=call.mods._replace(sinks=torch.randn(H)))
        check(call, arch, SCHEDULES[0])
        check_gradients(call, arch, SCHEDULES[1])
        assert all(segments)

    @pytest.mark.parametrize("arch", PACKED)
    def test_a_score_mod_keeps_positions_of_the_entry(arch: str, segments: list[bool]) -> None:
        mask_mod = mask_of(documents(6, 300, 170), is_causal=True)
        score_mod: Mod = lambda s, b, h, i, j: s + i * 0.01 + j * 0.02  # noqa: E731
        check(with_intervals(made(tensors(300, 300), score_mod, mask_mod), mask_mod), arch, SCHEDULES[0])
        assert not any(segments)
