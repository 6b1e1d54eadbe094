"""Every architecture of the installed transformers, built small by general rules, with inputs made for it.

Nothing here knows an architecture by name: configurations are shrunk by what their fields are called, and
inputs are made by what the arguments of `forward` are called.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from flash4_torch.errors import ArgumentError

BATCH, LENGTH = 2, 9
VOCABULARY = 128
MOST_PARAMETERS = 6_000_000

# The first pattern that matches a field's whole name gives its value; later ones are more general.
SIZES: list[tuple[str, Any]] = [
    (r"(.*_)?vocab_size|vocab_size_.*|codebook_size|n_words|.*num_embeddings|num_codevectors.*", VOCABULARY),
    (r"decoder_start_token_id|bos_token_id|.*_bos_id", 1),
    (r"(.*_)?pad_token_id|pad_index|padding_idx", 0),
    (r"(.*_)?eos_token_id|.*_eos_id", VOCABULARY - 1),
    (r"cls_token_id|sep_token_id|mask_token_id|unk_token_id|unk_index|mask_index", 2),
    (r"type_vocab_size|num_languages|n_langs|num_labels", 2),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions|max_target_positions", 64),
    (
        r"max_2d_position_embeddings|original_max_position_embeddings|seq_length|max_length|max_sequence_length",
        64,
    ),
    (r"sliding_window|attention_chunk_size|local_attention|attention_window_size|window", 4),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|qk_head_dim|index_head_dim|rotary_dim", 8),
    (r"(.*_)?head_dim|head_size|d_kv|attention_head_size|(global|swa|linear)_.*head_dim", 8),
    (r".*num_key_value_heads|num_kv_heads|.*_kv_heads|multi_query_group_num|attention_groups", 2),
    (r"linear_num_.*_heads|mamba_n_heads|mamba_num_heads", 4),
    (r"(.*_)?(num_attention_heads|num_heads|n_heads?|attention_heads|nhead|num_query_heads)(_.*)?", 4),
    (r"mamba_(d_head|headdim|head_dim)", 16),
    (r"n_group|topk_group|n_groups|num_groups", 1),
    (r"(.*_)?(num_experts_per_tok|top_?k(_experts)?|moe_topk|moe_k|moe_top_k|num_selected_experts)", 2),
    (r"(.*_)?(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_expert)", 4),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|num_nextn_predict_layers|num_mtp_layers|.*_mtp_.*layers", 0),
    (
        r"(.*_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_blocks)(_.*)?",
        2,
    ),
    (r"(num_)?(encoder|decoder|vision|text|audio)_(hidden_)?(layers|blocks)", 2),
    (
        r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|inner_dim|dim_feedforward)(_.*)?",
        48,
    ),
    (r"(.*_)?(encoder|decoder)_ffn_dim|.*intermediate_dim|.*feed_forward_.*(size|dim)|hidden_dim", 48),
    (
        r"embedding_size|rotary_emb_base|(.*_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|model_dim)(_.*)?",
        32,
    ),
    (r"dim|.*projection_dim|.*proj_dim|.*_embedding_size|.*out_hidden_size|attention_hidden_size", 32),
    (r"(.*_)?(mel_bins|n_mels)|num_mel_bins", 16),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"num_channels|in_channels|in_chans", 3),
    (r"num_queries|num_query_tokens|num_image_tokens|.*n_latents|num_latents", 4),
    (r"num_frames", 2),
    (r"max_window_layers", 1),
    (r"prediction_length", 4),
    (r"context_length", 16),
]
DROPOUT = re.compile(r".*(dropout|drop_path|layerdrop|drop_rate|drop_prob|pdrop|_drop).*|dropout|layer_drop")
WIDTH = re.compile(r"hidden|embd|embed|model|dim|d_ff|d_kv|intermediate|inner|head_size|proj")
TOKENS = re.compile(r".*_token_(id|index)")
MADE_FROM_NOTHING = ("head_dim", "num_key_value_heads", "prediction_length")
KEPT_EMPTY = r".*_id|.*_ids|.*window.*|.*_config|.*lora_rank|.*norm.*|.*label.*|.*type.*"
DERIVED = ("out_features", "out_indices", "stage_names", "per_layer_config", "transformers_version")
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "rope_parameters")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "n_layers")


class NotBuilt(Exception):
    """An architecture that the rules here cannot build small, or cannot feed."""


def import_all() -> None:
    """Imports every modeling module, as far as what it needs is installed."""
    import transformers.models

    for package in pkgutil.iter_modules(transformers.models.__path__):
        root = f"transformers.models.{package.name}"
        with quietly(), contextlib.suppress(ImportError):
            for module in pkgutil.iter_modules(importlib.import_module(root).__path__):
                if module.name.startswith("modeling_"):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(f"{root}.{module.name}")


def model_classes() -> list[type]:
    """All loaded model classes that have a forward of their own, by name."""
    found, todo = set(), [PreTrainedModel]
    while todo:
        c = todo.pop()
        todo += c.__subclasses__()
        if c.__module__.startswith("transformers.models.") and c.forward is not nn.Module.forward:
            found.add(c)
    return sorted(
        (c for c in found if isinstance(c.config_class, type)), key=lambda c: (c.__module__, c.__name__)
    )


def architectures() -> dict[str, list[type]]:
    """The model classes by the name of their configuration class, those with the most around them first."""
    result: dict[str, list[type]] = {}
    for c in model_classes():
        result.setdefault(c.config_class.__name__, []).append(c)
    for classes in result.values():
        classes.sort(key=_rank)
    return dict(sorted(result.items()))


def architecture(name: str) -> list[type]:
    """The model classes of one configuration class; only the models of its package are imported."""
    package = getattr(hf, name).__module__.rpartition(".")[0]
    with quietly():
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if module.name.startswith("modeling_"):
                importlib.import_module(f"{package}.{module.name}")
    return architectures()[name]


def _rank(c: type) -> tuple[int, int, str]:
    name = c.__name__
    if c.can_generate():
        first = 0 if "CausalLM" in name or "Conditional" in name or "LMHead" in name else 1
    elif "For" in name and "MaskedLM" not in name:
        first = 4
    else:
        first = 2 if "MaskedLM" in name else 3
    return first, len(name), name


class Way(NamedTuple):
    """How far a configuration is shrunk; the first way that a model takes is used."""

    layers: int = 2
    widths: dict[int, int] = {}  # noqa: RUF012
    mrope_section: list[int] | None = None
    per_layer: bool = True
    fills: bool = False
    """Whether fields that are None get a value, too."""


WIDER = {32: 64, 48: 96, 8: 16}
WAYS = [
    Way(),
    Way(per_layer=False),
    Way(mrope_section=[2, 1, 1]),
    Way(widths=WIDER),
    Way(widths=WIDER, mrope_section=[4, 2, 2]),
    Way(widths=WIDER, mrope_section=[2, 1, 1]),
    Way(layers=9),
    Way(layers=9, widths=WIDER, per_layer=False),
    Way(fills=True),
    Way(fills=True, widths=WIDER),
    Way(layers=99),
]


def small(value: Any, way: Way, name: str = "", around: dict[str, Any] | None = None) -> Any:
    """A configuration's field, shrunk; `around` are the fields next to it."""
    around = around or {}
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in DERIVED and (way.per_layer or k not in PER_LAYER)}
        fields = {k: small(v, way, str(k), value) for k, v in kept.items()}
        turns = name == "rope_parameters" and "rope_theta" in fields
        return fields | ({"mrope_section": way.mrope_section} if turns and way.mrope_section else {})
    if isinstance(value, bool) or (value is None and name not in MADE_FROM_NOTHING and not way.fills):
        return value
    if DROPOUT.fullmatch(name) and isinstance(value, (int, float)):
        return type(value)(0)
    if value is None and re.fullmatch(KEPT_EMPTY, name):
        return None
    if value is None or isinstance(value, int):
        return _small_number(value, way, name, around)
    if isinstance(value, (list, tuple)):
        return _small_list(value, way, name, around)
    return value


def _small_number(value: int | None, way: Way, name: str, around: dict[str, Any]) -> int | None:
    if name == "num_key_value_heads" and value in (None, around.get("num_attention_heads")):
        return 4
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            if "layers" in pattern and size:
                size = way.layers
            elif WIDTH.search(name):
                size = way.widths.get(size, size)
            return size if value is None or TOKENS.fullmatch(name) else min(size, value)
    if TOKENS.fullmatch(name):
        return 8 + sum(map(ord, name)) % (VOCABULARY - 16)
    return value


def _small_list(value: Any, way: Way, name: str, around: dict[str, Any]) -> Any:
    if name == "image_size":
        return [32] * len(value)
    layers = next((around[k] for k in LAYERS if isinstance(around.get(k), int)), 0)
    if name in PER_LAYER or (layers > way.layers and len(value) == layers):
        if way.layers > 2:
            return value[: way.layers]
        kinds = list(dict.fromkeys(map(str, value)))
        return ([next(v for v in value if str(v) == kind) for kind in kinds] * 2)[:2]
    return value


def small_configs(config_class: type) -> Iterator[PreTrainedConfig]:
    """Small configurations of a class, the smallest first."""
    with quietly():
        try:
            plain = config_class().to_dict()
        except Exception as error:
            raise NotBuilt(f"no default configuration: {brief(error)}") from error
    plain.pop("model_type", None)
    made, errors = 0, []
    for way in WAYS:
        try:
            with quietly():
                config = config_class(**small(plain, way))
        except Exception as error:
            errors.append(brief(error))
        else:
            made += 1
            yield config
    if not made:
        raise NotBuilt(f"no small configuration: {errors[0]}")


def build(model_class: type, config: PreTrainedConfig, implementation: str) -> Any:
    """A model whose weights, the same for every implementation, make it matter who attends to whom."""
    with quietly():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in model_class._from_config(copy.deepcopy(config)).parameters())
        if parameters > MOST_PARAMETERS:
            raise NotBuilt(f"{parameters // 1_000_000} million parameters")
        torch.manual_seed(0)
        model = model_class._from_config(copy.deepcopy(config), attn_implementation=implementation).float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:
                weight.copy_(noise * (1.0 if "emb" in name else 1.5 / weight[0].numel() ** 0.5))
            elif weight.numel() and bool((weight == weight[:1]).all()):
                weight.add_(0.1 * noise)
    return model.eval()


def build_without_data(model_class: type, implementation: str) -> None:
    """A model of the class's own size, on the meta device."""
    with quietly(), torch.device("meta"):
        try:
            model_class._from_config(model_class.config_class(), attn_implementation=implementation)
        except ArgumentError:
            raise
        except Exception as error:
            raise NotBuilt(brief(error)) from error


def tokens(padding: str, length: int = LENGTH) -> tuple[Tensor, Tensor | None]:
    """(input_ids, attention_mask): two sequences, one of them shorter unless `padding` is 'none'."""
    ids = torch.randint(3, 8, (BATCH, length), generator=torch.Generator().manual_seed(3))
    if padding == "none":
        return ids, None
    mask = torch.ones_like(ids)
    mask[1, : 3 if padding == "left" else 0] = 0
    mask[1, length - (3 if padding == "right" else 0) :] = 0
    return ids.masked_fill(mask == 0, 0), mask


def _field(config: Any, *names: str, default: Any = None) -> Any:
    for part in (config, *(getattr(config, k, None) for k in getattr(config, "sub_configs", {}))):
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return default


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value[-2:])  # type: ignore[return-value]


REQUIRED: dict[str, Callable[[], Any]] = {
    "codebook_idx": lambda: 1,
    "aspect_ratio_ids": lambda: torch.ones(BATCH, 1, dtype=torch.long),
    "task_inputs": lambda: tokens("none")[0],
    "grid_thw": lambda: torch.tensor([[1, 4, 4], [1, 4, 4]]),
    "input_features_mask": lambda: torch.ones(BATCH, 64, dtype=torch.long),
    "feature_lens": lambda: torch.tensor([64, 64]),
    "qformer_input_ids": lambda: tokens("none")[0],
    "mask": lambda: None,
}
"""Arguments that some models cannot do without, by name."""


def inputs(model: Any, padding: str) -> Iterator[dict[str, Any]]:
    """Inputs that the model's forward may take, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    config = model.config
    noise = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    ids, mask = tokens(padding)
    hidden = _field(config, "hidden_size", "d_model", "n_embd", "embed_dim", default=32)
    height, width = _pair(_field(config, "image_size", default=32))
    channels = _field(config, "num_channels", "in_channels", "in_chans", default=3)
    mels = _field(config, "num_mel_bins", "n_mels", "feature_size", default=16)
    frames = _field(config, "num_frames", default=2)
    base: dict[str, Any] = {}
    if mask is not None and "attention_mask" in parameters:
        base["attention_mask"] = mask
    if "decoder_input_ids" in parameters:
        base["decoder_input_ids"] = tokens("none", length=5)[0]
    if "bbox" in parameters:
        corner = torch.arange(LENGTH)[None, :, None].expand(BATCH, -1, 1) % 8
        base["bbox"] = torch.cat([corner, corner, corner + 2, corner + 3], -1)
    text = base | {"input_ids": ids}
    image = {"pixel_values": randn(BATCH, channels, height, width)}
    clip = {"pixel_values": randn(BATCH, frames, channels, height, width)}
    video = {"pixel_values_videos": clip["pixel_values"]}
    sizes = {"image_sizes": torch.tensor([[height, width]] * BATCH)}
    no_mask = {k: v for k, v in base.items() if k != "attention_mask"}
    if "input_ids" in parameters:
        yield text
        if "pixel_values" in parameters:
            yield text | image
        if "input_features" in parameters:
            yield text | {"input_features": randn(BATCH, mels, 128)}
    if padding != "none" and "pixel_values" in parameters:
        raise NotBuilt("pictures have no padding")
    if "pixel_values" in parameters:
        yield no_mask | image
        yield no_mask | clip
        yield no_mask | image | sizes
    if "pixel_values_videos" in parameters:
        yield no_mask | video
    if "input_values" in parameters:
        if padding == "left":
            raise NotBuilt("sound is padded on the right")
        wave = randn(BATCH, 2000)
        if padding == "none":
            yield no_mask | {"input_values": wave}
            yield no_mask | {"input_values": randn(BATCH, 64, mels)}
        else:
            long = torch.ones(BATCH, 2000, dtype=torch.long)
            long[1, 1400:] = 0
            yield base | {"input_values": wave, "attention_mask": long}
    if "input_features" in parameters:
        if padding == "left":
            raise NotBuilt("sound is padded on the right")
        length = 2 * _field(config, "max_source_positions", default=32)
        masks: dict[str, Any] = {}
        for key in ("attention_mask", "input_features_mask"):
            if padding == "right" and key in parameters:
                masks[key] = torch.ones(BATCH, length, dtype=torch.bool)
                masks[key][1, length // 2 :] = False
                break
        yield no_mask | masks | {"input_features": randn(BATCH, length, mels)}
        yield no_mask | masks | {"input_features": randn(BATCH, mels, length)}
    for name in ("inputs_embeds", "hidden_states"):
        if name in parameters:
            yield base | {name: randn(BATCH, LENGTH, hidden)}
            if "encoder_hidden_states" in parameters:
                yield base | {
                    name: randn(BATCH, LENGTH, hidden),
                    "encoder_hidden_states": randn(BATCH, 7, hidden),
                }
            if "grid_thw" in parameters:
                patch = _pair(_field(config, "patch_size", default=8))[0]
                temporal = _field(config, "temporal_patch_size", default=1)
                yield {name: randn(32, channels * temporal * patch * patch)}
    if "past_values" in parameters:
        length = _field(config, "context_length", default=16) + max(
            _field(config, "lags_sequence", default=None) or [0]
        )
        one = _field(config, "num_input_channels", default=1)
        shape = (BATCH, length) if _field(config, "lags_sequence", default=None) else (BATCH, length, one)
        past = {"past_values": randn(*shape), "past_observed_mask": torch.ones(shape)}
        if "past_time_features" in parameters:
            features = _field(config, "num_time_features", default=0)
            ahead = _field(config, "prediction_length", default=4)
            past |= {
                "past_time_features": randn(BATCH, length, features),
                "future_time_features": randn(BATCH, ahead, features),
                "future_values": randn(BATCH, ahead),
            }
        yield {k: v for k, v in past.items() if k in parameters}


def feed(model: Any, padding: str) -> dict[str, Any]:
    """The first inputs that the model takes."""
    errors = []
    for candidate in inputs(model, padding):
        for name, p in inspect.signature(model.forward).parameters.items():
            if p.default is p.empty and name in REQUIRED:
                candidate.setdefault(name, REQUIRED[name]())
        try:
            with quietly(), torch.no_grad():
                model(**candidate)
            return candidate
        except Exception as error:
            errors.append(brief(error))
    takes = [*inspect.signature(model.forward).parameters][:4]
    raise NotBuilt(f"no inputs: {errors[0] if errors else f'forward takes {takes}'}")


def floats(outputs: Any, mask: Tensor | None, padding: str) -> list[Tensor]:
    """The floating outputs, without the rows of padding and what a model makes from them."""
    found: list[Tensor] = []

    def visit(value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            if mask is not None and value.shape[:2] == mask.shape:
                value = value[mask.bool()]
            elif mask is not None and (LENGTH in value.shape or padding == "left"):
                # Positions in an order of the model's own, or a summary of a first token that is padding.
                value = value[:1] if value.dim() and value.shape[0] == BATCH else value
            found.append(value)
        elif isinstance(value, (tuple, list)):
            for v in value:
                visit(v)
        elif isinstance(value, dict):
            for key, v in value.items():
                if key not in ("past_key_values", "attentions"):
                    visit(v)

    visit(outputs)
    return found


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    verbosity = hf.logging.get_verbosity()
    hf.logging.set_verbosity(hf.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf.logging.set_verbosity(verbosity)


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"
