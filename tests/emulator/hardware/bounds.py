"""How far roundings that PTX leaves open can take the GPU's results from the emulator's.

PTX leaves two things open: the approximations (ex2, lg2, rcp, tanh, ...), for which it states an error and
the emulator rounds correctly, and the order and width of the sums inside an MMA. Where such a value is then
rounded to 16 bits, a tiny difference may carry it to the neighbouring number: one unit in the last place. The
bounds of attention mostly consist of that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .recording import Bound

# The largest unit in the last place of numbers about 1 and above: the size of a changed rounding.
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
# Relative error of a few approximations together, each of which is off by up to 2^-22.
APPROXIMATE = 2.0**-19


def sums(terms: int) -> float:
    """How far two sums of that many fp32 terms can differ, relative to the sum of their sizes.

    The emulator rounds after each term. Hopper (hopper.py) truncates 17 terms at 2^-25 of the largest, and
    their sum at 2^-23.
    """
    return terms * 2.0**-23


def approximations(x: Tensor) -> Bound:
    """Bounds for the rows of the kernel `approximations`.

    They cover the errors that PTX states and the emulator's own rounding.
    """
    z = x.double()
    rows = [
        2**-22 * z.exp2(),
        torch.where((z > 0.5) & (z < 2), 1.0, z.log2().abs()) * 2**-22,
        2**-23 / z,
        2**-23 * z.sqrt(),
        2**-22.9 * z.rsqrt(),
        2**-11 * z.tanh(),
        torch.full_like(z, 2**-20.5),
        torch.full_like(z, 2**-20.5),
        2**-22 * (-z).exp(),
    ]
    exact = [z.exp2(), z.log2(), 1 / z, z.sqrt(), z.rsqrt(), z.tanh(), z.sin(), z.cos(), (-z).exp()]
    largest = torch.stack(rows) + 2**-24 * torch.stack(exact).abs()
    return Bound(largest.flatten(), "errors that PTX states for approximations")


def product(a: Tensor, b: Tensor) -> Bound:
    """The bound of A B^T in fp32 by wgmma; a (M, K), b (N, K)."""
    sizes = a.double().abs() @ b.double().abs().T
    return Bound(sums(a.shape[1]) * sizes.max().item(), "order and width of wgmma's sums")


@dataclass(frozen=True)
class Attention:
    """An attention call and its exact results.

    q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dout (B, Sq, Hq, Dv).
    inner: the type that P and dS are rounded to before the second GEMM.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    inner: torch.dtype

    def exact(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Results in fp64 by name, and how far each may be off anywhere."""
        q, dout = self.q.double(), self.dout.double()
        group = q.shape[2] // self.k.shape[2]
        k, v = (x.double().repeat_interleave(group, 2) for x in (self.k, self.v))
        scale = q.shape[3] ** -0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        if self.causal:
            hidden = ~torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            scores = scores.masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        p = (scores - lse[..., None]).exp().nan_to_num()
        out = torch.einsum("bhqk,bkhd->bqhd", p, v)
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        delta = torch.einsum("bqhd,bqhd->bhq", dout, out)[..., None]
        ds = p * (dp - delta)

        def over_group(x: Tensor) -> Tensor:
            return x.unflatten(2, (self.k.shape[2], group)).sum(3)

        results = {
            "out": out,
            "lse": lse,
            "dq": torch.einsum("bhqk,bkhd->bqhd", ds, k) * scale,
            "dk": over_group(torch.einsum("bhqk,bqhd->bkhd", ds, q)) * scale,
            "dv": over_group(torch.einsum("bhqk,bqhd->bkhd", p, dout)),
        }

        size = torch.einsum("bqhd,bkhd->bhqk", q.abs(), k.abs()) * scale
        step, fp32 = STEP[self.inner], sums(max(q.shape[1], k.shape[1], q.shape[3])) + APPROXIMATE
        p_off = p * (step + fp32 * (1 + size))
        dp_size = torch.einsum("bqhd,bkhd->bhqk", dout.abs(), v.abs()) + delta.abs()
        ds_off = ds.abs() * (step + fp32 * (1 + size)) + fp32 * p * dp_size
        off = {
            "out": torch.einsum("bhqk,bkhd->bqhd", p_off, v.abs()),
            "lse": fp32 * (size.amax(-1) + lse.nan_to_num(neginf=0).abs()),
            "dq": torch.einsum("bhqk,bkhd->bqhd", ds_off, k.abs()) * scale,
            "dk": over_group(torch.einsum("bhqk,bqhd->bkhd", ds_off, q.abs())) * scale,
            "dv": over_group(torch.einsum("bhqk,bqhd->bkhd", p_off, dout.abs())),
        }
        return results, {name: x.max().item() for name, x in off.items()}
