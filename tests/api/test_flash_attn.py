"""`flash4_torch.flash_attn`: flash-attn's signatures, its definition, and a named error for all else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash4_torch
from cases import finite_sum
from flash4_torch import flash_attn, testing
from flash4_torch.backends import dispatch
from flash4_torch.errors import ArgumentError, DtypeError, KeywordError, RangeError, ShapeError
from flash4_torch.flash_attn.arguments import alibi
from flash4_torch.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn_definition import by_definition

SHARED = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
NONE = inspect.Parameter.empty
Q, LENGTHS = {"q": NONE}, {"cu_seqlens_q": NONE, "cu_seqlens_k": NONE}
QKV, LONGEST = {**Q, "k": NONE, "v": NONE}, {"max_seqlen_q": None, "max_seqlen_k": None}

# flash-attn 2.8's arguments in their order. It has no default for the longest lengths; FlashAttention-4 has.
SIGNATURES: dict[str, dict[str, Any]] = {
    "flash_attn_func": {**QKV, **SHARED},
    "flash_attn_kvpacked_func": {**Q, "kv": NONE, **SHARED},
    "flash_attn_qkvpacked_func": {"qkv": NONE, **SHARED},
    "flash_attn_varlen_func": {**QKV, **LENGTHS, **LONGEST, **SHARED, "block_table": None},
    "flash_attn_varlen_kvpacked_func": {**Q, "kv": NONE, **LENGTHS, **LONGEST, **SHARED},
    "flash_attn_varlen_qkvpacked_func": {"qkv": NONE, "cu_seqlens": NONE, "max_seqlen": None, **SHARED},
    "flash_attn_with_kvcache": {
        "q": NONE, "k_cache": NONE, "v_cache": NONE, "k": None, "v": None, "rotary_cos": None,
        "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None, "cache_leftpad": None,
        "block_table": None, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
        "softcap": 0.0, "rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0,
        "return_softmax_lse": False,
    },
}  # fmt: skip
# What these take besides, by name.
KEYWORDS: dict[str, list[str]] = {
    **{name: ["return_lse"] for name in SIGNATURES},
    "flash_attn_func": ["return_lse", "learnable_sink"],
    "flash_attn_varlen_func": [
        "return_lse", "learnable_sink", "seqused_k", "page_table", "k_descale", "v_descale",
    ],
    "flash_attn_with_kvcache": [
        "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "k_descale",
        "v_descale", "learnable_sink", "sinks", "s_aux", "out",
    ],
}  # fmt: skip
# What the other versions take after v, with their defaults; window_size has two.
VERSION_3 = {
    "softmax_scale": None, "causal": False, "qv": None, "q_descale": None, "k_descale": None,
    "v_descale": None, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0, "num_splits": 1,
    "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False,
}  # fmt: skip
VERSION_4 = {
    "qv": None, "gather_kv_indices": None, "softmax_scale": None, "causal": False,
    "window_size": (None, None), "learnable_sink": None, "softcap": 0.0, "num_splits": 1, "pack_gqa": None,
    "deterministic": False, "score_mod": None, "score_mod_bwd": None, "mask_mod": None, "aux_tensors": None,
    "aux_scalars": None, "block_sparse_tensors": None, "block_sparse_tensors_bwd": None, "return_lse": False,
}  # fmt: skip
PACKED_3 = {**VERSION_3, "seqused_q": None, "seqused_k": None}
PACKED_4 = {
    **VERSION_4, **LONGEST, "min_seqlen_k": None, "seqused_q": None, "seqused_k": None, "page_table": None,
    "scheduler_metadata": None, "seqlen_k_per_split": None, "disable_scheduler_metadata": False,
}  # fmt: skip

BOTH = ("flash_attn_func", "flash_attn_varlen_func")
X = torch.randn(2, 5, 2, 8)
P, ENDS = torch.randn(9, 2, 8), torch.tensor([0, 4, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == list(SIGNATURES[name].items())
    assert [p.name for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD] == KEYWORDS[name]
    assert sorted(flash_attn.__all__) == sorted(SIGNATURES)


@pytest.mark.parametrize("more", [VERSION_3, VERSION_4], ids=["3", "4"])
def test_other_versions_defaults_change_nothing(more: dict[str, Any]) -> None:
    assert torch.equal(flash_attn.flash_attn_func(X, X, X, **more), flash4_torch.attention(X, X, X))


@pytest.mark.parametrize("more", [PACKED_3, PACKED_4], ids=["3", "4"])
def test_other_versions_defaults_change_nothing_of_packed_sequences(more: dict[str, Any]) -> None:
    out = flash_attn.flash_attn_varlen_func(P, P, P, ENDS, ENDS, **more)
    assert torch.equal(out, flash4_torch.attention_varlen(P, P, P, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS))


Side = st.one_of(st.just(-1), st.integers(0, 12))
Windows = st.one_of(st.tuples(Side, Side), st.tuples(st.none(), st.one_of(st.none(), st.integers(0, 12))))


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and flags of a dense call in float64; about half of them have slopes."""
    B, Sq, Sk = draw(st.integers(1, 2)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
    Hk, group, D, Dv = (draw(st.integers(1, n)) for n in (2, 3, 9, 9))
    shapes = {"q": (B, Sq, Hk * group, D), "k": (B, Sk, Hk, D), "v": (B, Sk, Hk, Dv)}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, shape in shapes.items()
    }
    leading = draw(st.sampled_from([None, (), (B,)]))
    flags = {
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
        "causal": draw(st.booleans()),
        "window_size": draw(Windows),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "alibi_slopes": None if leading is None else torch.rand(*leading, Hk * group, generator=generator),
        "deterministic": draw(st.booleans()),
    }
    if draw(st.booleans()):
        sinks = torch.randn(Hk * group, generator=generator, dtype=torch.float64, requires_grad=True)
        tensors["learnable_sink"] = sinks
    return tensors, flags


def gradients(out: Tensor, lse: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a sum of both with weights that differ everywhere."""
    dout, dlse = (torch.linspace(-1, 1, x.numel()).double().view(x.shape) for x in (out, lse))
    return torch.autograd.grad((out * dout).sum() + finite_sum(lse, dlse), inputs)


def assert_same(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(calls())
@settings(max_examples=150)
def test_the_definition(call: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, flags = call
    out, lse, weights = flash_attn.flash_attn_func(**tensors, **flags, return_attn_probs=True)
    exact = by_definition(**tensors, flags=flags)
    assert_same((out, lse), exact)
    assert weights.numel() == 0
    inputs = list(tensors.values())
    assert_same(gradients(out, lse, inputs), gradients(*exact, inputs))
    more = {name: x for name, x in tensors.items() if name == "learnable_sink"}
    assert torch.equal(flash_attn.flash_attn_func(*inputs[:3], 0.0, *flags.values(), **more), out)


@given(calls())
def test_slopes_are_the_mask_that_they_describe(call: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    (q, k, v, *_), flags = call[0].values(), call[1]
    flags["alibi_slopes"] = torch.rand(q.shape[2], dtype=torch.float64)
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    bias = -flags["alibi_slopes"][:, None, None] * (i + k.shape[1] - q.shape[1] - j).abs()
    left, right = (None if side == -1 else side for side in flags["window_size"])
    options = {"softcap": flags["softcap"], "causal": flags["causal"], "scale": flags["softmax_scale"]}
    wanted = flash4_torch.attention(q, k, v, attn_mask=bias, window=(left, right), return_lse=True, **options)
    assert_same(flash_attn.flash_attn_func(q, k, v, **flags, return_lse=True), wanted)


def test_causal_slopes_need_the_memory_of_one_row() -> None:
    slopes, each = torch.rand(2), torch.rand(2, 2)
    for causal, right, rows in (
        (True, None, 1),
        (True, 3, 1),
        (False, 0, 1),
        (False, None, 5),
        (False, 3, 5),
    ):
        options = {"causal": causal, "window": (None, right)}
        assert alibi(slopes, X, X[:, :3], options, None).attn_mask.shape == (1, 2, rows, 3)
        assert alibi(each, X, X[:, :3], options, None).attn_mask.shape == (2, 2, rows, 3)


def test_plain_calls_are_torchs() -> None:
    for causal in (False, True):
        out = flash_attn.flash_attn_func(X, X, X, causal=causal)
        peer = F.scaled_dot_product_attention(*(X.transpose(1, 2),) * 3, is_causal=causal).transpose(1, 2)
        torch.testing.assert_close(out, peer)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    st.booleans(),
    Windows,
    st.booleans(),
)
def test_packed_sequences_are_each_alone(
    lengths: list[tuple[int, int]], causal: bool, window_size: Any, says: bool
) -> None:
    q_lengths, k_lengths = ([pair[i] for pair in lengths] for i in range(2))
    q, k, v = (
        torch.randn(sum(n), H, 8, dtype=torch.float64, requires_grad=True)
        for n, H in ((q_lengths, 4), (k_lengths, 2), (k_lengths, 2))
    )
    ends = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (q_lengths, k_lengths)]
    longest = (max(q_lengths), max(k_lengths)) if says else ()
    flags = {"causal": causal, "window_size": window_size, "softcap": 2.0, "softmax_scale": 0.2}
    out, lse = flash_attn.flash_attn_varlen_func(q, k, v, *ends, *longest, **flags, return_lse=True)
    parts = [
        flash_attn.flash_attn_func(*(x[None] for x in sequence), **flags, return_lse=True)
        for sequence in zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    ]
    whole = torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], 1)
    assert_same((out, lse), whole)
    assert_same(gradients(out, lse, [q, k, v]), gradients(*whole, [q, k, v]))


FLAGS: dict[str, Any] = {"causal": True, "window_size": (2, -1), "softcap": 3.0, "return_attn_probs": True}


def test_tensors_in_one_are_tensors_apart() -> None:
    qkv = torch.randn(2, 5, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    flat, ends = qkv.flatten(0, 1), torch.tensor([0, 3, 10], dtype=torch.int32)
    q, k, v = qkv.unbind(2)
    dense = flash_attn.flash_attn_func(q, k, v, **FLAGS)
    wanted = gradients(*dense[:2], [qkv])
    for results in (
        flash_attn.flash_attn_qkvpacked_func(qkv, **FLAGS),
        flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **FLAGS),
    ):
        assert_same(results, dense)
        assert_same(gradients(*results[:2], [qkv]), wanted)
    q, k, v = flat.unbind(1)
    packed = flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 7, 7, **FLAGS)
    wanted = gradients(*packed[:2], [qkv])
    for results in (
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, ends, 7, **FLAGS),
        flash_attn.flash_attn_varlen_kvpacked_func(q, flat[:, 1:], ends, ends, 7, **FLAGS),
    ):
        assert_same(results, packed)
        assert_same(gradients(*results[:2], [qkv]), wanted)


def test_what_is_returned() -> None:
    for name in ("func", "varlen_func"):
        function = getattr(flash_attn, f"flash_attn_{name}")
        inputs = (X, X, X) if name == "func" else (P, P, P, ENDS, ENDS)
        out = function(*inputs)
        assert isinstance(out, Tensor)
        assert_same(function(*inputs, return_lse=True)[:1], [out])
        assert len(function(*inputs, return_lse=True)) == 2
        assert len(function(*inputs, return_attn_probs=True)) == 3


def test_dropout_drops_what_attention_drops() -> None:
    for call in (
        lambda: flash_attn.flash_attn_func(X, X, X, 0.5, causal=True),
        lambda: flash4_torch.attention(X, X, X, dropout_p=0.5, causal=True),
    ):
        state = testing.peek_rng_state()
        exact, _ = testing.reference(X, X, X, dropout_p=0.5, causal=True, rng_state=state)
        torch.testing.assert_close(call(), exact.float())


def test_determinism_is_asked_for_here_or_of_torch() -> None:
    seen: list[bool] = []
    dispatch.observers.append(lambda problem, backend: seen.append(problem.spec.deterministic))
    try:
        for flag in (False, True):
            flash_attn.flash_attn_func(X, X, X, deterministic=flag)
        torch.use_deterministic_algorithms(True)
        flash_attn.flash_attn_varlen_func(P, P, P, ENDS, ENDS)
    finally:
        torch.use_deterministic_algorithms(False)
        dispatch.observers.pop()
    assert seen == [False, True, True]


def test_a_graph_does_not_break() -> None:
    slopes = torch.tensor([0.5, 0.25])
    functions: list[Callable[[], Any]] = [
        lambda: flash_attn.flash_attn_func(X, X, X, causal=True, alibi_slopes=slopes, num_splits=4),
        lambda: flash_attn.flash_attn_varlen_func(P, P, P, ENDS, ENDS, return_attn_probs=True),
    ]
    for function in functions:
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(), function())


UNSERVED = {
    **dict.fromkeys(("q_descale", "k_descale", "v_descale", "qv"), torch.ones(2)),
    **dict.fromkeys(("score_mod", "score_mod_bwd", "mask_mod"), lambda *args: args),
    **dict.fromkeys(("aux_tensors", "aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd"), ()),
    **dict.fromkeys(("gather_kv_indices", "page_table", "seqused_q", "seqused_k"), torch.ones(2).int()),
    "cache_leftpad": torch.ones(2).int(),
    "attention_chunk": 8,
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_is_named(name: str) -> None:
    for function, inputs in zip(BOTH, ((X, X, X), (P, P, P, ENDS, ENDS)), strict=True):
        if name in KEYWORDS[function]:
            continue
        with pytest.raises(ArgumentError, match=f"^{name} is .*, but it must be left out: ") as caught:
            getattr(flash_attn, function)(*inputs, **{name: UNSERVED[name]})
        assert caught.value.argument == name
    taken = {*VERSION_3, *VERSION_4, *PACKED_3, *PACKED_4} - {
        *SHARED,
        *LONGEST,
        "return_lse",
        "learnable_sink",
    }
    speed = ("num_splits", "pack_gqa", "sm_margin", "min_seqlen_k", "seqlen_k_per_split")
    assert {*taken, "cache_leftpad"} == {
        *UNSERVED,
        *speed,
        "scheduler_metadata",
        "disable_scheduler_metadata",
    }


# name: (arguments, error, argument it names, a piece of its limit)
WRONG: dict[str, tuple[dict[str, Any], type[ArgumentError], str, str]] = {
    "weights with dropout": (
        {"return_attn_probs": True, "dropout_p": 0.1},
        ArgumentError,
        "return_attn_probs",
        "weights are never stored",
    ),
    "flag": ({"return_attn_probs": 1}, ArgumentError, "return_attn_probs", "True or False"),
    "lse flag": ({"return_lse": None}, ArgumentError, "return_lse", "True or False"),
    "deterministic": ({"deterministic": None}, ArgumentError, "deterministic", "True or False"),
    "causal": ({"causal": 1}, ArgumentError, "causal", "True or False"),
    "scale": ({"softmax_scale": float("inf")}, RangeError, "softmax_scale", "finite"),
    "4's order": ({"dropout_p": None}, ArgumentError, "dropout_p", "a number"),
    "3's order": ({"softmax_scale": True}, ArgumentError, "softmax_scale", "a number"),
    "softcap": ({"softcap": -1.0}, RangeError, "softcap", "at least 0.0"),
    "below -1": ({"window_size": (-2, 3)}, RangeError, "window_size", "at least -1"),
    "4's negative bound": ({"window_size": (None, -1)}, RangeError, "window_size", "at least 0"),
    "4's other negative bound": ({"window_size": (-1, None)}, RangeError, "window_size", "at least 0"),
    "an int": ({"window_size": 3}, ArgumentError, "window_size", "a pair"),
    "floats": ({"window_size": (1.0, 2)}, ArgumentError, "window_size", "ints or None"),
    "bools": ({"window_size": (True, 2)}, ArgumentError, "window_size", "ints or None"),
    "too many slopes": ({"alibi_slopes": torch.ones(3)}, ShapeError, "alibi_slopes", "(2,) or (2, 2)"),
    "slopes of rank 3": ({"alibi_slopes": torch.ones(2, 2, 1)}, ShapeError, "alibi_slopes", "(2,) or (2, 2)"),
    "integer slopes": ({"alibi_slopes": torch.ones(2).int()}, DtypeError, "alibi_slopes", "floating"),
    "a list of slopes": ({"alibi_slopes": [1.0, 0.5]}, ArgumentError, "alibi_slopes", "a tensor or None"),
    "q of rank 3": ({"alibi_slopes": torch.ones(2), "q": X[0]}, ShapeError, "q", "(B, S, H, D)"),
    "k is no tensor": ({"alibi_slopes": torch.ones(2), "k": 3}, ArgumentError, "k", "a tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    changed, error, argument, limit = WRONG[name]
    with pytest.raises(error) as caught:
        flash_attn.flash_attn_func(**{"q": X, "k": X, "v": X, **changed})
    assert caught.value.argument == argument and limit in caught.value.limit


@pytest.mark.parametrize(
    ("function", "call", "words"),
    [
        ("varlen_func", (P, P, P, None, None), "cu_seqlens_q is NoneType, but it must be a tensor"),
        ("qkvpacked_func", (X,), "qkv is (2, 5, 2, 8), but it must be (B, S, 3, H, D)"),
        ("qkvpacked_func", (X[:, :, None],), "qkv is (2, 5, 1, 2, 8), but it must be (B, S, 3, H, D)"),
        ("kvpacked_func", (X, 3), "kv is 3, but it must be a tensor"),
        ("varlen_qkvpacked_func", (X, ENDS), "qkv is (2, 5, 2, 8), but it must be (T, 3, H, D)"),
        ("varlen_kvpacked_func", (P, P, ENDS, ENDS), "kv is (9, 2, 8), but it must be (T, 2, H, D)"),
    ],
)
def test_wrong_tensors_are_named(function: str, call: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        getattr(flash_attn, f"flash_attn_{function}")(*call)
    assert str(caught.value) == words


def test_packed_sequences_take_no_bias() -> None:
    with pytest.raises(ArgumentError, match="alibi_slopes is a tensor \\(2,\\), but it must be"):
        flash_attn.flash_attn_varlen_func(P, P, P, ENDS, ENDS, alibi_slopes=torch.ones(2))


@pytest.mark.parametrize("name", SIGNATURES)
def test_unknown_keywords_are_named(name: str) -> None:
    function = getattr(flash_attn, name)
    inputs = [X for default in SIGNATURES[name].values() if default is NONE]
    for keyword, words in {
        "scale": "it is called 'softmax_scale' here",
        "window": "it is called 'window_size' here",
        **({} if "cache" in name else {"return_softmax_lse": "it is called 'return_lse' here"}),
        "causul": "did you mean 'causal'?",
    }.items():
        with pytest.raises(KeywordError, match=f"^{name} has no argument '{keyword}'; ") as caught:
            function(*inputs, **{keyword: None})
        assert words in str(caught.value)


@given(st.lists(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=6, max_size=6), min_size=1, max_size=4))
def test_padding_and_back(kinds: list[list[int]]) -> None:
    """0 is padding, 1 a token, 2 a place that is kept but does not count."""
    kind = torch.tensor(kinds)
    x = torch.randn(*kind.shape, 2, 3, dtype=torch.float64, requires_grad=True)
    tokens, indices, ends, longest, used = unpad_input(x, kind == 1, kind == 2)
    kept = kind > 0
    lengths = kept.sum(1)
    assert torch.equal(tokens, x[kept]) and torch.equal(indices, kept.flatten().nonzero()[:, 0])
    assert ends.dtype == used.dtype == torch.int32
    assert torch.equal(ends.diff().long(), lengths) and ends[0] == 0
    assert longest == lengths.max() and torch.equal(used.long(), (kind == 1).sum(1))
    back = pad_input(tokens, indices, *kind.shape)
    assert torch.equal(back, x.where(kept[..., None, None], 0.0))
    (gradient,) = torch.autograd.grad((back * x.detach()).sum(), x)
    assert torch.equal(gradient, back)
    assert torch.equal(unpad_input(x, kept.long())[0], tokens)
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), tokens)
