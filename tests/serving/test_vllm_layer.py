"""Our backend for vLLM, with what stands for vLLM's base classes: the laws of one layer's attention.

`test_vllm_engine.py` runs vLLM itself, where it is installed.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from flash4_torch import ahead, testing
from flash4_torch.backends.compiled import TARGETS
from flash4_torch.errors import ArgumentError
from flash4_torch.integrations import vllm
from flash4_torch.integrations.vllm import layout, support
from kvcache_on_cpu import NUM_SMS, gpu

Hq, Hk, D, BLOCK = 4, 2, 16, 16
FLOAT8 = torch.float8_e4m3fn
_T = TypeVar("_T")


class _Graphs(enum.Enum):
    ALWAYS = 3


class _Builder(Generic[_T]):
    def __init__(self, *args: Any):
        pass


class _Layer(Generic[_T]):
    pass


_NAMES = {"DECODER": "decoder", "ENCODER_ONLY": "encoder_only"}
_STANDS_FOR: dict[str, dict[str, Any]] = {
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.v1.attention.backend": {
        "AttentionCGSupport": _Graphs,
        "AttentionImpl": _Layer,
        "AttentionMetadata": type("AttentionMetadata", (), {}),
        "AttentionMetadataBuilder": _Builder,
        "AttentionType": SimpleNamespace(**_NAMES),
    },
}


def _install(patch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Modules, and the packages that they are in, in the place of any others of these names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        patch.delitem(sys.modules, name)
    for name, contents in modules.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            if package not in sys.modules:
                patch.setitem(sys.modules, package, ModuleType(package))
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[package])
        vars(sys.modules[name]).update(contents)


class Ours(NamedTuple):
    impl: ModuleType
    metadata: ModuleType


@pytest.fixture(scope="module")
def ours() -> Iterator[Ours]:
    """Our modules, imported with these in the place of vLLM's."""
    names = ("flash4_torch.integrations.vllm.impl", "flash4_torch.integrations.vllm.metadata")
    with pytest.MonkeyPatch.context() as patch:
        _install(patch, _STANDS_FOR)
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield Ours(*map(importlib.import_module, names))
        for name in names:
            sys.modules.pop(name)


class Batch(NamedTuple):
    """Requests with `before` keys in the cache and `new` tokens, and the pages that they have."""

    before: list[int]
    new: list[int]
    table: Tensor
    slots: Tensor

    @property
    def lengths(self) -> list[int]:
        return [b + n for b, n in zip(self.before, self.new, strict=True)]


def batch_of(before: list[int], new: list[int]) -> Batch:
    total = [b + n for b, n in zip(before, new, strict=True)]
    blocks = -(-max(total) // BLOCK)
    table = torch.randperm(len(total) * blocks).view(-1, blocks).to(torch.int32)
    slots = []
    for row, b, t in zip(table.long(), before, total, strict=True):
        at = torch.arange(b, t)
        slots.append(row[at // BLOCK] * BLOCK + at % BLOCK)
    return Batch(before, new, table, torch.cat(slots))


def common(batch: Batch, causal: bool | Tensor, padding: int = 0) -> Any:
    """What vLLM gives a builder; `padding` tokens and one request more than there are."""
    starts = torch.tensor([0, *batch.new]).cumsum(0).to(torch.int32)
    lengths, table = torch.tensor(batch.lengths, dtype=torch.int32), batch.table
    if padding:
        starts = torch.cat((starts, starts[-1:]))
        lengths = torch.cat((lengths, torch.zeros(1, dtype=torch.int32)))
        table = torch.cat((table, torch.full_like(table[:1], -1)))
    return SimpleNamespace(
        num_actual_tokens=sum(batch.new) + padding,
        query_start_loc=starts,
        seq_lens=lengths,
        block_table_tensor=table,
        slot_mapping=torch.cat((batch.slots, batch.slots.new_full((padding,), -1))),
        max_query_len=max(batch.new),
        max_seq_len=max(batch.lengths),
        causal=causal,
    )


def config_of(layers: dict[str, Any]) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=512, dtype=torch.bfloat16),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


def builder(ours: Ours) -> Any:
    return ours.metadata.Flash4MetadataBuilder(None, [], config_of({}), torch.device("cpu"))


def cache_of(pages: int, order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """vLLM's view of one layer's cache, in memory in that order; what nobody has written is NaN."""
    shape = layout.kv_cache_shape(pages, BLOCK, Hk, D)
    memory = torch.full([shape[i] for i in order], torch.nan).to(dtype)
    view = memory.permute([order.index(i) for i in range(4)])
    return view.view(torch.uint8) if dtype == FLOAT8 else view


@st.composite
def sizes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    B = draw(st.integers(1, 4))
    before = draw(st.lists(st.integers(0, 40), min_size=B, max_size=B))
    new = draw(st.lists(st.sampled_from((1, 1, 1, 2, 5, 19)), min_size=B, max_size=B))
    return before, new


@settings(max_examples=examples(30, 300))
@given(
    sizes(),
    st.sampled_from(("causal", "not", "by request")),
    st.sampled_from((None, 1, 6)),
    st.sampled_from((None, 5.0)),
    st.sampled_from(("NHD", "HND")),
    st.sampled_from(("auto", "fp8")),
    st.sampled_from((0, 3)),
    st.booleans(),
)
@example(([3, 20], [2, 19]), "by request", 6, None, "NHD", "auto", 0, False)
def test_a_layer_is_attention(
    ours: Ours,
    lengths: tuple[list[int], list[int]],
    how: str,
    window: int | None,
    cap: float | None,
    order: str,
    cache_dtype: str,
    padding: int,
    with_sinks: bool,
) -> None:
    """Tokens go into the cache and attend over it: each row against the definition."""
    batch = batch_of(*lengths)
    B, T = len(batch.new), sum(batch.new)
    sinks = torch.randn(Hq) if with_sinks else None
    layer = ours.impl.Flash4Impl(Hq, D, 0.3, Hk, None, window, cache_dtype, cap, "decoder", None, sinks=sinks)
    scales = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor([0.25, 2.0]))
    kv_cache = cache_of(
        batch.table.numel(), layout.ORDERS[order], FLOAT8 if cache_dtype == "fp8" else torch.float32
    )
    keys, values = torch.randn(2, B, max(batch.lengths), Hk, D)
    for b in range(B):
        at = torch.arange(batch.before[b])
        slots = batch.table[b].long()[at // BLOCK] * BLOCK + at % BLOCK
        layer.do_kv_cache_update(scales, keys[b, at], values[b, at], kv_cache, slots)
    spans = [slice(b, b + n) for b, n in zip(batch.before, batch.new, strict=True)]
    k, v = (torch.cat([x[b, span] for b, span in enumerate(spans)]) for x in (keys, values))
    extra = torch.randn(padding + 2 if padding else 0, Hk, D)
    flags = torch.arange(B + bool(padding)) % 2 == 0
    causal = {"causal": True, "not": False, "by request": flags.to(torch.int32)}[how]
    metadata = builder(ours).build(0, common(batch, causal, padding))
    slots = common(batch, causal, padding).slot_mapping
    layer.do_kv_cache_update(scales, torch.cat((k, extra)), torch.cat((v, extra)), kv_cache, slots)
    q = torch.randn(T + padding, Hq, D)
    output = torch.full_like(q, torch.nan)
    assert layer.forward(scales, q, k, v, kv_cache, metadata, output) is output
    if cache_dtype == "fp8":
        keys = (keys / 0.5).to(FLOAT8).float() * 0.5
        by_head = scales._v_scale[:, None]
        values = (values / by_head).to(FLOAT8).float() * by_head
    first = 0
    for b, span in enumerate(spans):
        rows, columns = torch.arange(span.start, span.stop)[:, None], torch.arange(span.stop)
        is_causal = bool(flags[b]) if how == "by request" else how == "causal"
        mask = (columns <= rows) if is_causal else torch.ones(len(rows), span.stop, dtype=torch.bool)
        if window is not None:
            mask = mask & ((rows - columns).abs() < window)
        wanted, _ = testing.reference(
            q[None, first : first + len(rows)],
            keys[b : b + 1, : span.stop],
            values[b : b + 1, : span.stop],
            attn_mask=mask[None, None],
            scale=0.3,
            softcap=cap or 0.0,
            sinks=sinks,
        )
        found = output[first : first + len(rows)]
        torch.testing.assert_close(found, wanted[0].to(found.dtype), atol=1e-5, rtol=1e-4)
        first += len(rows)


@settings(max_examples=examples(10, 100))
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from((None, 3)))
def test_encoders_see_both_sides(ours: Ours, new: list[int], window: int | None) -> None:
    batch = batch_of([0] * len(new), new)
    layer = ours.impl.Flash4Impl(Hq, D, 0.3, Hk, None, window, attn_type="encoder_only")
    q, (k, v) = torch.randn(sum(new) + 2, Hq, D), torch.randn(2, sum(new) + 2, Hk, D)
    metadata = dataclasses.replace(builder(ours).build(0, common(batch, False)))
    output = layer.forward(None, q, k, v, torch.empty(0), metadata, torch.empty_like(q))
    first = 0
    for n in new:
        mine = slice(first, first + n)
        near = (torch.arange(n)[:, None] - torch.arange(n)).abs() < (window or n)
        wanted, _ = testing.reference(
            q[None, mine], k[None, mine], v[None, mine], attn_mask=near[None, None], scale=0.3
        )
        torch.testing.assert_close(output[mine], wanted[0].to(q.dtype), atol=1e-5, rtol=1e-4)
        first += n


def test_bits_do_not_depend_on_the_batch(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request alone, and among others, with VLLM_BATCH_INVARIANT."""
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_BATCH_INVARIANT", True)
    layer = ours.impl.Flash4Impl(Hq, D, 0.3, Hk)
    batch = batch_of([33, 5, 70], [4, 1, 9])
    kv_cache = torch.randn(layout.kv_cache_shape(batch.table.numel(), BLOCK, Hk, D))
    q = torch.randn(14, Hq, D)
    together = layer.forward(None, q, q, q, kv_cache, builder(ours).build(0, common(batch, True)), q.clone())
    alone = Batch([70], [9], batch.table[2:], batch.slots[5:])
    metadata = builder(ours).build(0, common(alone, True))
    assert torch.equal(layer.forward(None, q[5:], q, q, kv_cache, metadata, q[5:].clone()), together[5:])


def test_what_comes_without_a_batch(ours: Ours) -> None:
    """The profiling run, bounds of a graph's capture, and another table for the same step."""
    layer = ours.impl.Flash4Impl(Hq, D, 0.3, Hk)
    output = torch.full((3, Hq, D), torch.nan)
    assert not layer.forward(None, output, output, output, output, None, output).any()
    step = common(batch_of([3], [2]), True)
    captured = builder(ours).build_for_cudagraph_capture(step)
    assert captured.max_seq_len == 512 and captured.seq_lens is step.seq_lens
    other = torch.zeros(1, 1, dtype=torch.int32)
    assert builder(ours).update_block_table(captured, other, None).block_table is other


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes is 1 slopes"),
        ({"attn_type": "encoder_decoder"}, "attn_type is encoder_decoder"),
    ],
)
def test_a_layer_refuses(ours: Ours, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        ours.impl.Flash4Impl(Hq, D, 0.3, Hk, **options)


def configuration(**changes: Any) -> dict[str, Any]:
    capability = SimpleNamespace(major=9, minor=0)
    return {"head_size": 128, "dtype": torch.bfloat16, "device_capability": capability} | changes


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"kv_cache_dtype": "float16"}, "must have the model's dtype"),
        (
            {"device_capability": SimpleNamespace(major=7, minor=5)},
            r"sm80: the GPU's compute capability is \(7, 5\)",
        ),
        ({"head_size": 512}, "sm90: D is 512"),
        ({"dtype": torch.float32}, "sm90: the dtype is torch.float32"),
        ({"attn_type": "encoder_only", "use_batch_invariant": True}, "not batch invariant"),
    ],
)
def test_refusals_are_sentences(changes: dict[str, Any], sentence: str) -> None:
    assert any(re.search(sentence, reason) for reason in support.why_not(configuration(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device_capability": SimpleNamespace(major=8, minor=0)},
        {"kv_cache_dtype": "fp8", "block_size": 32},
        {"device_capability": SimpleNamespace(major=10, minor=3), "use_batch_invariant": True},
        {"device_capability": None, "dtype": torch.float32, "head_size": 80},
    ],
)
def test_the_rest_is_served(changes: dict[str, Any]) -> None:
    assert support.why_not(configuration(**changes)) == []


class _Enum(enum.Enum):
    """vLLM's registry of names, as versions up to 0.26 have it."""

    CUSTOM = None
    FLASH_ATTN = "fa"

    def get_path(self) -> str | None:
        return _PATHS.get(self.name)

    def is_overridden(self) -> bool:
        return self.name in _PATHS


_PATHS: dict[str, str] = {}


def _register(backend: Any, path: str) -> None:
    if isinstance(backend, str):
        _Growing.register(backend)
    _PATHS[backend if isinstance(backend, str) else backend.name] = path


class _Growing:
    """The registry of later versions, which takes other names, but each of them once."""

    __members__: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, name: str) -> None:
        assert name not in cls.__members__
        cls.__members__[name] = name


@pytest.mark.parametrize("registry, name", [(_Enum, "CUSTOM"), (_Growing, "FLASH4")])
def test_registration_may_be_repeated(registry: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"AttentionBackendEnum": registry, "register_backend": _register}
    _install(monkeypatch, {"vllm.v1.attention.backends.registry": contents})
    monkeypatch.setattr(sys.modules[__name__], "_PATHS", {})
    vllm.register()
    vllm.register()
    assert vllm.registered_name() == name
    assert {name: vllm.BACKEND} == _PATHS


def test_another_plugin_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contents = {"AttentionBackendEnum": _Enum, "register_backend": _register}
    _install(monkeypatch, {"vllm.v1.attention.backends.registry": contents})
    monkeypatch.setattr(sys.modules[__name__], "_PATHS", {"CUSTOM": "theirs.Backend"})
    vllm.register()
    assert {"CUSTOM": "theirs.Backend"} == _PATHS
    assert "theirs.Backend" in caplog.text


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_80"])
@settings(max_examples=examples(10, 200))
@given(
    sizes(),
    st.sampled_from((None, 6)),
    st.sampled_from((None, 5.0)),
    st.sampled_from(("auto", "fp8")),
    st.booleans(),
    st.booleans(),
)
def test_a_builder_knows_the_kernels_of_steps(
    ours: Ours,
    arch: str,
    lengths: tuple[list[int], list[int]],
    window: int | None,
    cap: float | None,
    cache_dtype: str,
    with_sinks: bool,
    batch_invariant: bool,
) -> None:
    """What it prepares for its layers before the first step is all that a step looks for."""
    target, dtype, Dh = TARGETS[arch], torch.bfloat16, 64
    sinks = torch.zeros(Hq) if with_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.impl.vllm.envs, "VLLM_BATCH_INVARIANT", batch_invariant)
        impl = ours.impl.Flash4Impl(
            Hq, Dh, 0.3, Hk, None, window, cache_dtype, cap, "decoder", None, sinks=sinks
        )
    layer = SimpleNamespace(impl=impl, _k_scale=torch.ones(()), _v_scale=torch.ones(()))
    spec, config = SimpleNamespace(block_size=BLOCK), config_of({"attn": layer, "other": SimpleNamespace()})
    described = list(ours.metadata._steps(spec, ["attn", "other", "gone"], config, torch.device("cpu")))
    batch = batch_of(*lengths)
    T = sum(batch.new)
    with gpu(target) as backend:
        known = ahead.kernels_of_steps(described, target, NUM_SMS)
        shape = layout.kv_cache_shape(batch.table.numel(), BLOCK, Hk, Dh)
        kv_cache = torch.zeros(shape, dtype=torch.uint8 if cache_dtype == "fp8" else dtype)
        query, (key, value) = torch.zeros(T, Hq, Dh, dtype=dtype), torch.zeros(2, T, Hk, Dh, dtype=dtype)
        impl.do_kv_cache_update(layer, key, value, kv_cache, batch.slots)
        metadata = builder(ours).build(0, common(batch, True))
        for step in (metadata, dataclasses.replace(metadata, max_seq_len=config.model_config.max_model_len)):
            impl.forward(layer, query, key, value, kv_cache, step, torch.empty_like(query))
        assert len(backend.launches) >= 3
        assert set(backend.found) <= {(key.entry, key.static) for key in known}


def test_a_builder_prepares_the_kernels_on_a_gpu(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    monkeypatch.setattr(ours.metadata.ahead_of_steps, "warmup_steps", lambda *args: prepared.append(args))
    spec = SimpleNamespace(block_size=BLOCK)
    for device in ("cpu", "cuda:1"):
        ours.metadata.Flash4MetadataBuilder(spec, [], config_of({}), torch.device(device))
    assert prepared == [([], 1)]
