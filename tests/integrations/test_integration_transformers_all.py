"""All architectures of the installed transformers: each is right under "fa4", or refused while it is loaded.

FLASH4_TEST_ALL=1 runs them all; otherwise a few of every kind run. An architecture is a class of
configurations; its models are built small by general rules (see `tiny_hf`), and those that the rules cannot
build or feed are counted with their reasons.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flash4_torch import backends
from flash4_torch.errors import ArgumentError

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import PreTrainedModel

import tiny_hf
from flash4_torch.integrations import transformers as ours
from flash4_torch.integrations.transformers_models import judge_class
from tiny_hf import NotBuilt

FA4 = ours.register()
EVERYTHING = bool(os.environ.get("FLASH4_TEST_ALL"))
FEWEST_SERVED = 360
FEWEST_REFUSED = 130
MOST_ATTEMPTS = 12

Kind = str


class Verdict(NamedTuple):
    kind: Kind
    """'served', 'as sdpa', 'refused', 'without attention', 'not built' or 'different'."""

    why: str


def verdict(classes: list[type]) -> Verdict:
    """The verdict on the first model class of an architecture that can be built and fed."""
    reasons: list[str] = []
    try:
        for config in tiny_hf.small_configs(classes[0].config_class):
            for model_class in classes[:3]:
                try:
                    return _compared(model_class, config)
                except NotBuilt as error:
                    reasons.append(f"{model_class.__name__}: {error}")
            if len(reasons) >= MOST_ATTEMPTS:
                break
    except NotBuilt as error:
        reasons.append(str(error))
    # A refusal needs neither a small model nor inputs.
    for model_class in classes[:3]:
        try:
            with suppress(NotBuilt):
                tiny_hf.build_without_data(model_class, FA4)
        except ArgumentError as refusal:
            return _refused(refusal)
    return Verdict("not built", reasons[0])


def _refused(refusal: ArgumentError) -> Verdict:
    assert refusal.argument == "attn_implementation", refusal
    assert refusal.value == repr(FA4), refusal
    assert 'use "' in refusal.limit, refusal
    return Verdict("refused", str(refusal))


def _compared(model_class: type, config: Any) -> Verdict:
    try:
        model = tiny_hf.build(model_class, config, FA4)
    except ArgumentError as refusal:
        return _refused(refusal)
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(tiny_hf.brief(error)) from error
    eager = tiny_hf.build(model_class, config, "eager")
    found, calls, done, as_sdpa = [], 0, [], []
    for padding in ("none", "left", "right"):
        try:
            given = tiny_hf.feed(eager, padding)
        except NotBuilt:
            if padding == "none":
                raise
            continue
        with _calls() as seen:
            difference = _difference(model, eager, given, padding)
        calls += len(seen)
        done.append(padding)
        if difference is None:
            continue
        # Where transformers' own "sdpa" differs from eager as we do, the model means nothing definite.
        sdpa = _sdpa(model_class, config)
        if sdpa is not None and _difference(model, sdpa, given, padding) is None:
            as_sdpa.append(padding)
        else:
            found.append(f"{padding}: {difference}")
    if model_class.can_generate() and (difference := _other_tokens(model, eager)):
        if (sdpa := _sdpa(model_class, config)) is not None and not _other_tokens(model, sdpa):
            as_sdpa.append("generate")
        else:
            found.append(f"generate: {difference}")
    if found:
        return Verdict("different", f"{model_class.__name__}: {'; '.join(found)}")
    if not calls and any(judge_class(type(m), FA4).calls_us for m in _models(model)):
        raise NotBuilt("at this size no layer has attention")
    if not calls and (own := _attention_modules(model)):
        return Verdict("different", f"{model_class.__name__} accepts the name, and {own} never calls us")
    kind = "as sdpa" if as_sdpa else "served" if calls else "without attention"
    return Verdict(kind, f"{model_class.__name__}, {', '.join(as_sdpa or done)}")


def _models(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, PreTrainedModel)]


def _attention_modules(model: Any) -> str:
    return ", ".join({type(m).__name__ for m in model.modules() if "Attention" in type(m).__name__})


def _sdpa(model_class: type, config: Any) -> Any:
    """The model under transformers' own "sdpa", or None."""
    with suppress(ValueError):
        return tiny_hf.build(model_class, config, "sdpa")


@contextmanager
def _calls() -> Iterator[list[Any]]:
    """The calls that reach a backend of ours."""
    seen: list[Any] = []

    def observe(problem: Any, backend: str) -> None:
        seen.append(problem)

    backends.observers.append(observe)
    try:
        yield seen
    finally:
        backends.observers.remove(observe)


def _difference(model: Any, eager: Any, given: dict[str, Any], padding: str) -> str | None:
    """How the outputs or the gradients differ, if they do by more than rounding."""
    try:
        result = _outputs_and_gradients(model, given, padding)
    except Exception as error:
        return f"raises {tiny_hf.brief(error)}"
    expected = _outputs_and_gradients(eager, given, padding)
    exact = None
    for name, a, b in zip(("outputs", "gradients"), result, expected, strict=True):
        if len(a) != len(b):
            return f"{name}: {len(a)} tensors, eager {len(b)}"
        if _error(a, b) <= 1e-4:
            continue
        # Does eager's own rounding explain it?
        try:
            exact = exact or _outputs_and_gradients(eager.double(), _double(given), padding)
        except RuntimeError as error:
            return f"{name} differ by {_error(a, b):.1e}, and in double eager {tiny_hf.brief(error)}"
        finally:
            eager.float()
        truth = exact[name == "gradients"]
        if not _error(a, truth) <= 4 * _error(b, truth) + 1e-5:
            return f"{name} differ by {_error(a, b):.1e} (eager itself {_error(b, truth):.1e})"
    return None


def _outputs_and_gradients(
    model: Any, given: dict[str, Any], padding: str
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(7)
    with tiny_hf.quietly():
        outputs = tiny_hf.floats(model(**given), given.get("attention_mask"), padding)
    if not all(torch.isfinite(x).all() for x in outputs if x.dtype != torch.float64):
        outputs = [x.nan_to_num(nan=0.0, posinf=1e4, neginf=-1e4) for x in outputs]
    terms = [x for x in outputs if x.requires_grad]
    generator = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=generator)).mean() for x in terms)
    used = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, used, allow_unused=True) if terms else ()
    return [x.detach() for x in outputs], [
        torch.zeros_like(p) if g is None else g for g, p in zip(gradients, used, strict=bool(terms))
    ]


def _double(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}


def _error(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, in units of the largest value of its tensor or of all."""
    largest = max((float(y.abs().max()) for y in b if y.numel()), default=1.0) or 1.0
    errors = [
        float((x.double() - y.double()).abs().max()) / max(float(y.abs().max()), 1e-2 * largest, 1e-30)
        for x, y in zip(a, b, strict=True)
        if y.numel() and x.shape == y.shape
    ]
    if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return float("inf")
    return max((float("inf") if e != e else e for e in errors), default=0.0)


def _other_tokens(model: Any, eager: Any) -> str | None:
    for padding in ("left", "right" if model.config.is_encoder_decoder else "none"):
        ids, mask = tiny_hf.tokens(padding)
        options = {
            "attention_mask": mask,
            "max_new_tokens": 4,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        try:
            with tiny_hf.quietly():
                expected = eager.generate(ids, **options)
        except Exception:
            return None
        try:
            with tiny_hf.quietly():
                result = model.generate(ids, **options)
        except Exception as error:
            return f"{padding}: raises {tiny_hf.brief(error)}"
        if not (
            isinstance(expected, dict) and "sequences" in expected and expected.get("logits") is not None
        ):
            return None
        error = _error([torch.stack(result.logits, 1)], [torch.stack(expected.logits, 1)])
        if not torch.equal(result.sequences, expected.sequences) or error > 1e-3:
            return f"{padding}: logits differ by {error:.1e}"
    return None


FEW: dict[str, list[str]] = {
    "served": [
        # decoders, also with experts, latent heads, a window or a recurrent part
        *(
            "LlamaConfig",
            "OPTConfig",
            "MixtralConfig",
            "DeepseekV3Config",
            "Gemma3TextConfig",
            "GptOssConfig",
        ),
        # encoders
        *("BertConfig", "ModernBertConfig", "AlbertConfig"),
        # encoders and decoders
        *("BartConfig", "T5Config", "WhisperConfig"),
        # pictures and sound
        *("ViTConfig", "SiglipVisionConfig", "HubertConfig"),
        # several parts
        *("CLIPConfig", "LlavaConfig", "Qwen2VLTextConfig"),
        # models that claim nothing, and read a mask of None in ways of their own
        *("AlignTextConfig", "BigBirdPegasusConfig", "NllbMoeConfig", "Speech2TextConfig"),
    ],
    "refused": [
        # a mask of transformers, and attention of its own
        *("BloomConfig", "MPNetConfig", "RoFormerConfig", "LukeConfig", "CodeGenConfig", "XGLMConfig"),
        *("TrOCRConfig", "MvpConfig", "BlipTextConfig", "ImageGPTConfig", "MegatronBertConfig"),
        *("SqueezeBertConfig", "BigBirdConfig", "NystromformerConfig", "RemBertConfig", "IBertConfig"),
        # a table of attention classes
        *("GPTJConfig", "FalconConfig"),
        # no mask of transformers, attention of its own
        *("DebertaV2Config", "XLNetConfig"),
        # calls us for a part of its layers only
        *("LongT5Config", "InformerConfig"),
        # sparse attention
        "DeepseekV32Config",
        # several parts
        *("BlipConfig", "GroupViTConfig"),
    ],
    "without attention": ["FNetConfig", "MambaConfig"],
    "as sdpa": ["ColPaliConfig"],
}


@pytest.mark.skipif(EVERYTHING, reason="all are run")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FEW.items() for name in names])
def test_architectures_are_right_or_refused(kind: str, name: str) -> None:
    result = verdict(tiny_hf.architecture(name))
    assert result.kind == kind, result.why


@pytest.mark.skipif(not EVERYTHING, reason="set FLASH4_TEST_ALL=1")
def test_all_architectures_are_right_or_refused() -> None:
    tiny_hf.import_all()
    results = {name: verdict(classes) for name, classes in tiny_hf.architectures().items()}
    counts = Counter(result.kind for result in results.values())
    for name, result in results.items():
        print(f"{result.kind} | {name} | {result.why}")
    print(counts)
    assert not [f"{name}: {result.why}" for name, result in results.items() if result.kind == "different"]
    expected = [(name, kind) for kind, names in FEW.items() for name in names]
    assert [(name, results[name].kind) for name, _ in expected] == expected
    assert counts["served"] >= FEWEST_SERVED
    assert counts["refused"] >= FEWEST_REFUSED
