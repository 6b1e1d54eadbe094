"""Every two properties of a call together, through `attention` and its gradients, by real kernels' PTX.

No GPU is needed: the emulator runs the kernels that a GPU of that architecture would run, under a schedule
that depends on the case, and raises for a race, a deadlock or an access out of bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flash4_torch
from covering import Case, covering, name_of
from everything import one_of
from flash4_torch import env, testing
from flash4_torch.backends.compiled import SM80_FAMILY, TARGETS
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention as by_definition
from flash4_torch.reference.dropout import Dropout
from flash4_torch.reference.scoring import Scoring

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
from flash4_torch.testing import emulate

CASES = covering()
NAMES = ("dq", "dk", "dv", "dmask")


class Drawn(NamedTuple):
    """A call's tensors and rules; `lengths` holds its sequence lengths if it is packed."""

    inputs: list[Tensor]
    mask: Tensor | None
    rules: dict[str, Any]
    lengths: tuple[list[int], list[int]] | None

    @property
    def differentiable(self) -> list[Tensor]:
        floating = self.mask is not None and self.mask.is_floating_point()
        return [*self.inputs, *([self.mask] if floating else [])]  # type: ignore[list-item]


def _runs() -> Iterator[tuple[str, Case]]:
    """Most runs are for sm_100a, as no GPU at hand can run it; elsewhere a few cases try this test, too.

    CI has a case with several properties for sm_100a, and plain ones elsewhere.
    """
    others = [target.arch for target in TARGETS.values() if target not in SM80_FAMILY]
    for arch in (*others, *one_of(6, [target.arch for target in SM80_FAMILY])):
        first = 8 if arch == "sm_100a" else 0
        yield from ((arch, case) for case in one_of(len(CASES), [*CASES[first:], *CASES[:first]]))


def drawn(case: Case) -> Drawn:
    (D, Dv), (Sq, Sk), dtype = case["heads"], case["lengths"], getattr(torch, case["dtype"])
    Hq, Hk = 2 * case["group"], 2
    reach = 40 if Sk > 5 else 2
    window = {"window": (reach, 3), "left": (reach, None)}.get(case["band"], (None, None))
    rules = {name: case[name] for name in ("dropout_p", "softcap", "deterministic")}
    rules |= {"causal": case["band"] == "causal", "window": window}
    if case["varlen"]:
        # An empty sequence lies in between.
        lengths = [Sq, 0, 7], [Sk, 3, 9]
        T, U = map(sum, lengths)
        shapes = [(T, Hq, D), (U, Hk, D), (U, Hk, Dv)]
    else:
        lengths = None
        shapes = [(1, Sq, Hq, D), (1, Sk, Hk, D), (1, Sk, Hk, Dv)]
    mask = None
    if case["mask"]:
        # The mask covers runs of 16 keys, so that some blocks are fully masked and others fully visible.
        seen = torch.rand(1, Hq, Sq, -(-Sk // 16)).gt(0.3).repeat_interleave(16, 3)[..., :Sk]
        mask = seen
        if case["mask"] == "float":
            mask = torch.randn(seen.shape).masked_fill(~seen, -torch.inf).to(dtype).requires_grad_()
    return Drawn([torch.randn(shape).to(dtype).requires_grad_() for shape in shapes], mask, rules, lengths)


def ours(call: Drawn) -> tuple[Tensor, Tensor]:
    if call.lengths is None:
        return flash4_torch.attention(*call.inputs, attn_mask=call.mask, return_lse=True, **call.rules)
    ends = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in call.lengths]
    return flash4_torch.attention_varlen(
        *call.inputs,
        cu_seqlens_q=ends[0],
        cu_seqlens_k=ends[1],
        max_seqlen_q=max(call.lengths[0]),
        max_seqlen_k=max(call.lengths[1]),
        return_lse=True,
        **call.rules,
    )


def defined(call: Drawn, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same results by definition, in `dtype`, one sequence at a time."""
    left, right = call.rules["window"]
    band, p = Band(left, 0 if call.rules["causal"] else right), call.rules["dropout_p"]
    mask = call.mask if call.mask is None or call.mask.dtype == torch.bool else call.mask.to(dtype)
    x = [t.to(dtype) for t in call.inputs]
    found = []
    lengths = call.lengths or ([call.inputs[0].shape[1]], [call.inputs[1].shape[1]])
    for b, spans in enumerate(zip(*(pairwise([0, *accumulate(n)]) for n in lengths), strict=True)):
        dropout = Dropout(state, p, b) if p else None
        scoring = Scoring(x[0].shape[-1] ** -0.5, band, call.rules["softcap"], mask, dropout)
        rows, keys = (slice(*span) for span in spans)
        dense = x if call.lengths is None else [x[0][None, rows], x[1][None, keys], x[2][None, keys]]
        found.append(by_definition(*dense, scoring))
    if call.lengths is None:
        return found[0]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], -1)


def gradients(results: tuple[Tensor, Tensor], call: Drawn, dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
    out, lse = results
    total = (out.double() * dout.double()).sum()
    if dlse is not None:
        total = total + (torch.where(lse.isinf(), 0.0, lse).double() * dlse).sum()
    return list(torch.autograd.grad(total, call.differentiable))


OF_MASKS = ("mask_blocks_kernel", "list_kernel", "bits_kernel", "copy_kernel")
"""Kernels that make a mask's tables, one or two for each direction."""


@pytest.mark.parametrize(
    ("arch", "case"), list(_runs()), ids=lambda x: x if isinstance(x, str) else name_of(x)
)
def test_values_and_gradients(arch: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.BACKEND.name, "emulator")
    call, seed = drawn(case), CASES.index(case)
    state = testing.peek_rng_state()
    schedule = {"schedule": ("late", "fuzz")[seed % 2], "seed": seed}
    with emulate.device(arch, num_sms=2, **schedule) as device, testing.poisoned_memory():
        results = ours(call)
        dout = torch.randn(results[0].shape).to(results[0].dtype)
        dlse = torch.randn(results[1].shape) if case["dlse"] else None
        found = gradients(results, call, dout, dlse)
    kernels = sum(not any(name in report.kernel for name in OF_MASKS) for report in device.reports)
    # A forward and three kernels of the backward. Scope "kv_head" has no postprocess kernel, nor have
    # small calls a preprocess kernel.
    assert kernels in (2, 3, 4), "other kernels have served"
    assert sum("preprocess_kernel" in report.kernel for report in device.reports) == (kernels > 2)

    exact, peer = (defined(call, state, dtype) for dtype in (torch.float64, results[0].dtype))
    for name, a, e, p in zip(("out", "lse"), results, exact, peer, strict=True):
        testing.assert_close_as_peer(a, e, p, what=name)
    # The rounding error of the stored out enters the gradient of every score of its row.
    products, eps = (results[0].double() * dout.double()).detach(), torch.finfo(dout.dtype).eps
    of_row = eps / 2 * products.abs().sum(-1).max().item() * call.inputs[0].shape[-1] ** -0.5
    q, k = (x.detach().abs().max().item() for x in call.inputs[:2])
    noise = {
        "dq": of_row * k,
        "dk": of_row * q * case["lengths"][0] ** 0.5,
        "dmask": eps * products.norm().item(),
    }
    wanted, peers = (gradients(r, call, dout, dlse) for r in (exact, peer))
    for name, a, e, p in zip(NAMES, found, wanted, peers, strict=False):
        testing.assert_close_as_peer(a, e.double(), p, what=name, noise=noise.get(name, 0.0))
