"""The package's small attention kernel, `kernels.aux_kernels.rowwise`, on calls of a few shapes."""

from __future__ import annotations

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from flash4_torch.kernels.aux_kernels import rowwise
from flash4_torch.kernels.aux_kernels.rowwise import Plan, RowwiseParams
from flash4_torch.masks import Band
from flash4_torch.reference.attention import attention
from flash4_torch.reference.scoring import Scoring

from . import Case, poison


class Call(NamedTuple):
    """One attention call; `heads_first` lays the tensors (B, S, H, D) out as (B, H, S, D)."""

    B: int
    Sq: int
    Sk: int
    Hq: int
    Hk: int
    D: int
    Dv: int
    dtype: torch.dtype = torch.float32
    band: Band = Band()
    softcap: float = 0.0
    heads_first: bool = False

    @property
    def plan(self) -> Plan:
        return Plan(
            self.D, self.Dv, self.band.left is not None, self.band.right is not None, self.softcap > 0
        )

    @property
    def rule(self) -> tuple[float, float, int, int]:
        return self.D**-0.5, self.softcap, self.band.left or 0, self.band.right or 0

    def tensor(self, S: int, H: int, D: int) -> Tensor:
        if self.heads_first:
            return torch.randn(self.B, H, S, D).to(self.dtype).transpose(1, 2)
        return torch.randn(self.B, S, H, D).to(self.dtype)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.tensor(self.Sq, self.Hq, self.D),
            self.tensor(self.Sk, self.Hk, self.D),
            self.tensor(self.Sk, self.Hk, self.Dv),
        )

    def exact(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scoring = Scoring(scale=self.D**-0.5, band=self.band, softcap=self.softcap)
        return attention(q.double(), k.double(), v.double(), scoring)


@cute.jit
def forward(
    stream: cuda.CUstream,
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    out: cute.Tensor,
    lse: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:
    rowwise.forward(q, k, v, out, lse, RowwiseParams(scale, softcap, left, right), plan, stream)


@cute.jit
def backward(
    stream: cuda.CUstream,
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    dout: cute.Tensor,
    dlse: cute.Tensor,
    delta: cute.Tensor,
    scale: Float32,
    softcap: Float32,
    left: Int32,
    right: Int32,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    plan: cutlass.Constexpr,
) -> None:
    rule = RowwiseParams(scale, softcap, left, right)
    rowwise.backward(q, k, v, out, lse, dout, dlse, delta, dq, dk, dv, rule, plan, stream)


def forward_case(name: str, call: Call) -> Case:
    def make() -> tuple:
        out = poison(call.B, call.Sq, call.Hq, call.Dv, dtype=call.dtype)
        return cuda.CUstream(0), *call.inputs(), *call.rule, out, poison(call.B, call.Hq, call.Sq)

    def expected(stream: cuda.CUstream, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, ...]:
        return call.exact(q, k, v)

    return Case(
        f"forward_{name}", forward, make, expected, constants={"plan": call.plan}, **tolerance(call.dtype)
    )


def backward_case(name: str, call: Call) -> Case:
    def make() -> tuple:
        q, k, v = call.inputs()
        out, lse = call.exact(q, k, v)
        saved = (
            out.to(call.dtype),
            lse.float(),
            torch.randn_like(out).to(call.dtype),
            torch.randn_like(lse).float(),
        )
        gradients = (poison(*x.shape, dtype=call.dtype) for x in (q, k, v))
        return cuda.CUstream(0), q, k, v, *saved, torch.empty_like(lse).float(), *call.rule, *gradients

    def expected(stream: cuda.CUstream, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        dout, dlse = rest[2].double(), rest[3].double()
        inputs = [x.double().requires_grad_() for x in (q, k, v)]
        out, lse = call.exact(*inputs)
        seen = lse > -torch.inf
        return torch.autograd.grad((out * dout).sum() + (lse * dlse)[seen].sum(), inputs)

    return Case(
        f"backward_{name}", backward, make, expected, constants={"plan": call.plan}, **tolerance(call.dtype)
    )


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    eps = torch.finfo(dtype).eps
    return {"rtol": 2 * eps, "atol": 4 * eps} if dtype != torch.float32 else {"rtol": 1e-5, "atol": 2e-5}


CALLS = {
    "plain": Call(1, 40, 50, 2, 2, 16, 16),
    "causal": Call(2, 70, 70, 2, 1, 32, 32, torch.bfloat16, Band(None, 0), heads_first=True),
    "window": Call(1, 100, 131, 2, 2, 20, 12, torch.float16, Band(17, 5), softcap=4.0),
    "hidden_rows": Call(1, 90, 33, 1, 1, 8, 8, torch.float32, Band(None, 0)),
}
CASES = tuple(make(name, call) for make in (forward_case, backward_case) for name, call in CALLS.items())
