"""Records the small kernels of tests/emulator/kernels, and flash-attn-4's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash4_torch.bench.fa4_emulated import flash_attn_4
from flash4_torch.emulator import host

from ..kernels import Case, all_cases, poison
from . import bounds, hopper
from .recorder import ARCH, PACKAGES, Recorder
from .recording import Bound

ROUNDING = "_rounding"
APPROXIMATIONS = "errors of ex2, lg2 and rcp, and one rounding of the result"
REASON = "wgmma's sums and errors of ex2, lg2 and rcp, each of which can change a rounding to 16 bits"
PRODUCTS = ("forward", "backward")  # the parts of flash-attn-4 that execute MMAs; the others are exact


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--peers", action="store_true", help="also flash-attn-4's kernels")
    given = parser.parse_args(arguments)
    recorder = Recorder([*PACKAGES, "flash-attn-4"] if given.peers else PACKAGES)
    with recorder.listening():
        small_kernels(recorder)
        if given.peers:
            flash_attn_4_kernels(recorder)
    recorder.recording.save(given.recording)
    print(f"{len(recorder.recording.steps)} steps, {given.recording.stat().st_size >> 10} KiB")
    return 0


def small_kernels(recorder: Recorder) -> None:
    host.install(recorder.run, ARCH)
    try:
        for case in [*all_cases(ARCH), *rounding_products()]:
            small_kernel(recorder, case)
    finally:
        host.uninstall()


def small_kernel(recorder: Recorder, case: Case) -> None:
    """Runs and records one case, while the recorder is the seam's `run`."""
    arguments = case.arguments()
    expected = case.reference(*arguments)
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            recorder.remember(f"argument {i}", argument, model=model_of(case, arguments) if i == 2 else None)
    case.compile(ARCH)(*case.converted(arguments))
    case.check(arguments, expected)
    recorder.record(case.name, recorder.ran, bound_of(case, arguments))
    recorder.forget()


def rounding_products() -> Iterator[Case]:
    """The GEMMs of the package of kernels, whose own inputs give exact results, on inputs that do not."""
    for case in all_cases(ARCH):
        if case.name in ("hopper_gemm_k_major", "hopper_gemm_both_turned", "hopper_gemm_a_in_registers"):
            yield replace(case, name=case.name + ROUNDING, make=_with_noise(case.make), rtol=1e-4, atol=1e-3)


def _with_noise(make: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
    def noisy() -> tuple[Any, ...]:
        a, b, *rest = make()
        return a.copy_(torch.randn(a.shape)), b.copy_(torch.randn(b.shape)), *rest

    return noisy


def bound_of(case: Case, arguments: tuple[Any, ...]) -> Callable[[str], Bound]:
    """The bound by the argument's name; case.rtol says whether the kernel's results are exact."""
    if case.rtol == 0:
        return lambda name: Bound()
    if case.name == "approximations":
        return lambda name: bounds.approximations(arguments[0])
    if case.name.endswith(ROUNDING):
        return lambda name: bounds.product(*_factors(case, arguments))
    largest = {f"argument {i}": _largest(a) for i, a in enumerate(arguments) if isinstance(a, Tensor)}
    return lambda name: Bound(largest[name], APPROXIMATIONS)


def model_of(case: Case, arguments: tuple[Any, ...]) -> Tensor | None:
    """A model of the third argument, if it is a GEMM's result that is not exact."""
    return hopper.product(*_factors(case, arguments)) if case.name.endswith(ROUNDING) else None


def _factors(case: Case, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    a, b, *_ = arguments
    return (2 * a if "a_in_registers" in case.name else a), b


def _largest(result: Tensor) -> float:
    size = result.double().nan_to_num(neginf=0).abs().max().item()
    return (bounds.APPROXIMATE + bounds.STEP[result.dtype]) * size


class Call(NamedTuple):
    """One call of flash-attn-4: B sequences of Sq queries and Sk keys, Hq and Hk heads of D."""

    D: int
    causal: bool
    Sq: int
    Sk: int
    Hq: int = 2
    Hk: int = 2
    dtype: torch.dtype = torch.bfloat16
    B: int = 1
    deterministic: bool = True

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        order = "" if self.deterministic else " in any order"
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"B{self.B} Sq{self.Sq} Sk{self.Sk} Hq{self.Hq} Hk{self.Hk}"
        return f"flash-attn-4 {dtype} D{self.D} {mask} {sizes}{order}"

    def tensor(self, S: int, H: int) -> Tensor:
        return torch.randn(self.B, S, H, self.D).to(self.dtype)


CALLS = (
    Call(64, False, 256, 256),
    Call(64, True, 301, 301, B=2),
    Call(64, True, 113, 203, 4, 2),
    Call(64, False, 256, 384, deterministic=False),
    Call(128, False, 256, 384),
    Call(128, True, 259, 259, dtype=torch.float16),
    Call(128, True, 131, 301, 4, 1),
    Call(256, False, 130, 260),
    Call(256, True, 203, 203),
    Call(256, True, 100, 150, 4, 2),
)


def flash_attn_4_kernels(recorder: Recorder) -> None:
    with flash_attn_4(recorder.run, ARCH) as interface:
        for number, call in enumerate(CALLS):
            torch.manual_seed(number)
            _flash_attn_4_call(recorder, interface, call)


def _flash_attn_4_call(recorder: Recorder, interface: Any, call: Call) -> None:
    q, dout = call.tensor(call.Sq, call.Hq), call.tensor(call.Sq, call.Hq)
    k, v = call.tensor(call.Sk, call.Hk), call.tensor(call.Sk, call.Hk)
    exact, off = bounds.Attention(q, k, v, dout, call.causal, inner=call.dtype).exact()
    outputs = {name: poison(*x.shape, dtype=call.dtype) for name, x in exact.items() if name != "lse"}
    outputs["lse"] = poison(*exact["lse"].shape)
    for name, tensor in {"q": q, "k": k, "v": v, "dout": dout, **outputs}.items():
        recorder.remember(name, tensor, exact.get(name))

    forward, gradients = (
        {name: outputs[name] for name in names} for names in (("out", "lse"), ("dq", "dk", "dv"))
    )
    interface._flash_attn_fwd(q, k, v, causal=call.causal, return_lse=True, **forward)
    interface._flash_attn_bwd(
        q,
        k,
        v,
        outputs["out"],
        dout,
        outputs["lse"],
        causal=call.causal,
        deterministic=call.deterministic,
        **gradients,
    )
    bound = _attention_bounds(outputs, off, scale=call.D**-0.5)
    for ran in recorder.ran:
        part = _part(ran.launch.kernel.name)
        recorder.record(f"{call}: {part}", [ran], bound if part in PRODUCTS else lambda name: Bound())
    recorder.forget()


def _part(kernel: str) -> str:
    """The part of flash-attn-4 that a kernel belongs to, from its name."""
    parts = {
        "Preprocess": "before backward",
        "Postprocess": "after backward",
        "Forward": "forward",
        "Backward": "backward",
    }
    return next(part for word, part in parts.items() if word in kernel)


def _attention_bounds(
    outputs: dict[str, Tensor], off: dict[str, float], scale: float
) -> Callable[[str], Bound]:
    """Bounds of results, and of the fp32 sums that become gradients later (with other names and shapes)."""
    sums = max(off["dq"] / scale, off["dk"] / scale, off["dv"])

    def bound(name: str) -> Bound:
        if name not in off:
            return Bound(sums, REASON) if "float32" in name else Bound()
        step = bounds.STEP[outputs[name].dtype]
        return Bound(
            off[name] + step * outputs[name].double().nan_to_num(neginf=0).abs().max().item(), REASON
        )

    return bound


if __name__ == "__main__":
    raise SystemExit(main())
