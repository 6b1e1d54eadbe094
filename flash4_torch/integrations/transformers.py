"""Our attention in Hugging Face models, through the `AttentionInterface` of transformers 5::

    flash4_torch.integrations.transformers.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fa4")
    model.set_attn_implementation("fa4")
    model.generate_batch(prompts)         # continuous batching: see `transformers_serving`

Nothing is registered on import, and only importing this module imports transformers. The name is not "flash4"
because transformers takes every name that contains "flash" for a kernel to download.

Two functions are registered: the attention, and the mask that goes with it. Where transformers would
materialise a causal or sliding pattern as a (B, 1, Sq, Sk) mask, our mask function returns a `BandMask`,
which holds the window and one row of padding per batch entry.

A model that computes attention itself would misread such a mask, or its absence. `register` therefore adds
our check to transformers' own of whether a model may have the name: when the model is built, and when its
implementation is set. Such a model is refused with an ArgumentError (see `transformers_models`). Cases that
this check misses, such as a name written into the configuration of an existing model, are refused where the
mask is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import _active_collector

from .. import fast_path, ops
from ..api import attention_varlen
from ..backends import Order
from ..errors import ArgumentError, ShapeError
from ..fast_path import Door, Returned
from ..masks import Band
from ..ops import check
from ..problem import CallOptions, Inputs
from . import transformers_serving
from .transformers_models import Service, judge_class, judge_model, model_classes

NAME = "fa4"

MaskFunction = Callable[[Any, Any, Any, Any], Any]
Window = tuple[int | None, int | None]

_TAKEN = ("flash", "sdpa", "flex_attention", "eager", "paged|", "/")
"""Substrings that a name may not contain, because transformers gives them a meaning of their own."""

_UNSUPPORTED = {
    "cache": "a paged cache",
    "block_table": "a paged cache",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "head_mask": "masked heads",
}


_DOOR = Door("transformers", Order(heads_first=True))

_names: set[str] = set()
"""Registered names."""

_judged: dict[type, bool] = {}
"""Whether masks may be None for the models of a configuration class that may have our attention."""


def register(name: str = NAME) -> str:
    """Registers `name` as an `attn_implementation`, and returns it.

    From then on a model that would not call our attention, or would misread our masks, raises an
    ArgumentError when it is built with that name (from_pretrained, from_config, the class itself) and when
    the name is set.

    Raises:
        ArgumentError: `name` has another meaning in transformers.
    """
    for part in _TAKEN:
        if part in name:
            raise ArgumentError("name", repr(name), f"transformers gives names with {part!r} another meaning")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)
    if not _names:
        transformers_serving.install(_names)
        PreTrainedModel.get_correct_attn_implementation = _asking_us(  # type: ignore[method-assign]
            PreTrainedModel.get_correct_attn_implementation
        )
        PreTrainedModel.post_init = _asking_us_last(  # type: ignore[method-assign]
            PreTrainedModel.post_init
        )
        PreTrainedModel.set_attn_implementation = _asking_us_first(  # type: ignore[method-assign]
            PreTrainedModel.set_attn_implementation
        )
    _names.add(name)
    return name


def names() -> frozenset[str]:
    """The names under which our attention is registered."""
    return frozenset(_names)


def _asking_us(decide: Callable[..., str]) -> Callable[..., str]:
    """Wraps transformers' check of one model's implementation, and adds ours after it."""

    @wraps(decide)
    def get_correct_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
        name = decide(self, *args, **kwargs)
        if name in _names:
            _judge(type(self), self.config, name)
        return name

    return get_correct_attn_implementation


def _asking_us_last(finish: Callable[..., None]) -> Callable[..., None]:
    """Wraps the end of a model's construction, where its modules can be examined."""

    @wraps(finish)
    def post_init(self: PreTrainedModel) -> None:
        if (name := self.config._attn_implementation) in _names:
            judge_model(self, name)
        finish(self)

    return post_init


def _asking_us_first(change: Callable[..., None]) -> Callable[..., None]:
    """Wraps transformers' change of a whole model's implementation; every part is judged before it.

    transformers itself looks at one model per configuration, and skips, with only a log line, those in which
    it finds no attention function.
    """

    @wraps(change)
    def set_attn_implementation(
        self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any
    ) -> None:
        wanted = {id(config): name for config, name in _requested(self.config, attn_implementation)}
        for part in self.modules():
            if isinstance(part, PreTrainedModel):
                name = wanted.get(id(part.config), wanted[id(self.config)])
                if name in _names:
                    _judge(type(part), part.config, name)
                    judge_model(part, name)
        change(self, attn_implementation, *args, **kwargs)

    return set_attn_implementation


def _requested(config: Any, request: Any) -> Iterator[tuple[Any, Any]]:
    """Each configuration inside `config`, and the name that the request (a name or a dict) gives it."""
    nested = isinstance(request, dict)
    yield config, request.get("", config._attn_implementation) if nested else request
    for key in config.sub_configs:
        if (part := getattr(config, key, None)) is not None:
            yield from _requested(part, request.get(key, part._attn_implementation) if nested else request)


def _judge(model_class: type, config: Any, name: str) -> Service:
    service = judge_class(model_class, name)
    if service.calls_us:
        _judged[type(config)] = service.reads_none and _judged.get(type(config), True)
    return service


def _judge_late(config: Any) -> None:
    """Judges a configuration whose model was never checked: some model class of it must call us."""
    refusal = None
    for model_class in model_classes(type(config)):
        try:
            if _judge(model_class, config, config._attn_implementation).calls_us:
                return
        except ArgumentError as error:
            refusal = error
    if refusal is not None:
        raise refusal
    _judged[type(config)] = True


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that attention layers call: (B, Sq, Hq, Dv) and, with `output_attentions`, the weights.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv), Hq a multiple of Hk; read in place.
    attention_mask: 4-D, broadcastable to (B, Hq, Sq, Sk), bool (True attends) or floating (added). It alone
        decides who sees whom. Without a mask, `is_causal` (default: the module's) masks later positions, and
        `sliding_window` n masks those n or more away; a single query is aligned to the last key, several
        begin at the first.
    position_bias: broadcastable to (B, Hq, Sq, Sk), floating, added to the scores; differentiable.
    s_aux: (Hq,), attention sinks; differentiable.
    output_attentions: also return the weights after dropout, (B, Hq, Sq, Sk). A model that is asked for them
        gets them even if its layers do not pass this argument on.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: without a mask, B = 1 holds packed sequences.

    Raises:
        ArgumentError: an argument that is not supported (paged caches, sparse indices), by name.
    """
    _refuse_unsupported(kwargs)
    sinks = kwargs.get("sinks") if s_aux is None else s_aux
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if (attend := getattr(module, "flash4_context_parallel", None)) is not None:
        _refuse_of_ranks(position_bias, output_attentions)
        band = _band_of_ranks(attention_mask, causal, sliding_window)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return _over_ranks(attend, q, k, v, band, scaling, softcap, sinks, dropout, kwargs), None
    check.not_in_torchs_context_parallel("query")
    signature = None
    if position_bias is None and not (output_attentions or kwargs.get("cu_seq_lens_q") is not None):
        mask, masking = _plain_mask(attention_mask)
        flags = (dropout, scaling, causal, sliding_window, softcap, *masking)
        if not _attentions_are_recorded():
            signature, call = fast_path.lookup(_DOOR, query, key, value, (mask, sinks), flags)
            if call is not None:
                return call.run(query, key, value, mask, sinks), None
    q, k, v = ops.autocast_inputs(*(x.transpose(1, 2) for x in (query, key, value)))
    if attention_mask is None and kwargs.get("cu_seq_lens_q") is not None:
        return _packed(q, k, v, causal, sliding_window, scaling, softcap, sinks, dropout, kwargs), None
    check.qkv(q, k, v, 4, "(B, S, H, D)")
    if q.shape[0] == 1:
        # Models with learned queries have one batch entry of queries for all.
        q = q.expand(k.shape[0], -1, -1, -1)
    check.same_batch(q, k)
    check.sinks(sinks, q)
    mask, band = _mask_and_band(attention_mask, q.shape[1], k.shape[1], causal, sliding_window)
    if position_bias is not None:
        mask = _biased(position_bias, mask)
    mask = check.attn_mask(mask, q, k)
    options = CallOptions(
        scale=check.scale(scaling, q.shape[3]),
        window_left=band.left,
        window_right=band.right,
        softcap=check.softcap(softcap or 0.0),
        dropout_p=check.probability(dropout),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    rng_state = ops.draw_rng_state(q.device) if dropout > 0.0 else None
    scored_by = mask, sinks, rng_state
    if output_attentions or _attentions_are_recorded():
        out, _, weights = ops.attention_and_weights(q, k, v, *scored_by, options, False)
        return out, weights
    out, _ = ops.attention(q, k, v, *scored_by, options)
    if q.shape[0] == query.shape[0]:
        inputs = Inputs(q, k, v, mask, sinks)
        fast_path.record(signature, _DOOR, inputs, options, returned=Returned(lse=False))
    return out, None


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward pass, the smallest correct one: None, `BandMask`, or (B, 1, Sq, Sk) bool.

    Query i is at position q_offset + i (q_offset: an int, or a 0-dim tensor), key j at kv_offset + j, and
    `mask_function(b, h, i, j)` tells whether position i sees position j. attention_mask is the padding,
    (B, positions) bool, True for tokens; positions beyond it are padding. None is returned only if the caller
    allows it and `attention_forward` gives it the same meaning.

    Raises:
        ArgumentError: no model with the `config` of this call would read the mask correctly.
    """
    if (config := kwargs.get("config")) is not None:
        if type(config) not in _judged and not torch.compiler.is_compiling():
            _judge_late(config)
        may_be_none = _judged.get(type(config), True)
        allow_is_causal_skip = allow_is_causal_skip and may_be_none
        allow_is_bidirectional_skip = allow_is_bidirectional_skip and may_be_none
    window = None if is_tracing(attention_mask) else _window_of(mask_function, local_size)
    # A static cache keeps q_offset on the device: a mask of one row is not worth a wait for it.
    decoding = q_length == 1 and isinstance(q_offset, Tensor)
    if window is None or decoding:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip and not decoding,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **kwargs,
        )
    band = _band(window, int(q_offset) - kv_offset, q_length, kv_length)
    tokens = _tokens(attention_mask, kv_offset, kv_length)
    if tokens is not None and bool(tokens[:, : kv_length + min(band.right or 0, 0)].all()):
        # The only padding is in keys that no query sees, such as the unused end of a static cache.
        tokens = None
    causal_is_enough = allow_is_causal_skip and band == _unmasked_band(q_length, kv_length, True, None)
    nothing_to_hide = allow_is_bidirectional_skip and band.is_full
    if tokens is None and (causal_is_enough or nothing_to_hide):
        return None
    if tokens is None:
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        return BandMask(everything.expand(batch_size, 1, 1, kv_length), False, band, q_length)
    return BandMask(tokens[:, None, None], True, band, q_length)


class BandMask(Tensor):
    """A (B, 1, Sq, Sk) bool mask kept as a band and one row of padding.

    `attention_forward` reads the two; any other operation materialises the whole mask.
    """

    keys: Tensor
    padded: bool
    band: Band

    @staticmethod
    def __new__(cls, keys: Tensor, padded: bool, band: Band, q_length: int) -> BandMask:
        """Wraps `keys` (B, 1, 1, Sk), True for tokens, all True unless `padded`."""
        B, _, _, Sk = keys.shape
        self = Tensor._make_wrapper_subclass(cls, (B, 1, q_length, Sk), dtype=torch.bool, device=keys.device)
        self.keys, self.padded, self.band = keys, padded, band
        return self

    def whole(self) -> Tensor:
        """The whole mask, (B, 1, Sq, Sk), contiguous."""
        B, _, Sq, Sk = self.shape
        # Computed from `keys`, so that tracing, which has fake keys, gets fake positions.
        rows, columns = (self.keys.new_ones(S, dtype=torch.int64).cumsum(0) - 1 for S in (Sq, Sk))
        return (
            (self.keys & self.band.visible(rows[:, None], columns, Sq, Sk)).expand(B, 1, Sq, Sk).contiguous()
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            _refuse_to_be_added(args)
        args, kwargs = tree_map_only(BandMask, BandMask.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[bool, Band]]:
        return ["keys"], (self.padded, self.band)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[bool, Band], outer_size: Any, outer_stride: Any
    ) -> BandMask:
        return BandMask(inner["keys"], *context, outer_size[2])

    def _stable_hash_for_caching(self) -> str:
        """The mask's key in torch.compile's cache, whose own default fails for dynamic shapes."""
        keys = self.keys
        sizes = f"{tuple(self.shape)} {tuple(keys.shape)} {keys.stride()}"
        return f"BandMask {sizes} {keys.device} {self.padded} {tuple(self.band)}"


def _attentions_are_recorded() -> bool:
    """Whether a model around this layer collects the weights that its layers return."""
    # In compiled code transformers uses a global instead of the context variable, which cannot be traced.
    compiling = torch.compiler.is_compiling()
    collected = _active_collector.global_var if compiling else _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def _refuse_to_be_added(terms: tuple[Any, ...]) -> None:
    """Refuses to add the mask to scores: a model that does so expects numbers, and bools would be 0 and 1."""
    if any(isinstance(x, Tensor) and x.is_floating_point() for x in terms):
        raise ArgumentError(
            "attn_implementation",
            repr(NAME),
            "this model adds its attention mask to scores that it computes itself, and the mask is made of "
            'bools: use attn_implementation="eager"',
        )


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            kind = type(kwargs[name]).__name__
            raise ArgumentError(
                name, f"a {kind}", f"{NAME} does not serve {what}: use another attn_implementation"
            )


def _mask_and_band(
    attention_mask: Tensor | None, Sq: int, Sk: int, causal: bool, sliding_window: int | None
) -> tuple[Tensor | None, Band]:
    """attention_mask split into the part that stays a mask and the band."""
    if attention_mask is None:
        return None, _unmasked_band(Sq, Sk, causal, sliding_window)
    if isinstance(attention_mask, BandMask) and not torch.compiler.is_compiling():
        return attention_mask.keys if attention_mask.padded else None, attention_mask.band
    if attention_mask.dim() != 4:
        raise ShapeError("attention_mask", tuple(attention_mask.shape), "it must have 4 dimensions")
    return attention_mask, Band()


def _plain_mask(attention_mask: Tensor | None) -> tuple[Tensor | None, tuple[Any, ...]]:
    """The tensor of a mask, and what else it consists of."""
    if type(attention_mask) is BandMask:
        return attention_mask.keys if attention_mask.padded else None, ("band", *attention_mask.band)
    return attention_mask, ()


def _unmasked_band(Sq: int, Sk: int, causal: bool, sliding_window: int | None) -> Band:
    """The band of a layer that passes no mask: see `attention_forward`."""
    first_row_at = Sk - 1 if Sq == 1 else 0
    reach = None if sliding_window is None else sliding_window - 1
    return _band((reach, 0 if causal else reach), first_row_at, Sq, Sk)


def _band(window: Window, first_row_at: int, Sq: int, Sk: int) -> Band:
    """The band of a window around each query's own position, with query 0 at key `first_row_at`.

    Bounds that mask nothing are dropped: backends serve an unbounded side faster.
    """
    shift = first_row_at - (Sk - Sq)
    left, right = window
    left = None if left is None or left - shift >= Sk - 1 else left - shift
    right = None if right is None or right + shift >= Sq - 1 else right + shift
    return Band(left, right)


def _biased(position_bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, -torch.inf)
    return position_bias + mask


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    sliding_window: int | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention over sequences packed one after another in the only batch entry, (1, T, H, D)."""
    if q.shape[0] != 1:
        raise ShapeError(
            "query", tuple(q.shape), "with cu_seq_lens_q all sequences are packed in one batch entry"
        )
    reach = None if sliding_window is None else sliding_window - 1
    out = attention_varlen(
        q[0],
        k[0],
        v[0],
        cu_seqlens_q=kwargs["cu_seq_lens_q"],
        cu_seqlens_k=kwargs["cu_seq_lens_k"],
        max_seqlen_q=kwargs["max_length_q"],
        max_seqlen_k=kwargs["max_length_k"],
        causal=causal,
        window=(reach, 0 if causal else reach),
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=sinks,
        dropout_p=dropout,
    )
    return out[None]


def _refuse_of_ranks(position_bias: Tensor | None, output_attentions: bool) -> None:
    limit = "where ranks share sequences it must be {}"
    if position_bias is not None:
        raise ArgumentError("position_bias", "a tensor", limit.format(None))
    if output_attentions or _attentions_are_recorded():
        raise ArgumentError("output_attentions", True, limit.format(False))


def _band_of_ranks(attention_mask: Tensor | None, causal: bool, sliding_window: int | None) -> Window:
    """The window in whole sequences, which ranks share; a mask speaks of this rank's tokens alone."""
    if attention_mask is not None:
        if not isinstance(attention_mask, BandMask) or attention_mask.padded:
            limit = (
                "where ranks share sequences it must be causal or None, without padding: give the model "
                "attention_mask=torch.ones_like(input_ids), and pad at the end of causal sequences"
            )
            raise ArgumentError("attention_mask", f"a {type(attention_mask).__name__}", limit)
        causal = attention_mask.band.right == 0
        if attention_mask.band.left is not None and sliding_window is None:
            limit = "where ranks share sequences its layer must also pass it as sliding_window"
            raise ArgumentError("attention_mask", f"a window of {attention_mask.band.left}", limit)
    reach = None if sliding_window is None else sliding_window - 1
    return reach, 0 if causal else reach


def _over_ranks(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention to the tokens of all ranks; cu_seq_lens_q says where documents of the whole sequence end."""
    options: dict[str, Any] = {
        "window": window,
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": sinks,
        "dropout_p": dropout,
    }
    if window[1] == 0 and q.shape[1] != k.shape[1]:
        limit = "where ranks share sequences causal layers need equally many queries: use_cache=False"
        raise ShapeError("key", tuple(k.shape), limit)
    if (cu_seqlens := kwargs.get("cu_seq_lens_q")) is None:
        return attend(q, k, v, **options)
    if q.shape[0] != 1:
        limit = "with cu_seq_lens_q all sequences are packed in one batch entry"
        raise ShapeError("query", tuple(q.shape), limit)
    return attend(q[0], k[0], v[0], cu_seqlens=cu_seqlens, **options)[None]


def _tokens(attention_mask: Tensor | None, kv_offset: int, kv_length: int) -> Tensor | None:
    """The padding mask of this call's keys, (B, Sk)."""
    if attention_mask is None:
        return None
    missing = max(0, kv_offset + kv_length - attention_mask.shape[1])
    return torch.nn.functional.pad(attention_mask, (0, missing))[:, kv_offset : kv_offset + kv_length]


def _window_of(mask_function: MaskFunction, local_size: int | None) -> Window | None:
    """The window that `mask_function` describes, if it is one of transformers' plain functions."""
    known: list[tuple[MaskFunction, Window]] = [
        (causal_mask_function, (None, 0)),
        (bidirectional_mask_function, (None, None)),
    ]
    if local_size is not None:
        known += [
            (sliding_window_causal_mask_function(local_size), (local_size - 1, 0)),
            (sliding_window_bidirectional_mask_function(local_size), (local_size, local_size)),
        ]
    return next((window for f, window in known if _same(f, mask_function)), None)


def _same(a: Any, b: Any) -> bool:
    """Whether two functions are certainly equal: the same code with the same captured values."""
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return a.__code__ is b.__code__ and _same(_captured(a), _captured(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, int) and isinstance(b, int) and a == b


def _captured(f: FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in f.__closure__ or ())
