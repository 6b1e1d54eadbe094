"""score_mod, mask_mod and block_mask beside all other arguments of `attention` and `attention_varlen`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import flash4_torch
from flash4_torch.errors import ArgumentError, Flash4Error, RangeError, ShapeError
from flash4_torch.masks import Band
from flash4_torch.ops import draw_rng_state
from flash4_torch.reference.attention import attention as definition
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring
from flash4_torch.testing import backends_used, poisoned_memory
from flex_mods import H, Mod, Parts, drawn_mask

bands: Any = st.sampled_from([{}, {"causal": True}, {"window": (9, 2)}, {"window": (None, -1)}])
names = st.lists(st.sampled_from(Parts.NAMES[:-1]), max_size=2, unique=True)
lengths = st.tuples(st.integers(1, 40), st.integers(1, 40))


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def band_of(options: dict[str, Any]) -> Band:
    left, right = options.get("window", (None, None))
    return Band(left, 0 if options.get("causal") else right)


def drawn_state(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return draw_rng_state(torch.device("cpu"))


def same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], wanted: list[Tensor]) -> None:
    """Results and gradients agree, and rows that see nothing give nothing."""
    upstream = [torch.where(x.isfinite(), torch.randn_like(x), 0.0) for x in theirs]
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(theirs, wanted, upstream, **options)
    with poisoned_memory():
        found = torch.autograd.grad(ours, wanted, upstream, **options)
    for x, y in zip((*ours, *found), (*theirs, *expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


@settings(max_examples=25)
@given(
    names=names,
    mask=st.builds(drawn_mask, st.integers(0, 20), st.integers(1, 3), st.integers(1, 40)),
    given_as=st.sampled_from(["mask_mod", "block_mask", "nothing"]),
    lengths=lengths,
    band=bands,
    softcap=st.sampled_from([0.0, 2.0]),
    dropout_p=st.sampled_from([0.0, 0.4]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_functions_beside_all_options_match_the_definition(
    names: list[str],
    mask: Mod,
    given_as: str,
    lengths: tuple[int, int],
    band: dict[str, Any],
    softcap: float,
    dropout_p: float,
    has_sinks: bool,
    seed: int,
) -> None:
    """out, lse and all gradients; a block mask says what its mask_mod says."""
    (Sq, Sk), parts = lengths, Parts()
    q, k, v = leaf(2, Sq, H, 4), leaf(2, Sk, 2, 4), leaf(2, Sk, 2, 6)
    sinks = leaf(H) if has_sinks else None
    state = drawn_state(seed)
    score_mod = parts.score_mod(names, 0.5) if names else None
    functions: dict[str, Any] = {"score_mod": score_mod}
    if given_as == "mask_mod":
        functions["mask_mod"] = mask
    if given_as == "block_mask":
        functions["block_mask"] = flash4_torch.create_block_mask(mask, 2, H, Sq, Sk, "cpu", 8)
    torch.manual_seed(seed)
    with poisoned_memory():
        ours = flash4_torch.attention(
            q, k, v, **functions, **band, scale=0.3, softcap=softcap, sinks=sinks, dropout_p=dropout_p,
            return_lse=True,
        )  # fmt: skip
    scoring = Scoring(0.3, band_of(band), softcap, None, Dropout(state, dropout_p) if dropout_p else None)
    theirs = definition(q, k, v, scoring, sinks, score_mod, None if given_as == "nothing" else mask)
    same(ours, theirs, [q, k, v, *parts.learned, *([] if sinks is None else [sinks])])


def shifted(mod: Mod | None, by: int) -> Mod | None:
    """The function with b counted from another number; b is before h, i and j."""
    return None if mod is None else lambda *x: mod(*x[:-4], x[-4] + by, *x[-3:])


@settings(max_examples=25)
@given(
    names=names,
    mask=st.builds(drawn_mask, st.integers(0, 9), st.integers(1, 3), st.integers(1, 20)),
    given_as=st.sampled_from(["mask_mod", "block_mask", "block_mask of each", "nothing"]),
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4),
    band=bands,
    softcap=st.sampled_from([0.0, 2.0]),
    dropout_p=st.sampled_from([0.0, 0.4]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_packed_sequences_match_the_definition_of_each(
    names: list[str],
    mask: Mod,
    given_as: str,
    lengths: list[tuple[int, int]],
    band: dict[str, Any],
    softcap: float,
    dropout_p: float,
    has_sinks: bool,
    seed: int,
) -> None:
    """b counts sequences, and positions begin with 0 in each; gradients of what functions read add up."""
    parts, B = Parts(), len(lengths)
    ends = [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True)]
    Tq, Tk = (int(x[-1]) for x in ends)
    q, k, v = leaf(Tq, H, 4), leaf(Tk, 2, 4), leaf(Tk, 2, 6)
    sinks = leaf(H) if has_sinks else None
    state = drawn_state(seed)
    score_mod = parts.score_mod(names, 0.5) if names else None
    functions: dict[str, Any] = {"score_mod": score_mod}
    longest = [max(1, *x) for x in zip(*lengths, (0, 0), strict=True)]
    if given_as == "mask_mod":
        functions["mask_mod"] = mask
    if given_as.startswith("block_mask"):
        batch = B if given_as.endswith("each") else None
        # Made for more than the longest, and with one sequence's mask for all.
        mask = mask if batch else shifted(mask, -5) or mask
        shown = mask if batch else (lambda b, h, i, j, mask=mask: mask(b * 0, h, i, j))
        functions["block_mask"] = flash4_torch.create_block_mask(
            shown, batch, H, longest[0] + 3, longest[1] + 9, "cpu", 8
        )
        mask = shown
    torch.manual_seed(seed)
    with poisoned_memory():
        ours = flash4_torch.attention_varlen(
            q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seqlen_q=longest[0],
            max_seqlen_k=longest[1], **functions, **band, scale=0.3, softcap=softcap, sinks=sinks,
            dropout_p=dropout_p, return_lse=True,
        )  # fmt: skip
    results = []
    for b, (rows, keys) in enumerate(zip(*map(pairwise, ends), strict=True)):
        dropout = Dropout(state, dropout_p, b) if dropout_p else None
        scoring = Scoring(0.3, band_of(band), softcap, None, dropout)
        tensors = q[None, slice(*rows)], k[None, slice(*keys)], v[None, slice(*keys)]
        own = None if given_as == "nothing" else shifted(mask, b)
        results.append(definition(*tensors, scoring, sinks, shifted(score_mod, b), own))
    theirs = torch.cat([x[0][0] for x in results]), torch.cat([x[1][0] for x in results], 1)
    same(ours, theirs, [q, k, v, *parts.learned, *([] if sinks is None else [sinks])])


def call() -> dict[str, Tensor]:
    return {"q": leaf(2, 9, H, 4), "k": leaf(2, 11, 2, 4), "v": leaf(2, 11, 2, 4)}


def unequal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i != j


@pytest.mark.parametrize(
    "wrong, argument",
    [
        ({"score_mod": 3}, "score_mod"),
        ({"mask_mod": torch.ones(9, 11)}, "mask_mod"),
        ({"block_mask": unequal}, "block_mask"),
        ({"mask_mod": unequal, "attn_mask": torch.ones(9, 11)}, "attn_mask"),
    ],
)
def test_what_is_no_function_or_goes_beside_none_is_named(wrong: dict[str, Any], argument: str) -> None:
    messages = []
    for function in (flash4_torch.attention, flash4_torch.support):
        with pytest.raises(ArgumentError) as refused:
            function(**call(), **wrong)
        assert refused.value.argument == argument
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def test_a_block_mask_brings_its_own_mask_mod() -> None:
    block_mask = flash4_torch.create_block_mask(unequal, None, None, 9, 11, "cpu", 4)
    q, k, v = call().values()
    alone = flash4_torch.attention(q, k, v, block_mask=block_mask)
    assert torch.equal(alone, flash4_torch.attention(q, k, v, block_mask=block_mask, mask_mod=unequal))
    with pytest.raises(ArgumentError, match="mask_mod of its own"):
        flash4_torch.attention(q, k, v, block_mask=block_mask, mask_mod=lambda b, h, i, j: i > j)


def test_block_masks_of_other_lengths_are_refused() -> None:
    block_mask = flash4_torch.create_block_mask(unequal, 3, None, 9, 11, "cpu", 4)
    q, k, v = (x[0] for x in call().values())
    ends = [torch.tensor([0, n - 2, n], dtype=torch.int32) for n in (9, 11)]
    packed: Callable[..., Any] = lambda **more: flash4_torch.attention_varlen(  # noqa: E731
        q, k, v, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], block_mask=block_mask, **more
    )
    with pytest.raises(ShapeError, match=r"\(B or 1, Hq or 1\), with B = 2"):
        packed(max_seqlen_q=7, max_seqlen_k=9)
    with pytest.raises(ShapeError, match="longest sequences"):
        packed(max_seqlen_q=10)
    with pytest.raises(ShapeError, match="Sq, Sk = "):
        flash4_torch.attention(q[None, :8], k[None], v[None], block_mask=block_mask)


def test_lengths_of_packed_sequences_are_checked() -> None:
    q, k, v = (x[0] for x in call().values())
    right = {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, 11])}
    wrong: list[dict[str, Any]] = [{"cu_seqlens_q": torch.tensor([0, 8])}, {"max_seqlen_k": 10}]
    for one in wrong:
        with pytest.raises(RangeError):
            flash4_torch.attention_varlen(q, k, v, **{**right, **one}, mask_mod=unequal)


def test_support_answers_for_functions() -> None:
    q, k, v = call().values()
    bias = torch.randn(H, requires_grad=True)
    functions: dict[str, Any] = {"score_mod": lambda s, b, h, i, j: s + bias[h], "mask_mod": unequal}
    why_not = flash4_torch.support(q, k, v, causal=True, softcap=2.0, **functions)
    assert why_not["tiled"] == [] and list(why_not) == ["sm90", "sm100", "sm80", "emulator", "cpu", "tiled"]
    with backends_used() as used:
        flash4_torch.attention(q, k, v, causal=True, softcap=2.0, **functions).sum().backward()
    assert used == {("flex_attention", "tiled"): 1, ("flex_attention_backward", "tiled"): 1}


def test_the_fast_path_serves_no_functions() -> None:
    """A call like it without functions has been prepared; and one with a mask that hides nothing is equal."""
    q, k, v = (x.detach().float() for x in call().values())
    plain = [flash4_torch.attention(q, k, v) for _ in range(3)][-1]
    hidden = flash4_torch.attention(q, k, v, mask_mod=unequal)
    assert not torch.allclose(plain, hidden)
    everything = flash4_torch.attention(q, k, v, mask_mod=lambda b, h, i, j: j >= 0)
    torch.testing.assert_close(flash4_torch.attention(q, k, v), plain, rtol=0, atol=0)
    torch.testing.assert_close(everything, plain, rtol=1e-5, atol=1e-6)


def test_results_are_contiguous_as_without_functions() -> None:
    """Also where tensors have heads before positions in memory."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in call().values())
    out = flash4_torch.attention(q, k, v, mask_mod=unequal)
    assert not q.is_contiguous() and out.is_contiguous()


def test_what_cannot_be_traced_is_an_error_that_we_name() -> None:
    with pytest.raises(Flash4Error, match=r"gamble.*aten\.rand"):

        def gamble(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * torch.rand(())

        flash4_torch.attention(**call(), score_mod=gamble)


def test_flops_of_packed_sequences_are_those_of_varlen() -> None:
    q, k, v = (x[0] for x in call().values())
    ends = {"cu_seqlens_q": torch.tensor([0, 4, 9]), "cu_seqlens_k": torch.tensor([0, 4, 11])}
    counted = []
    for functions in ({}, {"mask_mod": unequal}):
        with FlopCounterMode(display=False) as counter:
            flash4_torch.attention_varlen(q, k, v, **ends, **functions).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled_calls_agree_and_new_lengths_compile_once(is_packed: bool) -> None:
    """Whole graphs, with symbols for lengths, a learned bias, sinks, dropout and a captured integer."""
    parts, sinks = Parts(), leaf(H)

    def attend(q: Tensor, k: Tensor, v: Tensor, ends: Any, number: int) -> Any:
        options: dict[str, Any] = {"causal": True, "softcap": 3.0, "sinks": sinks, "return_lse": True}
        options["dropout_p"] = 0.3

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score / number + parts.slopes[h] * (j - i) + parts.table[h, b]

        functions = {"score_mod": score_mod, "mask_mod": lambda b, h, i, j: (i - j) % 5 != h}
        if is_packed:
            longest = {"max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0]}
            more = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, **longest}
            return flash4_torch.attention_varlen(q, k, v, **more, **options, **functions)
        return flash4_torch.attention(q[None], k[None], v[None], **options, **functions)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    wanted = [parts.slopes, parts.table, sinks]
    for S, number in ((20, 5), (33, 7), (13, 3)):
        q, k, v = leaf(S, H, 4), leaf(S, 2, 4), leaf(S, 2, 4)
        ends = torch.tensor([0, S // 3, S // 2, S])
        found = []
        for function in (attend, compiled):
            torch.manual_seed(S)
            found.append(function(q, k, v, ends, number))
        same(found[0], found[1], [q, k, v, *wanted])
    assert counter.frame_count == 1
