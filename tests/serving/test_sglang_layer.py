"""Our backend for SGLang, given what stands for its batches, pools and layers, without the engine."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import examples
from flash4_torch import ahead, testing
from flash4_torch.backends.compiled import MERGE_STATES, TARGETS
from flash4_torch.errors import ArgumentError
from kvcache_on_cpu import NUM_SMS, gpu

Hq, Hk, D = 4, 2, 16
ROOM = 96
"""Tokens that a request may have."""


class _Kind(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class _Base:
    pass


class _Where(SimpleNamespace):
    @classmethod
    def for_layer(cls, batch: Any, layer: Any, *, swa_loc: Tensor | None) -> _Where:
        return cls(loc=batch.out_cache_loc, swa_loc=swa_loc)


class _WindowPool:
    pass


class _Radix(torch.nn.Module):
    pass


_SPECULATION = SimpleNamespace(speculative_num_draft_tokens=None, speculative_eagle_topk=None)
_STANDS_FOR: dict[str, dict[str, Any]] = {
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": _Base},
    "sglang.srt.layers.radix_attention": {"AttentionType": _Kind, "RadixAttention": _Radix},
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": _Where},
    "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": _WindowPool},
    "sglang.srt.runtime_context": {
        "get_exec": lambda: SimpleNamespace(
            deterministic=SimpleNamespace(enable_deterministic_inference=False)
        ),
        "get_spec": lambda: _SPECULATION,
    },
}


@pytest.fixture(scope="module", autouse=True)
def backend_module() -> Iterator[ModuleType]:
    """Our module, imported with these in the place of SGLang's."""
    patch = pytest.MonkeyPatch()
    for name, contents in _STANDS_FOR.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            package = ".".join(parts[:i])
            if package not in sys.modules or i == len(parts):
                patch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(contents)
    ours = "flash4_torch.integrations.sglang.backend"
    yield importlib.import_module(ours)
    sys.modules.pop(ours)
    patch.undo()


class Pool:
    """A pool of slots, and a table that gives requests pages of it in no order."""

    def __init__(self, page_size: int, requests: int):
        pages = -(-ROOM // page_size)
        order = torch.randperm(requests * pages + 1)[1:].view(requests, pages)
        slots = order[..., None] * page_size + torch.arange(page_size)
        self.req_to_token = slots.flatten(1).to(torch.int32)
        self.keys, self.values = torch.full((2, (requests * pages + 1) * page_size, Hk, D), torch.nan)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values

    def set_kv_buffer(self, layer: Any, where: Any, k: Tensor, v: Tensor, *scales: Any) -> None:
        self.keys[where.loc.long()], self.values[where.loc.long()] = k, v


class Mode(SimpleNamespace):
    def is_decode_or_idle(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"


def runner(pool: Pool, page_size: int, **changes: Any) -> Any:
    config = SimpleNamespace(context_len=ROOM, is_encoder_decoder=False, is_local_attention_model=False)
    fields = {
        "device": "cpu",
        "page_size": page_size,
        "req_to_token_pool": SimpleNamespace(req_to_token=pool.req_to_token),
        "token_to_kv_pool": pool,
        "model_config": config,
        "sliding_window_size": None,
        "use_mla_backend": False,
        "is_draft_worker": False,
        "kv_index_translator": None,
        "kv_cache_dtype": torch.float32,
    }
    return SimpleNamespace(**fields | changes)


def layer(window: int = -1, cap: float = 0.0) -> Any:
    return SimpleNamespace(
        layer_id=0,
        tp_q_head_num=Hq,
        tp_k_head_num=Hk,
        tp_v_head_num=Hk,
        qk_head_dim=D,
        v_head_dim=D,
        scaling=D**-0.5,
        logit_cap=cap,
        sliding_window_size=window,
        attn_type=_Kind.DECODER,
        k_scale=None,
        v_scale=None,
    )


def batch(mode: str, pool: Pool, requests: Tensor, before: list[int], new: list[int], **more: Any) -> Any:
    """Requests that have `before` keys and get `new` tokens; seq_lens as SGLang counts them in each mode."""
    total = [b + n for b, n in zip(before, new, strict=True)]
    lens = torch.tensor(before if mode == "verify" else total)
    slots = [pool.req_to_token[r, b:t] for r, b, t in zip(requests.tolist(), before, total, strict=True)]
    return SimpleNamespace(
        forward_mode=Mode(name=mode),
        batch_size=len(before),
        seq_lens=lens,
        seq_lens_cpu=lens,
        req_pool_indices=requests,
        extend_seq_lens=torch.tensor(new),
        extend_seq_lens_cpu=new,
        out_cache_loc=torch.cat(slots),
        **more,
    )


def exact(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cap: float, sinks: Tensor | None) -> Tensor:
    """(n, Hq, D) of one request's tokens; mask (n, Sk)."""
    options = {"attn_mask": mask[None, None], "softcap": cap, "sinks": sinks}
    return testing.reference(q[None], keys[None], values[None], **options)[0][0]


@st.composite
def lengths(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    B = draw(st.integers(1, 4))
    before = draw(st.lists(st.integers(0, 40), min_size=B, max_size=B))
    new = draw(st.lists(st.integers(1, 20), min_size=B, max_size=B))
    return before, new


@settings(max_examples=examples(20, 200))
@given(
    lengths(),
    st.sampled_from((1, 2, 16, 32)),
    st.sampled_from(("extend", "decode", "graph")),
    st.sampled_from((-1, 0, 7)),
    st.sampled_from((0.0, 5.0)),
    st.booleans(),
)
def test_any_step_is_attention(
    backend_module: ModuleType,
    sizes: tuple[list[int], list[int]],
    page_size: int,
    how: str,
    window: int,
    cap: float,
    with_sinks: bool,
) -> None:
    """Prefill, chunks of it, and decoding, eager and as a graph's: each row against the definition."""
    before, new = sizes
    if how != "extend":
        new = [1] * len(before)
    pool = Pool(page_size, 5)
    backend = backend_module.Flash4Backend(runner(pool, page_size))
    requests = torch.randperm(5)[: len(before)]
    keys, values = torch.randn(2, 5, ROOM, Hk, D)
    for r, b in zip(requests.tolist(), before, strict=True):
        slots = pool.req_to_token[r, :b].long()
        pool.keys[slots], pool.values[slots] = keys[r, :b], values[r, :b]
    step = batch("extend" if how == "extend" else "decode", pool, requests, before, new)
    if how == "graph":
        backend.init_cuda_graph_state(6, 6)
        backend.init_forward_metadata_out_graph(step, in_capture=True)
        assert backend.forward_metadata.keys.table.data_ptr() == backend._graph_tables[1].data_ptr()
    else:
        backend.init_forward_metadata(step)
    spans = [(r, slice(b, b + n)) for r, b, n in zip(requests.tolist(), before, new, strict=True)]
    k, v = (torch.cat([x[r, span] for r, span in spans]) for x in (keys, values))
    q = torch.randn(sum(new), Hq, D)
    sinks = torch.randn(Hq) if with_sinks else None
    call = backend.forward_extend if how == "extend" else backend.forward_decode
    out = call(q.flatten(1), k, v, layer(window, cap), step, sinks=sinks).view(-1, Hq, D)
    first = 0
    for (r, span), n in zip(spans, new, strict=True):
        rows, columns = torch.arange(span.start, span.stop)[:, None], torch.arange(span.stop)
        mask = (columns <= rows) & ((columns >= rows - window) if window >= 0 else True)
        wanted = exact(q[first : first + n], keys[r, : span.stop], values[r, : span.stop], mask, cap, sinks)
        torch.testing.assert_close(out[first : first + n], wanted.to(out.dtype), atol=1e-5, rtol=1e-4)
        first += n


@settings(max_examples=examples(20, 200))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 6), st.booleans(), st.data())
def test_drafts_see_their_ancestors(
    backend_module: ModuleType, before: list[int], drafts: int, is_tree: bool, data: st.DataObject
) -> None:
    """A chain of drafts, and a tree of them: all keys before, and each draft's ancestors."""
    B, page_size = len(before), data.draw(st.sampled_from((1, 16)))
    parents = [data.draw(st.integers(0, max(i - 1, 0))) if is_tree else i - 1 for i in range(drafts)]
    sees = torch.eye(drafts, dtype=torch.bool)
    for i in range(1, drafts):
        sees[i] |= sees[parents[i]]
    pool = Pool(page_size, 4)
    requests = torch.randperm(4)[:B]
    keys, values = torch.randn(2, 4, ROOM, Hk, D)
    for r, b in zip(requests.tolist(), before, strict=True):
        slots = pool.req_to_token[r, :b].long()
        pool.keys[slots], pool.values[slots] = keys[r, :b], values[r, :b]
    masks = [torch.cat((torch.ones(drafts, b, dtype=torch.bool), sees), dim=1) for b in before]
    spec = SimpleNamespace(custom_mask=torch.cat([mask.flatten() for mask in masks]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_SPECULATION, "speculative_num_draft_tokens", drafts)
        patch.setattr(_SPECULATION, "speculative_eagle_topk", 2 if is_tree else 1)
        backend = backend_module.Flash4Backend(runner(pool, page_size))
    step = batch("verify", pool, requests, before, [drafts] * B, spec_info=spec)
    if data.draw(st.booleans()):
        backend.init_cuda_graph_state(4, 4 * drafts)
        backend.init_forward_metadata_out_graph(step)
    else:
        backend.init_forward_metadata(step)
    q = torch.randn(B * drafts, Hq, D)
    pairs = list(zip(requests.tolist(), before, strict=True))
    k, v = (torch.cat([x[r, b : b + drafts] for r, b in pairs]) for x in (keys, values))
    sinks = torch.randn(Hq)
    out = backend.forward_extend(q.flatten(1), k, v, layer(), step, sinks=sinks).view(B, drafts, Hq, D)
    for i, (r, b) in enumerate(pairs):
        mine = slice(i * drafts, (i + 1) * drafts)
        wanted = exact(q[mine], keys[r, : b + drafts], values[r, : b + drafts], masks[i], 0.0, sinks)
        torch.testing.assert_close(out[i], wanted.to(out.dtype), atol=1e-5, rtol=1e-4)


class _Attention(torch.nn.Module):
    """A module of a model, with sinks and a layer."""

    def __init__(self, of: Any, sinks: Tensor | None):
        super().__init__()
        self.attn, self.sinks = _Radix(), sinks
        vars(self.attn).update(vars(of))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_80"])
@settings(max_examples=examples(8, 100))
@given(
    lengths(),
    st.sampled_from((1, 16)),
    st.sampled_from(("extend", "decode", "graph", "verify")),
    st.sampled_from((-1, 7)),
    st.sampled_from((0.0, 5.0)),
    st.booleans(),
)
def test_a_backend_knows_the_kernels_of_steps(
    backend_module: ModuleType,
    arch: str,
    sizes: tuple[list[int], list[int]],
    page_size: int,
    how: str,
    window: int,
    cap: float,
    with_sinks: bool,
) -> None:
    """What it prepares for the model before the first step is all that a step looks for."""
    before, new = sizes
    drafts = 3 if how == "verify" else None
    new = new if how == "extend" else [drafts or 1] * len(before)
    pool, T, dtype = Pool(page_size, 5), sum(new), torch.bfloat16
    pool.keys, pool.values = pool.keys.to(dtype), pool.values.to(dtype)
    sinks = torch.randn(Hq) if with_sinks else None
    own = layer(window, cap)
    changes = {"model": torch.nn.Sequential(_Attention(own, sinks)), "dtype": dtype, "kv_cache_dtype": dtype}
    requests = torch.randperm(5)[: len(before)]
    masks = [torch.ones(drafts or 0, b + (drafts or 0), dtype=torch.bool) for b in before]
    spec = SimpleNamespace(custom_mask=torch.cat([mask.flatten() for mask in masks]))
    mode = "decode" if how == "graph" else how
    step = batch(mode, pool, requests, before, new, spec_info=spec)
    with pytest.MonkeyPatch.context() as patch, gpu(TARGETS[arch]) as found:
        patch.setattr(_SPECULATION, "speculative_num_draft_tokens", drafts)
        patch.setattr(_SPECULATION, "speculative_eagle_topk", 2 if drafts else 1)
        server = runner(pool, page_size, **changes)
        backend = backend_module.Flash4Backend(server)
        described = list(backend._steps(server))
        known = ahead.kernels_of_steps(described, TARGETS[arch], NUM_SMS)
        if how == "graph":
            backend.init_cuda_graph_state(6, 6)
            backend.init_forward_metadata_out_graph(step, in_capture=True)
        else:
            backend.init_forward_metadata(step)
        q, k, v = (torch.zeros(T, H, D, dtype=dtype) for H in (Hq, Hk, Hk))
        backend.forward_extend(q.flatten(1), k, v, own, step, sinks=sinks)
        assert found.launches
        assert set(found.found) <= {(key.entry, key.static) for key in known}
        assert any(key.entry == MERGE_STATES for key in known) == (how == "verify")


@pytest.mark.parametrize(
    "changes",
    [
        {"use_mla_backend": True},
        {"is_draft_worker": True},
        {"kv_cache_dtype": torch.float8_e5m2},
        {"kv_index_translator": SimpleNamespace(is_translating=True)},
    ],
    ids=str,
)
def test_refusals(backend_module: ModuleType, changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="flash4"):
        backend_module.Flash4Backend(runner(Pool(1, 1), 1, **changes))


def test_registration_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's lists of names, and its registry, get ours once."""
    from flash4_torch.integrations import sglang

    choices, registry = ModuleType("choices"), {}
    lists = {
        "ATTENTION_BACKEND_CHOICES": "add_attention_backend_choices",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": "add_deterministic_attention_backend_choices",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": (
            "add_radix_supported_deterministic_attention_backend_choices"
        ),
    }
    for name, add in lists.items():
        vars(choices)[name] = ["fa3"]
        vars(choices)[add] = vars(choices)[name].extend
    groups = ModuleType("sglang.srt.arg_groups")
    groups.choices = choices
    attention = ModuleType("sglang.srt.layers.attention.attention_registry")
    attention.register_attention_backend = lambda name: lambda make: registry.setdefault(name, make)
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, groups.__name__, groups)
    monkeypatch.setitem(sys.modules, attention.__name__, attention)
    sglang.register()
    sglang.register()
    assert [vars(choices)[name] for name in lists] == [["fa3", "flash4"]] * 3
    assert list(registry) == ["flash4"]
