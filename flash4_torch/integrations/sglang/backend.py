"""The backend as SGLang calls it: a step's metadata, and one layer's attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_spec
from torch import Tensor

from ...errors import ArgumentError
from ...kvcache import attention_kvcache, merge_states, steps
from .. import ahead_of_steps
from .step import Keys, Queries, Step, page_table, tree

FLOAT8 = torch.float8_e4m3fn


class Flash4Backend(AttentionBackend):
    """flash4_torch as an attention backend of SGLang."""

    def __init__(self, model_runner: Any):
        """Takes the runner's pools and limits.

        Raises:
            ArgumentError: the model or the server's options ask for what is not served.
        """
        super().__init__()
        self.forward_metadata: Step | None = None
        self.device = model_runner.device
        self.page_size: int = model_runner.page_size
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = min(model_runner.model_config.context_len, self.req_to_token.shape[1])
        self.batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self.num_drafts = int(get_spec().speculative_num_draft_tokens or 0)
        self.has_tree = int(get_spec().speculative_eagle_topk or 0) > 1
        pool = self.token_to_kv_pool
        self._has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self._window = model_runner.sliding_window_size
        self._refuse(model_runner)
        self._graph_tables: list[Tensor] = []
        self._starts: dict[int, Tensor] = {}
        """Beginnings of sequences of so many tokens, for graphs to read."""
        ahead_of_steps.prepare(self._steps(model_runner), torch.device(self.device))

    def _steps(self, runner: Any) -> Iterator[Any]:
        """Calls that the model's layers make in steps, as large as they become."""
        for module in runner.model.modules():
            for layer in module.children():
                if isinstance(layer, RadixAttention):
                    yield from self._steps_of(layer, runner, getattr(module, "sinks", None))

    def _steps_of(self, layer: Any, runner: Any, sinks: Tensor | None) -> Iterator[Any]:
        def empty(*shape: int, of: torch.dtype = runner.dtype) -> Tensor:
            return torch.empty(shape, dtype=of, device=self.device)

        q = empty(1, layer.tp_q_head_num, layer.qk_head_dim)
        caches = (
            empty(2, self.page_size, heads, columns, of=runner.kv_cache_dtype)
            for heads, columns in (
                (layer.tp_k_head_num, layer.qk_head_dim),
                (layer.tp_v_head_num, layer.v_head_dim),
            )
        )
        k_cache, v_cache = caches
        where: dict[str, Any] = {
            "seqused_k": empty(1, of=torch.int32),
            "block_table": empty(1, 1, of=torch.int32),
            "cu_seqlens_q": empty(2, of=torch.int32),
        }
        requests, room = self.req_to_token.shape[0], self.max_context_len
        most = {"most_sequences": requests, "most_tokens": room, "most_keys": room}
        options = self._options(layer, k_cache.dtype)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        yield steps.attend(q, k_cache, v_cache, **most, **where, causal=causal, sinks=sinks, **options)
        if self.has_tree:
            before = most | {"most_tokens": self.num_drafts}
            yield steps.attend(q, k_cache, v_cache, **before, **where, sinks=sinks, **options)
            k_rows, v_rows = (x.flatten(0, 1).unsqueeze(1) for x in (k_cache, v_cache))
            rows = requests * self.num_drafts
            among = {"most_sequences": rows, "most_tokens": 1, "most_keys": self.num_drafts}
            yield steps.attend(q, k_rows, v_rows, **among, **where, **options)
            out = empty(1, 1, 1, layer.tp_q_head_num, layer.v_head_dim)
            yield out, out

    def _refuse(self, runner: Any) -> None:
        config = runner.model_config
        translates = runner.kv_index_translator is not None and runner.kv_index_translator.is_translating
        windowed = self._window is not None and self._window > -1
        for name, value, is_wrong in (
            ("use_mla_backend", True, runner.use_mla_backend),
            ("is_encoder_decoder", True, config.is_encoder_decoder),
            ("is_local_attention_model", True, config.is_local_attention_model),
            ("is_draft_worker", True, runner.is_draft_worker),
            ("enable_unified_memory", True, translates),
            (
                "speculative_eagle_topk above 1 with sliding_window_size",
                self._window,
                self.has_tree and windowed,
            ),
        ):
            if is_wrong:
                raise ArgumentError(name, value, "flash4 does not serve that; choose another backend")
        if runner.kv_cache_dtype not in (torch.bfloat16, torch.float16, torch.float32, FLOAT8):
            limit = "flash4 serves caches in the model's dtype and in float8_e4m3fn"
            raise ArgumentError("kv_cache_dtype", runner.kv_cache_dtype, limit)

    # Metadata of a step.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describes an eager step. Tables are as wide as the longest sequence."""
        self.forward_metadata = self._describe(forward_batch, self._longest(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates what captured graphs read: lengths and tables for up to max_bs requests."""
        pages = -(-self.max_context_len // self.page_size)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        self._graph_tables = [integers(max_bs), integers(max_bs, pages)]
        if self._has_window_pool:
            self._graph_tables.append(integers(max_bs, pages))
        if self.has_tree:
            drafts = max_bs * self.num_drafts
            self._graph_tables += [integers(drafts), integers(drafts, self.num_drafts)]
        for tokens in {1, self.num_drafts or 1}:
            self._starts[tokens] = self._uniform(max_bs, tokens).cu_seqlens_q

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Describes a step of a captured graph, in tensors that stay where they are."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            self.init_forward_metadata(forward_batch)
            return
        now = self._describe(forward_batch, self._longest(forward_batch))
        queries = now.queries._replace(
            cu_seqlens_q=self._starts[now.queries.max_seqlen_q][: forward_batch.batch_size + 1]
        )
        buffers = iter(self._graph_tables)
        keys = Keys(_into(next(buffers), now.keys.seqused_k), _into(next(buffers), now.keys.table), 0)
        window_table = None if now.window_table is None else _into(next(buffers), now.window_table)
        drafts = None
        if self.has_tree:
            # A graph of decoding leaves the drafts' tensors to those of verification.
            seqused_k, table = next(buffers), next(buffers)
            if now.drafts is not None:
                drafts = Keys(
                    _into(seqused_k, now.drafts.seqused_k), _into(table, now.drafts.table), self.num_drafts
                )
        keys = keys._replace(max_seqlen_k=self.max_context_len)
        self.forward_metadata = Step(queries, keys, window_table, drafts)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _longest(self, forward_batch: Any) -> int:
        """A bound on keys: exact where the host knows lengths, else what there is room for."""
        lengths = forward_batch.seq_lens_cpu
        if lengths is None or not lengths.numel():
            return self.max_context_len
        drafts = self.num_drafts if forward_batch.forward_mode.is_target_verify() else 0
        return min(int(lengths.max()) + drafts, self.max_context_len)

    def _describe(self, batch: Any, longest: int) -> Step:
        mode, B = batch.forward_mode, batch.batch_size
        seqused_k = batch.seq_lens[:B].to(torch.int32)
        requests = batch.req_pool_indices[:B].long()
        drafts = None
        if mode.is_decode_or_idle():
            queries = self._uniform(B, 1)
        elif mode.is_target_verify():
            queries = self._uniform(B, self.num_drafts)
            if self.has_tree:
                mask = batch.spec_info.custom_mask
                drafts = tree(self.req_to_token, requests, seqused_k, mask, self.num_drafts)
            else:
                seqused_k = seqused_k + self.num_drafts
        else:
            lengths = batch.extend_seq_lens[:B]
            cu_seqlens_q = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            known = batch.extend_seq_lens_cpu
            queries = Queries(cu_seqlens_q, int(max(known)) if known else self.max_context_len)
        pages = -(-longest // self.page_size)
        table = page_table(self.req_to_token, requests, pages, self.page_size)
        window_table = None
        if self._has_window_pool:
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(table.long() * self.page_size)
            window_table = (slots // self.page_size).to(torch.int32)
        return Step(queries, Keys(seqused_k, table, longest), window_table, drafts)

    def _uniform(self, B: int, tokens: int) -> Queries:
        starts = torch.arange(B + 1, dtype=torch.int32, device=self.device) * tokens
        return Queries(starts, tokens)

    # A layer.

    def forward_decode(self, *args: Any, **more: Any) -> Tensor:
        """One token of each request; arguments as in `forward_extend`."""
        return self.forward_extend(*args, **more)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Attention of q (T, Hq * D) over the layer's cache, into which k and v go first: (T, Hq * Dv)."""
        for name, value in unknown.items():
            if value is not None:
                raise ArgumentError(name, type(value).__name__, "flash4 does not take it")
        step = self.forward_metadata
        if step is None:
            raise ArgumentError("forward_metadata", None, "init_forward_metadata comes before a layer")
        if k is not None and v is not None and save_kv_cache:
            self._save(layer, forward_batch, k, v)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        pool, D, Dv = self.token_to_kv_pool, layer.qk_head_dim, layer.v_head_dim
        k_cache = self._pages(pool.get_key_buffer(layer.layer_id), layer.tp_k_head_num, D)
        v_cache = self._pages(pool.get_value_buffer(layer.layer_id), layer.tp_v_head_num, Dv)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        options = self._options(layer, k_cache.dtype)
        keys = step.keys
        if _has_window(layer) and step.window_table is not None:
            keys = keys._replace(table=step.window_table)
        if step.drafts is None:
            out = _attend(q, k_cache, v_cache, step.queries, keys, causal=causal, sinks=sinks, **options)
        else:
            out = self._verify(q, k_cache, v_cache, step, step.drafts, sinks, options)
        return out.flatten(1)

    def _options(self, layer: Any, cache_dtype: torch.dtype) -> dict[str, Any]:
        """Options of all of a layer's calls."""
        # SGLang does not count the token itself.
        side = layer.sliding_window_size if _has_window(layer) else None
        options: dict[str, Any] = {
            "window": (side, side),
            "scale": layer.scaling,
            "softcap": layer.logit_cap or 0.0,
            "batch_invariant": self.batch_invariant,
        }
        if cache_dtype == FLOAT8:
            options |= {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        return options

    def _verify(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: Step,
        drafts: Keys,
        sinks: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attention of a tree of drafts: over the keys before it, and over the drafts that each one sees."""
        options = options | {"causal": False, "return_lse": True}
        before = _attend(q, k_cache, v_cache, step.queries, step.keys, sinks=sinks, **options)
        one_by_one = self._uniform(q.shape[0], 1)
        k_rows, v_rows = (x.flatten(0, 1).unsqueeze(1) for x in (k_cache, v_cache))
        among = _attend(q, k_rows, v_rows, one_by_one, drafts, **options)
        return merge_states((before[0], among[0]), (before[1], among[1]))[0]

    def _save(self, layer: Any, batch: Any, k: Tensor, v: Tensor) -> None:
        window_slots = None
        if self._has_window_pool:
            window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        where = KVWriteLoc.for_layer(batch, layer, swa_loc=window_slots)
        self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)

    def _pages(self, buffer: Tensor, heads: int, columns: int) -> Tensor:
        """The pool's (slots, Hk, D), or (pages, Hk, page_size, D), as (pages, page_size, Hk, D)."""
        if buffer.dim() == 4:
            return buffer.transpose(1, 2)
        return buffer.view(-1, self.page_size, heads, columns)


def _has_window(layer: Any) -> bool:
    return layer.sliding_window_size is not None and layer.sliding_window_size > -1


def _into(buffer: Tensor, values: Tensor) -> Tensor:
    """The buffer's rows for the values, with the values in their first columns."""
    rows = buffer[: values.shape[0]]
    rows[tuple(slice(n) for n in values.shape)].copy_(values)
    return rows


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: Queries, keys: Keys, **options: Any) -> Any:
    return attention_kvcache(
        q,
        k_cache,
        v_cache,
        seqused_k=keys.seqused_k,
        block_table=keys.table,
        cu_seqlens_q=queries.cu_seqlens_q,
        max_seqlen_q=queries.max_seqlen_q,
        max_seqlen_k=keys.max_seqlen_k,
        **options,
    )
