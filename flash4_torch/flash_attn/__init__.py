"""flash-attn's functions, served by ours: a program changes its imports.

    from flash4_torch.flash_attn import flash_attn_func                      # before: from flash_attn
    from flash4_torch.flash_attn.bert_padding import unpad_input, pad_input  # before: flash_attn.bert_padding

Names, order, defaults and results are flash-attn 2.8's. Arguments that only flash-attn 3 or FlashAttention-4
(flash_attn.cute) has are keywords. Both have another order after v: give those arguments by name. Any device,
dtype and head size that `attention` takes will do. What differs:

- window_size: -1 is no bound, as in flash-attn 2 and 3, and so is None, as in FlashAttention-4. Sizes that
  these read differently are an error: those below -1, and -1 beside None. `attention` takes negative bounds.
- return_attn_probs=True returns (out, softmax_lse, S_dmask), as 2.8 does; without dropout S_dmask is empty
  there, too. With dropout it would hold all weights: that is an error. flash-attn 3 returns no S_dmask.
- return_lse=True returns (out, lse), as FlashAttention-4 does, which returns a pair without it, too.
- lse is differentiable, and -inf for a row that sees no key, where flash-attn 2 has +inf.
- alibi_slopes takes the memory of a mask: (B or 1, Hq, 1, Sk) numbers if causal, else (B or 1, Hq, Sq, Sk).
  Packed sequences have no mask, so there it is an error.
- max_seqlen_q and max_seqlen_k may be left out, as in FlashAttention-4; `attention_varlen` says at what cost.
- deterministic=False leaves the choice to torch.are_deterministic_algorithms_enabled().
- Dropout follows torch.manual_seed, but drops other weights than flash-attn does.
- pack_gqa, sm_margin, min_seqlen_k, seqlen_k_per_split, scheduler_metadata,
  disable_scheduler_metadata, and num_splits without a KV cache, are accepted and ignored.
- learnable_sink is served by flash_attn_func, flash_attn_varlen_func and flash_attn_with_kvcache; beside
  alibi_slopes it makes the mask (B or 1, Hq, Sq, Sk), causal or not.
- seqused_q, cache_leftpad, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
  block_sparse_tensors, block_sparse_tensors_bwd, qv, gather_kv_indices, attention_chunk and q_descale are
  not served: any value but the default is an error.

KV caches, in flash_attn_with_kvcache and, with block_table or seqused_k, in flash_attn_varlen_func:

- They serve inference: a gradient, dropout_p and alibi_slopes are errors.
- Caches are of q's dtype or float8_e4m3fn; k_descale and v_descale are (), (Hk,) or (B, Hk). q is never
  float8.
- Pages may have any size. page_table is block_table; learnable_sink, sinks and s_aux are one thing.
- num_splits=0 leaves the number to us. In flash_attn_varlen_func 1, FlashAttention-4's default, is 1 here,
  too.
- Lengths, tables and cu_seqlens are int32 on q's device, and no host waits for them. On a GPU a new key
  without a place is not stored, and lengths are clamped to the room there is; on a CPU these are errors.
"""

from .functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
