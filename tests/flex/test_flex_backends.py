"""Who serves flex_attention, and what says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils.flop_counter import FlopCounterMode

import flash4_torch
from flash4_torch import testing
from flash4_torch.backends import flex as backends
from flash4_torch.backends.compiled import TARGETS, Target
from flash4_torch.backends.flex import compiled, totals
from flash4_torch.compile import Key
from flash4_torch.configs.types import Features, Mods
from flash4_torch.errors import BackendError, Flash4Error, RangeError
from flash4_torch.flex.attention import traced
from flash4_torch.flex.program import parse
from flash4_torch.flex_problem import FlexInputs, FlexProblem
from flash4_torch.ops import CallOptions
from flash4_torch.ops.flex import describe, flex_attention
from flex_mods import H, Mod

KERNELS = ("sm90", "sm100", "sm80", "emulator")


def tensors(Sq: int = 9, Sk: int = 11, D: int = 8, Dv: int = 6) -> list[Tensor]:
    shapes = (2, Sq, H, D), (2, Sk, 2, D), (2, Sk, 2, Dv)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def problem(score_mod: Mod | None = None, mask_mod: Mod | None = None) -> FlexProblem:
    q, k, v = tensors()
    return describe(FlexInputs(q, k, v, traced(q, k, score_mod, mask_mod)), CallOptions(0.5))


def call() -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in tensors())
    return flash4_torch.flex_attention(q, k, v, lambda score, b, h, i, j: score * 2, enable_gqa=True)


def test_plain_torch_serves_and_the_others_say_why_not() -> None:
    reasons = backends.reasons(problem())
    assert list(reasons) == [*KERNELS, "cpu", "tiled"] and reasons["tiled"] == []
    assert "it has no score_mod" in backends.reasons(problem(lambda s, b, h, i, j: s * 2))["cpu"]
    assert all("the tensors are on cpu, and it serves cuda" in reasons[name] for name in KERNELS[:3])
    assert any("FLASH4_BACKEND=emulator asks for it" in sentence for sentence in reasons["emulator"])


def test_observers_hear_of_both_directions() -> None:
    with testing.backends_used() as used:
        call().sum().backward()
    assert used == {("flex_attention", "tiled"): 1, ("flex_attention_backward", "tiled"): 1}


@pytest.mark.parametrize("name", KERNELS[:3])
def test_a_forced_backend_that_cannot_serve_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else serves the call silently."""
    monkeypatch.setenv("FLASH4_BACKEND", name)
    with pytest.raises(BackendError, match="the tensors are on cpu"):
        call()
    assert any("asks for another" in sentence for sentence in backends.reasons(problem())["tiled"])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_kernels_lack_is_said(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    monkeypatch.setenv("FLASH4_ARCH", arch)

    def reasons(
        score_mod: Mod,
        dtype: torch.dtype = torch.bfloat16,
        sizes: dict[str, int] | None = None,
        **changes: Any,
    ) -> str:
        found = problem(score_mod)
        found = found._replace(
            spec=found.spec._replace(dtype=dtype, **changes), extent=found.extent._replace(**(sizes or {}))
        )
        return " ".join(backends.reasons(found)["emulator"])

    singles, doubles = torch.randn(5), torch.randn(5, dtype=torch.float64)
    assert reasons(lambda score, b, h, i, j: score * i) == ""
    assert "the dtype is torch.float32" in reasons(lambda score, b, h, i, j: score * i, torch.float32)
    gradients: dict[str, Any] = {"backward": True, "dcaptured": (True,)}
    assert reasons(lambda score, b, h, i, j: score * singles[i], **gradients) == ""
    gradients["deterministic"] = True
    assert reasons(lambda score, b, h, i, j: score * singles[i], dcaptured_elements=5, **gradients) == ""
    assert "deterministic sums for up to 8388608" in reasons(
        lambda score, b, h, i, j: score * singles[i], dcaptured_elements=1 << 24, **gradients
    )
    long = {"Sq": 1 << 18, "Sk": 1 << 18}
    assert "deterministic sums of up to 137438953472" in reasons(
        lambda score, b, h, i, j: score * singles[i], sizes=long, dcaptured_elements=5, **gradients
    )
    gradients = {"backward": True, "D": 192, "Dv": 192}
    assert reasons(lambda score, b, h, i, j: score * i, **gradients) == ""
    assert reasons(lambda score, b, h, i, j: score**2, **gradients) == ""
    assert "exp in float64" in reasons(lambda score, b, h, i, j: score * doubles[i].exp())
    assert "serves up to 256" in reasons(lambda score, b, h, i, j: score * i, D=264)


@given(
    target=st.sampled_from(list(TARGETS.values())),
    heads=st.tuples(*2 * [st.sampled_from([64, 96, 128, 192, 200, 256])]),
    changes=st.fixed_dictionaries(dict.fromkeys(("dropout", "softcap", "deterministic"), st.booleans())),
)
def test_what_is_not_refused_has_kernels(
    target: Target, heads: tuple[int, int], changes: dict[str, bool]
) -> None:
    """Functions take registers: not all that has gradients without them has some with them."""
    found = problem(lambda score, b, h, i, j: score * i)
    for is_backward in (False, True):
        spec = found.spec._replace(
            dtype=torch.bfloat16,
            D=heads[0],
            Dv=heads[1],
            capability=target.capability,
            backward=is_backward,
            **changes,
        )
        call = found._replace(spec=spec, softcap=3.0 * changes["softcap"])
        refused = compiled.why_not_kernels(target, call)
        if not refused:
            assert compiled.chosen_backward(target, call, 8) if is_backward else compiled.chosen(target, call)
        else:
            assert is_backward and f"D is {heads[0]} and Dv is {heads[1]}" in refused[0]


def test_flex_support_tells_who_serves() -> None:
    query, key, value = (x.transpose(1, 2) for x in tensors())
    call = query, key, value, lambda score, b, h, i, j: score * 2
    with testing.backends_used() as used:
        why_not = flash4_torch.flex_support(*call, enable_gqa=True)
        assert not used
        flash4_torch.flex_attention(*call, enable_gqa=True).sum().backward()
    served = next(name for name, reasons in why_not.items() if not reasons)
    assert used == {("flex_attention", served): 1, ("flex_attention_backward", served): 1}
    assert why_not["sm90"] == ["the tensors are on cpu, and it serves cuda"]


@pytest.mark.parametrize("wants", [True, False])
def test_flex_support_tells_of_gradients_of_what_score_mod_captures(
    wants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask's tensors have none, and deterministic sums of many are what kernels lack."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    monkeypatch.setenv("FLASH4_BACKEND", "emulator")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(totals, "MAX_EXACT", H - 1)
    query, key, value = (x.detach().bfloat16().transpose(1, 2) for x in tensors())
    bias, seen = torch.randn(H, requires_grad=wants), torch.ones(11, requires_grad=True)
    mask = flash4_torch.create_block_mask(
        lambda b, h, i, j: seen[j] > 0, None, None, 9, 11, device="cpu", BLOCK_SIZE=16
    )
    call = query, key, value, lambda score, b, h, i, j: score + bias[h], mask
    why_not = flash4_torch.flex_support(*call, enable_gqa=True)
    late = [f"backward: captured tensors want {H} gradients, and it has deterministic sums for up to {H - 1}"]
    assert why_not["emulator"] == (late if wants else [])
    assert why_not["tiled"] == ["FLASH4_BACKEND=emulator asks for another"]


def test_flex_support_refuses_what_flex_attention_refuses() -> None:
    query, key, value = (x.transpose(1, 2) for x in tensors())
    aux = AuxRequest(lse=True)
    for wrong in (
        {"key": key[0]},
        {"enable_gqa": False},
        {"value": value.int()},
        {"score_mod": 3},
        {"score_mod": lambda score, b, h, i, j: score if i > j else -score},
        {"block_mask": flash4_torch.create_block_mask(lambda b, h, i, j: i > j, None, None, 8, 8, "cpu")},
        {"scale": "big"},
        {"return_lse": 1},
        {"return_aux": aux, "return_lse": True},
        {"kernel_options": 1},
    ):
        call: dict[str, Any] = {"query": query, "key": key, "value": value, "enable_gqa": True, **wrong}
        messages = []
        for function in (flash4_torch.flex_attention, flash4_torch.flex_support):
            with pytest.raises(Flash4Error) as refused:
                function(**call)
            messages.append(str(refused.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["cpu", "sdpa", "tiled"])
def test_backends_of_other_calls_leave_these_to_plain_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH4_BACKEND", name)
    with testing.backends_used() as used:
        call()
    assert used == {("flex_attention", "tiled"): 1}
    monkeypatch.setenv("FLASH4_BACKEND", "sm70")
    with pytest.raises(RangeError):
        call()


def test_the_log_names_the_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("FLASH4_LOG", "backend")
    q, k, v = tensors(7, 13)
    mods = traced(q, k, lambda score, b, h, i, j: score + i, lambda b, h, i, j: i != j)
    flex_attention(q, k, v, mods, CallOptions(0.5, 3))
    key = parse(describe(FlexInputs(q, k, v, mods), CallOptions(0.5)).spec.score_mod).key[:8]
    logged = capsys.readouterr().err
    assert "tiled serves flex_attention forward B=2 Sq=7 Sk=13" in logged
    assert f"score_mod {key} mask_mod" in logged and "window=(3, None)" in logged


def test_a_spec_tells_programs_apart_and_forgets_numbers() -> None:
    def scaled(factor: float) -> Mod:
        return lambda score, b, h, i, j: score * factor

    one, other = problem(scaled(2.0)), problem(scaled(3.0))
    assert one.spec == other.spec and one.spec.score_mod
    assert problem(lambda score, b, h, i, j: score * i).spec != one.spec
    assert problem(None, lambda b, h, i, j: i > j).spec.mask_mod and not one.spec.mask_mod


def test_a_kernels_key_is_short_and_tells_programs_apart() -> None:
    texts = [problem(lambda score, b, h, i, j, n=n: score + i * j**n).spec.score_mod for n in (2, 3)]
    keys = [
        Key("a:b", (Features("bfloat16", 64, 64, mods=Mods(*mods)),), "sm_90a")
        for mods in (("", ""), (texts[0], ""), (texts[1], ""), ("", texts[0]), (texts[0], "", "rows"))
    ]
    assert len({key.digest for key in keys}) == len({str(key) for key in keys}) == len(keys)
    assert all(text not in repr(keys) for text in texts) and len(str(keys[4])) < 200


def test_what_changes_nothing_leaves_no_program() -> None:
    plain = problem()
    assert (
        problem(lambda score, b, h, i, j: score, lambda b, h, i, j: torch.ones((), dtype=torch.bool)) == plain
    )
    assert plain.spec.score_mod == plain.spec.mask_mod == ""


@given(st.integers(1, 9), st.integers(1, 9), st.one_of(st.none(), st.integers(0, 5)))
def test_flops_count_all_pairs_as_torch_does(Sq: int, Sk: int, left: int | None) -> None:
    q, k, v = tensors(Sq, Sk)
    with FlopCounterMode(display=False) as counter:
        out, _ = flex_attention(q, k, v, traced(q, k, None, None), CallOptions(0.5, left))
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = 2 * H * Sq * Sk
    assert forward == 2 * pairs * (8 + 6)
    assert counter.get_total_flops() - forward == 2 * pairs * (3 * 8 + 2 * 6)
