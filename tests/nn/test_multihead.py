"""MultiheadAttention against torch's own module: values, gradients, layouts, errors, memory, callers."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrizations

from flash4_torch import fast_path, ops
from flash4_torch.errors import ArgumentError
from flash4_torch.nn import MultiheadAttention, encoder, prepared, replace_attention

laws = settings(derandomize=True, deadline=None, max_examples=150)


@dataclass(frozen=True)
class Case:
    """One module and one call of it."""

    N: int = 2
    L: int = 4
    S: int = 5
    H: int = 2
    D: int = 3
    batched: bool = True
    batch_first: bool = False
    bias: bool = True
    bias_kv: bool = False
    zero_attn: bool = False
    kdim: int | None = None
    vdim: int | None = None
    sharing: str = "none"
    padding: str = "none"
    mask: str = "none"
    need_weights: bool = True
    average: bool = True
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def E(self) -> int:
        return self.H * self.D

    def module(self, cls: type[nn.MultiheadAttention], **options: Any) -> nn.MultiheadAttention:
        module = cls(
            self.E,
            self.H,
            bias=self.bias,
            add_bias_kv=self.bias_kv,
            add_zero_attn=self.zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            dtype=self.dtype,
            **options,
        )
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        return module

    def call(self) -> dict[str, Any]:
        """Arguments of forward; every row may attend to key 0 at least, where stock's paths agree."""
        generator = torch.Generator().manual_seed(self.seed + 1)

        def floats(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        def tokens(length: int, width: int) -> Tensor:
            if not self.batched:
                return floats(length, width)
            return floats(self.N, length, width) if self.batch_first else floats(length, self.N, width)

        def ignored(*shape: int) -> Tensor:
            mask = torch.rand(*shape, generator=generator) < 0.4
            mask[..., :1] = False
            return mask

        def as_kind(mask: Tensor, kind: str) -> Tensor:
            return mask if kind == "bool" else floats(*mask.shape).masked_fill(mask, -torch.inf)

        query = tokens(self.L, self.E)
        key = query if self.sharing in ("all", "qk") else tokens(self.S, self.kdim or self.E)
        shared = {"all": query, "kv": key, "qv": query}
        value = shared[self.sharing] if self.sharing in shared else tokens(self.S, self.vdim or self.E)
        call: dict[str, Any] = {"query": query, "key": key, "value": value}
        if self.padding != "none":
            shape = (self.N, self.S) if self.batched else (self.S,)
            call["key_padding_mask"] = as_kind(ignored(*shape), self.padding)
        if self.mask != "none":
            kind, form = self.mask.split()
            if form == "causal":
                later = torch.ones(self.L, self.S, dtype=torch.bool).triu(1)
                zeros = torch.zeros(self.L, self.S, dtype=self.dtype)
                call["attn_mask"] = later if kind == "bool" else zeros.masked_fill(later, -torch.inf)
                call["is_causal"] = True
            else:
                planes = self.H * (self.N if self.batched else 1)
                shape = (self.L, self.S) if form == "2d" else (planes, self.L, self.S)
                call["attn_mask"] = as_kind(ignored(*shape), kind)
        return call | {"need_weights": self.need_weights, "average_attn_weights": self.average}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sharing = draw(st.sampled_from(["none", "kv", "qk", "qv", "all"]))
    L = draw(st.integers(0, 5))
    kdim = None if sharing not in ("none", "kv") else draw(st.sampled_from([None, None, 1, 7]))
    return Case(
        N=draw(st.integers(0, 3)),
        L=L,
        S=draw(st.integers(0, 6)) if sharing in ("none", "kv") else L,
        H=draw(st.integers(1, 3)),
        D=draw(st.sampled_from([1, 4, 5, 8])),
        batched=draw(st.booleans()),
        batch_first=draw(st.booleans()),
        bias=draw(st.booleans()),
        bias_kv=draw(st.booleans()),
        zero_attn=draw(st.booleans()),
        kdim=kdim,
        vdim=kdim if sharing != "none" else draw(st.sampled_from([None, None, 2, 9])),
        sharing=sharing,
        padding=draw(st.sampled_from(["none", "bool", "float"])),
        mask=draw(
            st.sampled_from(
                ["none", "bool 2d", "float 2d", "bool 3d", "float 3d", "bool causal", "float causal"]
            )
        ),
        need_weights=draw(st.booleans()),
        average=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 9)),
    )


def stock_serves(case: Case) -> bool:
    """False where stock cannot tell the sizes of an empty mask for each head."""
    N = case.N if case.batched else 1
    per_head = "3d" in case.mask or case.padding != "none"
    return not per_head or case.need_weights or N * case.L * case.S > 0


def run(
    module: nn.MultiheadAttention, call: dict[str, Any], forward: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """Outputs and, for one random loss of them, the gradients of all floating inputs and parameters."""
    call = dict(call)
    leaves: dict[int, Tensor] = {}
    for name, x in call.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            call[name] = leaves.setdefault(id(x), x.detach().clone().requires_grad_())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        out, weights = (module if forward is None else forward)(**call)
    results = {"out": out} if weights is None else {"out": out, "weights": weights}
    generator = torch.Generator().manual_seed(99)
    loss = torch.zeros((), dtype=torch.float64)
    for x in results.values():
        loss = loss + (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
    module.zero_grad()
    loss.backward()
    for name, x in [*call.items(), *module.named_parameters()]:
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            results[f"d {name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return results


def in_float64(module: nn.MultiheadAttention, call: dict[str, Any]) -> dict[str, Tensor]:
    memo: dict[int, Tensor] = {}

    def widen(x: Any) -> Any:
        is_float = isinstance(x, Tensor) and x.is_floating_point()
        return memo.setdefault(id(x), x.double()) if is_float else x

    return run(copy.deepcopy(module).double(), {name: widen(x) for name, x in call.items()})


def assert_as_exact(ours: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Ours is as near to the float64 result as stock in the same dtype is, give or take a factor."""
    assert ours.keys() == stock.keys()
    # Some results are differences of others, and may be near zero.
    magnitude = max([1.0, *(x.abs().max().item() for x in exact.values() if x.numel())])
    for name, x in ours.items():
        assert x.shape == stock[name].shape and x.dtype == stock[name].dtype, name
        if x.numel() == 0:
            continue
        truth = exact[name]
        noise = 16 * torch.finfo(x.dtype).eps * magnitude
        allowed = 3 * (stock[name].double() - truth).abs().max().item() + noise
        assert (x.double() - truth).abs().max().item() <= allowed, name
        assert x.isfinite().all(), name


@laws
@given(cases())
def test_matches_stock(case: Case) -> None:
    assume(stock_serves(case))
    stock, ours = case.module(nn.MultiheadAttention), case.module(MultiheadAttention)
    call = case.call()
    # Here the mask that is_causal promises is read: stock's is_causal paths approximate this definition.
    read = {name: x for name, x in call.items() if name != "is_causal"}
    expected, exact = run(stock, read), in_float64(stock, read)
    actual = run(ours, call)
    if case.mask == "float causal" and not (case.bias_kv or case.zero_attn):
        # Ours takes is_causal at its word and never reads this mask.
        for results in (actual, expected, exact):
            results.pop("d attn_mask", None)
    assert_as_exact(actual, expected, exact)
    assert actual["out"].is_contiguous()
    if case.need_weights:
        assert actual["weights"].stride() == expected["weights"].stride()


# Rows that may attend to nothing


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_row_without_keys_gives_output_bias(kind: str, need_weights: bool) -> None:
    case = Case(padding=kind, mask="bool 2d", batch_first=True, need_weights=need_weights)
    module, call = case.module(MultiheadAttention), case.call()
    call["key_padding_mask"][1] = True if kind == "bool" else -torch.inf
    call["attn_mask"][2] = True
    results = run(module, call)
    bias = module.out_proj.bias.detach()
    for row in (results["out"][0, 2], *results["out"][1]):
        torch.testing.assert_close(row, bias, rtol=0, atol=0)
    assert not results["d query"][1].any() and not results["d value"][1].any()
    assert results["d query"][0].any()
    assert all(x.isfinite().all() for x in results.values())
    if need_weights:
        assert not results["weights"][1].any() and not results["weights"][0, 2].any()


# is_causal is a promise


@laws
@given(cases(), st.sampled_from(["bool", "float"]))
def test_is_causal_does_not_read_the_mask(case: Case, kind: str) -> None:
    case = replace(case, mask=f"{kind} causal", bias_kv=False, zero_attn=False)
    module, call = case.module(MultiheadAttention), case.call()
    garbage = torch.full_like(call["attn_mask"], kind == "bool" or torch.nan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        for x, y in zip(module(**call), module(**call | {"attn_mask": garbage}), strict=True):
            assert x is y or torch.equal(x, y)


def test_mask_of_any_size_will_do_where_stock_does_not_look() -> None:
    case = Case(mask="bool causal", need_weights=False)
    call = case.call() | {"attn_mask": torch.zeros(1, 1)}
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        case.module(cls)(**call)


# Dropout


def dropout_case(p: float, **changes: Any) -> tuple[nn.MultiheadAttention, dict[str, Any]]:
    case = Case(L=40, S=50, H=4, average=False, **changes)
    return case.module(MultiheadAttention, dropout=p), case.call()


@pytest.mark.parametrize("mask", ["none", "bool causal", "float 3d"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_returned_weights_are_the_applied_ones(mask: str, batch_first: bool) -> None:
    module, call = dropout_case(0.3, mask=mask, batch_first=batch_first)
    out, weights = module(**call)
    value = call["value"] if batch_first else call["value"].transpose(0, 1)
    v = nn.functional.linear(value, module.in_proj_weight.chunk(3)[2], module.in_proj_bias.chunk(3)[2])
    heads = weights @ v.unflatten(-1, (4, -1)).transpose(1, 2)
    expected = module.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), expected)


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    module, call = dropout_case(0.3)
    _, dropped = module(**call)
    _, plain = module.eval()(**call)
    kept = dropped != 0
    # 2 * 4 * 40 * 50 weights: a standard deviation of 0.0036.
    assert abs(kept.double().mean() - 0.7) < 0.015
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.7)


def test_seed_governs_dropout() -> None:
    module, call = dropout_case(0.3)

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return module(**call)[1]

    first = seeded(1)
    assert torch.equal(first, seeded(1))
    assert not torch.equal(first, seeded(2))
    assert not torch.equal(first, module(**call)[1])
    torch.manual_seed(1)
    averaged = module(**call | {"average_attn_weights": True})[1]
    torch.testing.assert_close(averaged, first.mean(1), rtol=1e-13, atol=1e-15)


def test_without_dropout_no_random_numbers_are_drawn() -> None:
    for module, call in (dropout_case(0.0), dropout_case(0.5)):
        module.train(module.dropout == 0.0)
        before = torch.get_rng_state()
        once, again = module(**call), module(**call)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(once[0], again[0]) and torch.equal(once[1], again[1])


def test_dropout_of_everything() -> None:
    module, call = dropout_case(1.0)
    out, weights = module(**call)
    assert not weights.any()
    assert torch.equal(out, module.out_proj.bias.expand_as(out))


# Memory

TILE = 48 * 2**20
"""Bytes of a block of attention weights while it is made: several float32 arrays of 2**20 elements."""


def peak_bytes(function: Callable[[], object]) -> int:
    """The most bytes that tensors made by `function` hold at a time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            function()
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("average", [True, False])
def test_weights_cost_their_output_and_a_tile(average: bool, dropout: float) -> None:
    H, S = 8, 2048
    module = MultiheadAttention(8 * H, H, dropout=dropout)
    x = torch.randn(S, 1, 8 * H)
    output = 4 * S * S * (1 if average else H)
    assert 4 * S * S * H > 2 * TILE
    peak = peak_bytes(lambda: module(x, x, x, average_attn_weights=average))
    assert output <= peak <= output + TILE


def test_causal_and_padding_cost_no_square() -> None:
    """Stock merges the two masks into one of N * H * L * S floats."""
    module = MultiheadAttention(8, 1)

    def peak(S: int) -> int:
        x = torch.randn(S, 1, 8)
        padding = torch.arange(S)[None] >= S - 3
        mask = torch.ones(S, S, dtype=torch.bool).triu_(1)

        def step() -> None:
            out, _ = module(
                x, x, x, attn_mask=mask, is_causal=True, key_padding_mask=padding, need_weights=False
            )
            out.sum().backward()

        return peak_bytes(step)

    small, large = peak(2048), peak(6144)
    assert large <= 3.2 * small
    assert large < 6144 * 6144


# Errors and warnings are torch's own

BAD_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "query 1-D": ({}, {"query": torch.zeros(4)}),
    "query 4-D": ({}, {"query": torch.zeros(3, 2, 4, 1)}),
    "query batched, key not": ({}, {"key": torch.zeros(5, 4)}),
    "value batched, query not": ({}, {"query": torch.zeros(3, 4), "key": torch.zeros(5, 4)}),
    "query's width": ({}, {"query": torch.zeros(3, 2, 6)}),
    "key's width": ({}, {"key": torch.zeros(5, 2, 6)}),
    "key's and value's width": ({}, {"key": torch.zeros(5, 2, 6), "value": torch.zeros(5, 2, 6)}),
    "shared key's width": ({}, dict.fromkeys(("key", "value"), torch.zeros(5, 2, 6))),
    "value's length": ({}, {"value": torch.zeros(6, 2, 4)}),
    "value's length, kdim": ({"kdim": 3}, {"key": torch.zeros(5, 2, 3), "value": torch.zeros(6, 2, 4)}),
    "key's width, kdim": ({"kdim": 3}, {}),
    "value's width, vdim": ({"vdim": 7}, {}),
    "batch sizes": ({}, {"key": torch.zeros(5, 3, 4), "value": torch.zeros(5, 3, 4)}),
    "attn_mask 1-D": ({}, {"attn_mask": torch.zeros(5)}),
    "attn_mask 4-D": ({}, {"attn_mask": torch.zeros(2, 2, 3, 5)}),
    "attn_mask 2-D": ({}, {"attn_mask": torch.zeros(5, 3)}),
    "attn_mask 3-D": ({}, {"attn_mask": torch.zeros(2, 3, 5)}),
    "attn_mask as causal": ({}, {"attn_mask": torch.zeros(5, 3), "is_causal": True}),
    "attn_mask of ints": ({}, {"attn_mask": torch.zeros(3, 5, dtype=torch.int32)}),
    "key_padding_mask 1-D": ({}, {"key_padding_mask": torch.zeros(5)}),
    "key_padding_mask 3-D": ({}, {"key_padding_mask": torch.zeros(1, 2, 5)}),
    "key_padding_mask's batch": ({}, {"key_padding_mask": torch.zeros(3, 5)}),
    "key_padding_mask's length": ({}, {"key_padding_mask": torch.zeros(2, 4)}),
    "key_padding_mask's length, bias_kv": ({"add_bias_kv": True}, {"key_padding_mask": torch.zeros(2, 6)}),
    "key_padding_mask of ints": ({}, {"key_padding_mask": torch.zeros(2, 5, dtype=torch.uint8)}),
    "causal without mask": ({}, {"is_causal": True}),
    "causal without mask, without weights": ({}, {"is_causal": True, "need_weights": False}),
    "query's dtype": ({}, {"query": torch.zeros(3, 2, 4, dtype=torch.float64)}),
    "dtype": ({"dtype": torch.float64}, {}),
    "dropout above 1": ({"dropout": 1.5}, {}),
}
BAD_UNBATCHED_CALLS: dict[str, dict[str, Any]] = {
    "key": {"key": torch.zeros(5, 1, 4)},
    "key_padding_mask 2-D": {"key_padding_mask": torch.zeros(1, 5)},
    "key_padding_mask's length": {"key_padding_mask": torch.zeros(3)},
    "attn_mask 1-D": {"attn_mask": torch.zeros(5)},
    "attn_mask 2-D": {"attn_mask": torch.zeros(3, 4)},
    "attn_mask 3-D": {"attn_mask": torch.zeros(1, 3, 5)},
}


def assert_same_error(options: dict[str, Any], call: dict[str, Any]) -> None:
    raised = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.raises(Exception) as info:
            cls(4, 2, **options)(**call)
        raised.append((info.type, str(info.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_raises_as_stock(name: str) -> None:
    options, changes = BAD_CALLS[name]
    good = {"query": torch.zeros(3, 2, 4), "key": torch.zeros(5, 2, 4), "value": torch.zeros(5, 2, 4)}
    assert_same_error(options, good | changes)


# For other dtypes torch's linear has two texts, depending on strides.
@pytest.mark.parametrize("name", sorted(BAD_CALLS.keys() - {"query's dtype", "dtype"}))
def test_bad_batch_first_call_raises_as_stock(name: str) -> None:
    options, changes = BAD_CALLS[name]
    good = {"query": torch.zeros(3, 2, 4), "key": torch.zeros(5, 2, 4), "value": torch.zeros(5, 2, 4)}
    call = good | changes
    for inputs in ("query", "key", "value"):
        if call[inputs].dim() == 3:
            call[inputs] = call[inputs].transpose(0, 1)
    assert_same_error(options | {"batch_first": True}, call)


@pytest.mark.parametrize("name", BAD_UNBATCHED_CALLS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_bad_unbatched_call_raises_as_stock(name: str, batch_first: bool) -> None:
    good = {"query": torch.zeros(3, 4), "key": torch.zeros(5, 4), "value": torch.zeros(5, 4)}
    assert_same_error({"batch_first": batch_first}, good | BAD_UNBATCHED_CALLS[name])


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        # Stock masks appended keys for early rows here, and so manages without the mask.
        (Case(mask="bool causal", bias_kv=True, need_weights=False), {"attn_mask": torch.zeros(1, 1)}),
        # Stock answers with a tensor without data.
        (Case(), {"attn_mask": torch.zeros(4, 5, device="meta", dtype=torch.float64)}),
        (Case(), {"key_padding_mask": torch.zeros(2, 5, device="meta", dtype=torch.float64)}),
    ],
)
def test_what_only_stock_takes_is_a_named_error(case: Case, changes: dict[str, Any]) -> None:
    call = case.call() | changes
    case.module(nn.MultiheadAttention)(**call)
    with pytest.raises(ArgumentError, match=", ".join(x for x in call if isinstance(call[x], Tensor))):
        case.module(MultiheadAttention)(**call)


@pytest.mark.parametrize("arguments", [(0, 1), (4, 0), (-4, 2), (5, 2)])
def test_bad_sizes_raise_as_stock(arguments: tuple[int, int]) -> None:
    raised = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.raises(Exception) as info:
            cls(*arguments)
        raised.append((info.type, str(info.value)))
    assert raised[0] == raised[1]


def test_unlike_mask_dtypes_warn_as_stock() -> None:
    texts = []
    case = Case(padding="bool", mask="float 2d")
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        with pytest.warns(UserWarning) as record:
            case.module(cls)(**case.call())
        texts.append([str(warning.message) for warning in record])
    assert texts[0] == texts[1]


@given(
    st.fixed_dictionaries(
        {
            "batched": st.booleans(),
            "batch_first": st.booleans(),
            "bias_kv": st.booleans(),
            "sharing": st.sampled_from(["none", "kv", "all"]),
            "need_weights": st.booleans(),
            "kdim": st.sampled_from([None, None, 7]),
        }
    ),
    st.permutations([torch.float64, torch.float32, torch.float16]),
    st.sampled_from(["in_proj_bias", "in_proj_bias", "out_proj.bias", "out_proj.weight", "bias_k", "query"]),
)
@example(
    {
        "batched": False,
        "batch_first": False,
        "bias_kv": True,
        "sharing": "none",
        "need_weights": True,
        "kdim": None,
    },
    [torch.float16, torch.float32, torch.float64],
    "bias_k",
)
def test_unlike_dtypes_are_as_in_stock(
    options: dict[str, Any], dtypes: list[torch.dtype], changed: str
) -> None:
    """The same results, or an error of the same type or our own."""
    assume(options["kdim"] is None or options["sharing"] == "none")
    assume(changed != "bias_k" or options["bias_kv"])
    case = Case(L=5, dtype=dtypes[0], **options)
    stock, call = case.module(nn.MultiheadAttention), case.call()
    if changed == "query":
        call["query"] = call["query"].to(dtypes[1])
    else:
        owner = stock.out_proj if changed.startswith("out_proj") else stock
        name = changed.removeprefix("out_proj.")
        setattr(owner, name, nn.Parameter(getattr(owner, name).detach().to(dtypes[1])))
    outcomes: list[Any] = []
    for module in (stock, MultiheadAttention.from_torch(stock)):
        try:
            outcomes.append(run(module, call))
        except Exception as error:
            outcomes.append(type(error))
    expected, actual = outcomes
    if isinstance(expected, type):
        assert actual is expected or issubclass(actual, ArgumentError)
    else:
        assert_as_exact(actual, expected, in_float64(stock, call))


# What reaches the operator


class Recorder:
    """Wraps the functions of `ops` and records the arguments of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        # Prepared calls do not pass by here.
        for module in (fast_path, prepared):
            monkeypatch.setattr(module, "lookup", lambda *call: (None, None))
        for name in ("attention", "attention_varlen", "attention_and_weights"):
            monkeypatch.setattr(ops, name, self._recorded(name, getattr(ops, name)))

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return function(*args, **options)

        return call

    def attentions(self) -> int:
        return len(self.calls)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sharing", ["none", "kv", "qk", "qv", "all"])
def test_heads_are_views_of_the_projections(recorder: Recorder, sharing: str, batch_first: bool) -> None:
    case = Case(L=5, sharing=sharing, batch_first=batch_first)
    case.module(MultiheadAttention)(**case.call())
    q, k, v = recorder.calls[0][1][:3]
    assert {x.shape for x in (q, k, v)} == {(2, 5, 2, 3)}
    widths = {x.stride(1 if batch_first else 0) for x in (q, k, v)}
    assert widths == {"none": {6}, "kv": {6, 12}, "qk": {6, 12}, "qv": {6}, "all": {18}}[sharing]
    storages = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    assert len(storages) == {"none": 3, "kv": 2, "qk": 2, "qv": 3, "all": 1}[sharing]


@pytest.mark.parametrize(
    ("padding", "mask", "expected"),
    [
        ("none", "none", None),
        ("none", "bool causal", None),
        ("bool", "none", ((2, 1, 1, 5), torch.bool)),
        ("float", "none", ((2, 1, 1, 5), torch.float64)),
        ("bool", "bool causal", ((2, 1, 1, 5), torch.bool)),
        ("none", "bool 2d", ((1, 1, 4, 5), torch.bool)),
        ("none", "float 2d", ((1, 1, 4, 5), torch.float64)),
        ("none", "bool 3d", ((2, 2, 4, 5), torch.bool)),
        ("bool", "bool 2d", ((2, 1, 4, 5), torch.bool)),
        ("float", "float 2d", ((2, 1, 4, 5), torch.float64)),
        ("bool", "bool 3d", ((2, 2, 4, 5), torch.bool)),
    ],
)
def test_mask_is_as_small_as_it_can_be(
    recorder: Recorder, padding: str, mask: str, expected: tuple[tuple[int, ...], torch.dtype] | None
) -> None:
    case = Case(padding=padding, mask=mask)
    case.module(MultiheadAttention)(**case.call())
    reached = recorder.calls[0][1][3]
    assert (reached if reached is None else (tuple(reached.shape), reached.dtype)) == expected
    assert recorder.calls[0][1][6].window_right == (-1 if "causal" in mask else None)


# torch's transformer modules call it, whatever their fast paths


def transformer_cases() -> dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], int]]:
    """Module, how to call it with tokens and their padding, and how many attentions it consists of."""
    sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}

    def encoder_layer() -> nn.Module:
        return nn.TransformerEncoderLayer(**sizes)

    def encode(module: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
        return module(x, src_key_padding_mask=padding)

    def decode(module: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
        return module(x, x.flip(0), tgt_key_padding_mask=padding)

    def translate(module: nn.Module, x: Tensor, padding: Tensor | None) -> Tensor:
        return module(x, x, src_key_padding_mask=padding, tgt_key_padding_mask=padding)

    return {
        "encoder layer": (encoder_layer, encode, 1),
        "encoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), encode, 2),
        "encoder, no nested": (
            lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
            encode,
            2,
        ),
        "decoder layer": (lambda: nn.TransformerDecoderLayer(**sizes), decode, 2),
        "transformer": (
            lambda: nn.Transformer(num_encoder_layers=2, num_decoder_layers=1, **sizes),
            translate,
            4,
        ),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", transformer_cases())
def test_transformers_really_call_it(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder, name: str, padded: bool, mode: str
) -> None:
    monkeypatch.setattr(encoder, "_LIMITS", {})
    make, call, attentions = transformer_cases()[name]
    stock = make().train(mode == "train")
    swapped = copy.deepcopy(stock)
    assert len(replace_attention(swapped)) == attentions
    x = torch.randn(3, 6, 8)
    padding = torch.arange(6) >= torch.tensor([6, 3, 1])[:, None] if padded else None
    with torch.inference_mode(mode == "inference_mode"), torch.set_grad_enabled(mode in ("train", "eval")):
        expected = call(stock, x, padding)
        assert recorder.attentions() == 0
        torch.testing.assert_close(call(swapped, x, padding), expected, rtol=1e-4, atol=1e-5)
    assert recorder.attentions() == attentions


# Nested tensors

nested_warns = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
layouts = pytest.mark.parametrize("layout", [torch.strided, torch.jagged])


def nested(lengths: list[int], layout: torch.layout, E: int = 8) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(length, E) for length in lengths], layout=layout)


@nested_warns
@layouts
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_nested_is_each_sequence_alone(layout: torch.layout, cross: bool, average: bool) -> None:
    module = MultiheadAttention(8, 2, batch_first=True)
    query = nested([3, 0, 5], layout).requires_grad_()
    key = nested([4, 2, 1], layout).requires_grad_() if cross else query
    out, weights = module(query, key, key, average_attn_weights=average)
    assert out.is_nested and out.layout == layout
    if layout == torch.jagged:
        assert (query + out).shape == query.shape
    assert weights.shape == ((3, 5, 4 if cross else 5) if average else (3, 2, 5, 4 if cross else 5))
    total = torch.zeros(())
    for i, (q, k) in enumerate(zip(query.unbind(), key.unbind(), strict=True)):
        alone, alone_weights = module(q, k, k, average_attn_weights=average)
        torch.testing.assert_close(out.unbind()[i], alone)
        rows, columns = alone_weights.shape[-2:]
        torch.testing.assert_close(weights[i, ..., :rows, :columns], alone_weights)
        assert not weights[i, ..., rows:, :].any() and not weights[i, ..., columns:].any()
        total = total + alone.square().sum()
    leaves = [query, key, module.in_proj_weight] if cross else [query, module.in_proj_weight]
    expected = torch.autograd.grad(total, leaves)
    actual = torch.autograd.grad(sum(x.square().sum() for x in out.unbind()), leaves)
    for x, y in zip(actual, expected, strict=True):
        for a, b in zip(x.unbind(), y.unbind(), strict=True):
            torch.testing.assert_close(a, b)


@nested_warns
@pytest.mark.parametrize("average", [True, False])
def test_nested_matches_stock(average: bool) -> None:
    stock = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    ours = MultiheadAttention.from_torch(stock)
    x = nested([3, 5, 1], torch.strided)
    with torch.no_grad():
        expected, expected_weights = stock(x, x, x, average_attn_weights=average)
        out, weights = ours(x, x, x, average_attn_weights=average)
    torch.testing.assert_close(out.to_padded_tensor(0.0), expected.to_padded_tensor(0.0))
    for i, length in enumerate([3, 5, 1]):
        torch.testing.assert_close(weights[i, ..., :length, :], expected_weights[i, ..., :length, :])


@nested_warns
@layouts
def test_nested_dropout_returns_the_applied_weights(layout: torch.layout) -> None:
    module = MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = nested([30, 40], layout)
    out, weights = module(x, x, x, average_attn_weights=False)
    for i, sequence in enumerate(x.unbind()):
        n = sequence.shape[0]
        v = nn.functional.linear(sequence, module.in_proj_weight.chunk(3)[2]).unflatten(-1, (2, 4))
        heads = weights[i, :, :n, :n] @ v.transpose(0, 1)
        torch.testing.assert_close(out.unbind()[i], module.out_proj(heads.transpose(0, 1).flatten(1)))
        assert 0.4 < (weights[i, :, :n, :n] == 0).double().mean() < 0.6


@nested_warns
@pytest.mark.parametrize(
    ("argument", "options", "changes"),
    [
        ("key_padding_mask", {}, {"key_padding_mask": torch.zeros(2, 5)}),
        ("attn_mask", {}, {"attn_mask": torch.zeros(5, 5)}),
        ("is_causal", {}, {"is_causal": True}),
        ("batch_first", {"batch_first": False}, {}),
        ("add_bias_kv or add_zero_attn", {"add_bias_kv": True}, {}),
        ("add_bias_kv or add_zero_attn", {"add_zero_attn": True}, {}),
        ("query", {}, {"query": torch.zeros(2, 5, 8)}),
        ("value", {}, {"value": torch.zeros(2, 5, 8)}),
        ("key", {}, {"key": "jagged"}),
        ("key", {}, {"key": "larger batch"}),
        ("value", {}, {"value": "other lengths"}),
        ("query", {}, {"query": "four dimensions"}),
        ("query", {}, dict.fromkeys(("query", "key", "value"), "gaps")),
    ],
)
def test_nested_outside_its_limits(argument: str, options: dict[str, Any], changes: dict[str, Any]) -> None:
    odd = {
        "jagged": nested([3, 5], torch.jagged),
        "larger batch": nested([3, 5, 2], torch.strided),
        "other lengths": nested([5, 3], torch.strided),
        "gaps": torch.nested.narrow(
            torch.zeros(2, 6, 8), 1, torch.tensor([0, 1]), torch.tensor([3, 5]), layout=torch.jagged
        ),
        "four dimensions": torch.nested.nested_tensor([torch.zeros(3, 8, 1), torch.zeros(5, 8, 1)]),
    }
    call = dict.fromkeys(("query", "key", "value"), nested([3, 5], torch.strided))
    call |= {name: odd.get(x, x) if isinstance(x, str) else x for name, x in changes.items()}
    module = MultiheadAttention(8, 2, **{"batch_first": True} | options)
    with pytest.raises(ArgumentError) as info:
        module(**call)
    assert info.value.argument == argument


@nested_warns
@layouts
@pytest.mark.parametrize("need_weights", [True, False])
def test_nested_keys_and_values_made_apart(layout: torch.layout, need_weights: bool) -> None:
    module = MultiheadAttention(8, 2, batch_first=True)
    query, key = nested([3, 0, 5], layout), nested([4, 2, 1], layout)
    values = [torch.randn(length, 8, requires_grad=True) for length in (4, 2, 1)]
    apart = torch.nested.as_nested_tensor(values, layout=layout)
    out, weights = module(query, key, apart, need_weights=need_weights)
    gradients = torch.autograd.grad(sum(x.square().sum() for x in out.unbind()), values)
    alone = [module(*sequences) for sequences in zip(query.unbind(), key.unbind(), values, strict=True)]
    expected = torch.autograd.grad(sum(x.square().sum() for x, _ in alone), values)
    for actual, (x, _) in zip(out.unbind(), alone, strict=True):
        torch.testing.assert_close(actual, x)
    for actual, x in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, x)
    assert (weights is not None) == need_weights


@nested_warns
@pytest.mark.parametrize("lengths", [[3, 4], [5, 2], [3, 5, 2]])
def test_jagged_values_of_other_lengths(lengths: list[int]) -> None:
    module = MultiheadAttention(8, 2, batch_first=True)
    key = nested([3, 5], torch.jagged)
    with pytest.raises(ArgumentError, match=r"value is (a nested tensor of other|nested .*batch size 3)"):
        module(key, key, nested(lengths, torch.jagged))


@nested_warns
def test_jagged_values_made_apart_in_a_graph() -> None:
    """A graph cannot read the lengths. It says so, and serves what shares its offsets."""
    module = MultiheadAttention(8, 2, batch_first=True)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    key = nested([3, 5], torch.jagged)
    torch.testing.assert_close(
        compiled(key, key, key * 2, need_weights=False)[0].values(), module(key, key, key * 2)[0].values()
    )
    with pytest.raises(Exception, match="in a compiled graph it must share key's offsets"):
        compiled(key, key, nested([3, 5], torch.jagged), need_weights=False)


# Autocast, compile, copies


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("appended", [True, False])
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
def test_autocast_matches_stock(need_weights: bool, appended: bool, padding: str) -> None:
    case = Case(
        bias_kv=appended,
        zero_attn=appended,
        padding=padding,
        need_weights=need_weights,
        dtype=torch.float32,
    )
    stock, ours = case.module(nn.MultiheadAttention), case.module(MultiheadAttention)
    exact = run(stock, case.call())
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = run(stock, case.call()), run(ours, case.call())
    for name in exact:
        assert actual[name].dtype == expected[name].dtype
    assert_as_exact(
        {name: x.bfloat16() for name, x in actual.items()},
        {name: x.bfloat16() for name, x in expected.items()},
        {name: x.double() for name, x in exact.items()},
    )


COMPILED = {
    "plain": Case(sharing="all", L=5),
    "causal, padded": Case(mask="bool causal", padding="bool", need_weights=False),
    "float masks": Case(mask="float 3d", padding="float", batch_first=True, average=False),
    "everything appended": Case(bias_kv=True, zero_attn=True, kdim=4, vdim=7, mask="bool 2d"),
    "unbatched": Case(batched=False, need_weights=False),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name: str, training: bool) -> None:
    case = replace(COMPILED[name], dtype=torch.float32)
    module = case.module(MultiheadAttention).train(training)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected, actual = run(module, case.call()), run(module, case.call(), compiled)
    assert expected.keys() == actual.keys()
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x)


def test_compiled_dropout_is_seeded() -> None:
    module, call = dropout_case(0.3, sharing="all")
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(compiled(**call)[1])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_inductor_compiles_training_and_evaluation() -> None:
    case = Case(mask="bool causal", padding="bool", need_weights=False, dtype=torch.float32)
    module = case.module(MultiheadAttention)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True)
    expected, actual = run(module, case.call()), run(module, case.call(), compiled)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x)
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(**case.call()), module(**case.call()))


def test_new_lengths_do_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    module = MultiheadAttention(8, 2, batch_first=True)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for length in range(5, 27):
        x = torch.randn(2, length, 8)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        padding = torch.zeros(2, length, dtype=torch.bool)
        call = {"key_padding_mask": padding, "attn_mask": mask, "is_causal": True, "need_weights": False}
        torch.testing.assert_close(compiled(x, x, x, **call), module(x, x, x, **call))
    # One graph for the first length, one for all others.
    assert counter.frame_count == 2


@pytest.mark.parametrize("training", [True, False])
def test_swapped_transformer_compiles_as_one_graph(recorder: Recorder, training: bool) -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).train(training)
    replace_attention(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with torch.set_grad_enabled(training):
        actual = compiled(x, mask=mask, is_causal=True)
        assert recorder.attentions() == 2
        torch.testing.assert_close(actual, model(x, mask=mask, is_causal=True))


def test_exports_with_dynamic_lengths() -> None:
    module = MultiheadAttention(8, 2, batch_first=True)

    def arguments(length: int) -> dict[str, Any]:
        x = torch.randn(2, length, 8)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return {"query": x, "key": x, "value": x, "attn_mask": mask, "is_causal": True}

    length = torch.export.Dim("length", min=2, max=100)
    tokens = {1: length}
    shapes = {"query": tokens, "key": tokens, "value": tokens, "attn_mask": {0: length, 1: length}}
    shapes["is_causal"] = None
    program = torch.export.export(module, (), arguments(5), dynamic_shapes=shapes)
    for call in (arguments(5), arguments(33)):
        torch.testing.assert_close(program.module()(**call), module(**call))


def test_gradients_of_each_sample() -> None:
    module = MultiheadAttention(8, 2, batch_first=True)
    parameters = {name: x.detach() for name, x in module.named_parameters()}
    x = torch.randn(3, 5, 8)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        out, weights = torch.func.functional_call(module, parameters, (x, x, x))
        return out.square().sum() + weights.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for name, together in torch.func.grad(loss)(parameters, x).items():
        torch.testing.assert_close(each[name].sum(0), together)


MODULES = {
    "packed": Case(),
    "separate": Case(kdim=4, vdim=7, batch_first=True),
    "bare": Case(bias=False, zero_attn=True),
    "bias_kv": Case(bias_kv=True),
}


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickled, saved])
@pytest.mark.parametrize("name", MODULES)
def test_copies_compute_the_same(name: str, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    case = MODULES[name]
    module = case.module(MultiheadAttention)
    twin = duplicate(module)
    assert type(twin) is MultiheadAttention
    for x, y in zip(module(**case.call()), twin(**case.call()), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_those_of_stock(name: str) -> None:
    """Same names, order and shapes, and from the same seed the same values."""
    case = MODULES[name]
    states = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(3)
        module = cls(
            case.E,
            case.H,
            bias=case.bias,
            add_bias_kv=case.bias_kv,
            add_zero_attn=case.zero_attn,
            kdim=case.kdim,
            vdim=case.vdim,
        )
        states.append(module.state_dict())
    stock, ours = states
    assert list(stock) == list(ours)
    assert all(torch.equal(stock[key], ours[key]) for key in stock)


@pytest.mark.parametrize("name", MODULES)
def test_state_dict_goes_both_ways(name: str) -> None:
    case = MODULES[name]
    for classes in itertools.permutations([nn.MultiheadAttention, MultiheadAttention]):
        given, other = case.module(classes[0]), replace(case, seed=7).module(classes[1])
        assert not torch.equal(given(**case.call())[0], other(**case.call())[0])
        other.load_state_dict(given.state_dict())
        torch.testing.assert_close(other(**case.call()), given(**case.call()))


def test_pickle_without_the_flag_of_newer_torch() -> None:
    case = Case()
    module = case.module(MultiheadAttention)
    state = module.__getstate__()
    del state["_qkv_same_embed_dim"]
    old = MultiheadAttention.__new__(MultiheadAttention)
    old.__setstate__(state)
    assert torch.equal(old(**case.call())[0], module(**case.call())[0])


# from_torch


def test_from_torch_shares_and_computes_the_same() -> None:
    case = Case(bias_kv=True, zero_attn=True, batch_first=True, kdim=4)
    stock = case.module(nn.MultiheadAttention, dropout=0.25).eval()
    seen = []
    handle = stock.register_forward_hook(lambda module, args, result: seen.append(type(module)))
    ours = MultiheadAttention.from_torch(stock)
    assert type(ours) is MultiheadAttention and type(stock) is nn.MultiheadAttention
    assert dict(ours.named_parameters()).keys() == dict(stock.named_parameters()).keys()
    assert all(x is y for x, y in zip(ours.parameters(), stock.parameters(), strict=True))
    assert not ours.training and ours.batch_first and ours.dropout == 0.25
    torch.testing.assert_close(ours(**case.call()), stock(**case.call()))
    assert seen == [MultiheadAttention, nn.MultiheadAttention]
    handle.remove()
    ours(**case.call())
    assert len(seen) == 2
    ours.bias_k = None
    assert stock.bias_k is not None


def test_from_torch_of_a_compiled_module_does_not_call_the_old_code(recorder: Recorder) -> None:
    stock = Case().module(nn.MultiheadAttention)
    stock.compile(backend="eager")
    MultiheadAttention.from_torch(stock)(**Case().call())
    assert recorder.attentions() == 1


def test_from_torch_of_a_parametrized_module() -> None:
    case = Case()
    stock = parametrizations.weight_norm(case.module(nn.MultiheadAttention), "in_proj_weight")
    ours = MultiheadAttention.from_torch(stock)
    assert isinstance(ours, MultiheadAttention)
    assert all(x is y for x, y in zip(ours.parameters(), stock.parameters(), strict=True))
    torch.testing.assert_close(ours(**case.call()), stock(**case.call()))


class ForeignAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def with_own_forward() -> nn.Module:
    module = nn.MultiheadAttention(4, 2)
    module.forward = module.forward
    return module


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 4), None, ForeignAttention(4, 2), with_own_forward()],
    ids=lambda m: type(m).__name__,
)
def test_from_torch_refuses_what_it_would_change(module: Any) -> None:
    with pytest.raises(TypeError, match=f"module is {type(module).__name__}"):
        MultiheadAttention.from_torch(module)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_training_on_tensors_made_in_inference_mode(kind: str, need_weights: bool) -> None:
    """Features of a frozen model, and masks, which autograd cannot save; stock copies them."""
    module = MultiheadAttention(32, 4, batch_first=True)
    with torch.inference_mode():
        memory, padding = torch.randn(2, 7, 32) * 1, torch.arange(7) >= torch.tensor([[7], [4]])
    query = memory if kind == "self" else torch.randn(2, 5, 32)

    def gradients(query: Tensor, memory: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        out = module(query, memory, memory, key_padding_mask=padding, need_weights=need_weights)[0]
        return torch.autograd.grad(out.square().sum(), list(module.parameters()))

    copies = {id(x): x.clone() for x in (query, memory, padding)}
    expected = gradients(*(copies[id(x)] for x in (query, memory, padding)))
    for _ in range(2):
        for own, other in zip(gradients(query, memory, padding), expected, strict=True):
            torch.testing.assert_close(own, other)
