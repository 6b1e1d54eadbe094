"""DTensors go through our operators shard by shard: no collective for batch and heads, the same numbers.

The checks run once, on two gloo processes; each test asserts one check's outcome.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flash4_torch
from flash4_torch import ops
from flash4_torch.problem import CallOptions
from ranks import Ranks

PLAIN = CallOptions(scale=0.3)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(B: int = 4, Sq: int = 5, Sk: int = 7, Hq: int = 4, Hk: int = 2) -> list[Tensor]:
    shapes = ((B, Sq, Hq, 8), (B, Sk, Hk, 8), (B, Sk, Hk, 8))
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, right: int | None = 0) -> Any:
    return ops.attention(q, k, v, mask, None, None, PLAIN._replace(window_right=right))


def grads(results: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients of a scalar of all results that weights every element differently."""
    # Not added to 0: that would bring partial sums together.
    first, *others = ((x * x.detach().cos()).sum() for x in results)
    return list(torch.autograd.grad(sum(others, first), inputs))


def compare(
    tensors: list[Tensor], placements: list[Any], call: Callable[..., Any], collectives: bool
) -> None:
    """Asserts that `call` gives the same on sharded tensors as on whole ones, with or without collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2,))
    whole = call(*tensors)
    sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements, strict=True)]
    with CommDebugMode() as forward:
        results = call(*sharded)
    learn = [i for i, t in enumerate(tensors) if t.requires_grad]
    with CommDebugMode() as backward:
        ours = grads(results, [sharded[i] for i in learn])
    theirs = grads(whole, [tensors[i] for i in learn])
    for a, b in zip([*results, *ours], [*whole, *theirs], strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    assert (forward.get_total_counts() > 0) == collectives, forward.get_comm_counts()
    if not collectives:
        assert backward.get_total_counts() == 0, backward.get_comm_counts()


def check_batch() -> None:
    from torch.distributed.tensor import Shard

    compare(qkv(), [Shard(0)] * 3, attend, collectives=False)


def check_uneven_batch() -> None:
    from torch.distributed.tensor import Shard

    compare(qkv(B=3), [Shard(0)] * 3, attend, collectives=False)


def check_heads() -> None:
    from torch.distributed.tensor import Shard

    compare(qkv(), [Shard(2)] * 3, attend, collectives=False)


def check_heads_that_do_not_divide_are_gathered() -> None:
    from torch.distributed.tensor import Replicate, Shard

    compare(qkv(Hk=1), [Shard(2), Replicate(), Replicate()], attend, collectives=True)


def check_masks() -> None:
    """The mask is sharded where it has the axis, replicated where it broadcasts; its gradient is complete."""
    from torch.distributed.tensor import Replicate, Shard

    for axis, full in ((0, (4, 4, 5, 7)), (1, (4, 4, 5, 7))):
        for sizes in ((1, 1, 1, 1), (1, 1, 0, 0), (1, 0, 1, 1), (0, 1, 0, 1)):
            shape = [n if keep else 1 for n, keep in zip(full, sizes, strict=True)]
            placed = [Shard(0 if axis == 0 else 2)] * 3
            placed.append(Shard(axis) if shape[axis] > 1 else Replicate())
            for learn in (False, True):
                mask = normal(*shape, seed=3).requires_grad_(learn)
                compare([*qkv(), mask], placed, attend, collectives=False)


def check_bool_mask() -> None:
    from torch.distributed.tensor import Shard

    mask = normal(4, 1, 5, 7, seed=3) > -0.5
    compare([*qkv(), mask], [Shard(0)] * 4, attend, collectives=False)


def check_dropout_is_that_of_the_whole() -> None:
    """The call follows the same one without dropout, whose decision to shard must not be remembered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from flash4_torch.ops.sharding import beside

    tensors = qkv(Sq=16, Sk=16)
    rng_state = torch.tensor([1234, 5])
    mesh = init_device_mesh("cpu", (2,))
    sharded = [distribute_tensor(t, mesh, [Shard(0)]) for t in tensors]
    attend(*sharded)

    def drop(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Any:
        return ops.attention(q, k, v, None, None, state, PLAIN._replace(dropout_p=0.5))

    whole = drop(*tensors, rng_state)
    results = drop(*sharded, beside(sharded[0], rng_state, is_state=True))
    assert results[0].placements == (Replicate(),)
    ours, theirs = grads(results, sharded), grads(whole, tensors)
    for a, b in zip([*results, *ours], [*whole, *theirs], strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


def check_varlen_heads() -> None:
    from torch.distributed.tensor import Replicate, Shard

    shapes = ((9, 4, 8), (11, 2, 8), (11, 2, 8))
    tensors = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    lengths = [torch.tensor([0, 2, 9], dtype=torch.int32), torch.tensor([0, 3, 11], dtype=torch.int32)]

    def packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        sizes = {"max_seqlen_q": 7, "max_seqlen_k": 8}
        return ops.attention_varlen(
            q, k, v, cu_q, cu_k, None, None, **sizes, options=PLAIN._replace(window_right=0)
        )

    compare([*tensors, *lengths], [Shard(1)] * 3 + [Replicate()] * 2, packed, collectives=False)


def check_public_functions_and_plain_companions() -> None:
    """Sinks, a mask and cu_seqlens are plain tensors, which every rank holds whole."""
    from torch.distributed.tensor import Shard

    mask, ends = normal(4, 1, 6, 6, seed=7), torch.tensor([0, 2, 6])
    sinks = normal(4, seed=8)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash4_torch.attention(q, k, v, attn_mask=mask, sinks=sinks, softcap=2.0, return_lse=True)

    def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Any:
        tensors = (x.transpose(1, 2) for x in (q, k, v))
        return (flash4_torch.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True),)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        ends_of = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        return flash4_torch.attention_varlen(q, k, v, **ends_of, sinks=sinks, causal=True, return_lse=True)

    for dim in (0, 2):
        for call in (masked, heads_first):
            compare(qkv(Sq=6, Sk=6), [Shard(dim)] * 3, call, collectives=False)
    compare([x[0].detach().requires_grad_() for x in qkv(Sq=6, Sk=6)], [Shard(1)] * 3, packed, False)


def check_plain_sinks_get_the_whole_gradient() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    sinks, mesh, found = normal(4, seed=8).requires_grad_(), init_device_mesh("cpu", (2,)), []
    for place in (lambda x: x, lambda x: distribute_tensor(x, mesh, [Shard(0)])):
        out = flash4_torch.attention(*map(place, qkv()), sinks=sinks, causal=True)
        found += torch.autograd.grad((out * out.detach().cos()).sum(), sinks)
    torch.testing.assert_close(*found)


def check_a_sharded_sequence_is_gathered() -> None:
    from torch.distributed.tensor import Shard

    def weighted(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return ops.attention_and_weights(q, k, v, None, None, None, PLAIN, False)

    for call in (attend, weighted):
        compare(qkv(Sq=6, Sk=6), [Shard(1)] * 3, call, collectives=True)


def check_weights() -> None:
    from torch.distributed.tensor import Shard

    for dim, average in ((0, False), (0, True), (2, False), (2, True)):

        def weighted(q: Tensor, k: Tensor, v: Tensor, average: bool = average) -> Any:
            return ops.attention_and_weights(q, k, v, None, None, None, PLAIN, average)

        # A mean over heads needs those of all shards.
        compare(qkv(), [Shard(dim)] * 3, weighted, collectives=average and dim == 2)


class Block(nn.Module):
    """Attention between projections, as models write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(32, 16)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8)) for f in (self.q, self.k, self.v))
        return self.out(flash4_torch.attention(q, k, v, causal=True).flatten(2))


def compare_modules(make: Callable[[], nn.Module], shard: Callable[[nn.Module], nn.Module], x: Any) -> None:
    """Asserts equal outputs and gradients of a module and of one whose parameters are sharded."""
    found = []
    for model, given in ((make(), x[0]), (shard(make()), x[1])):
        out = model(given)
        out = out[0] if isinstance(out, tuple) else out
        (out * out.detach().cos()).sum().backward()
        tensors = [out.detach(), *(p.grad for p in model.parameters())]
        found.append([t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors])
    for mine, right in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, right)


def check_tensor_parallel_model() -> None:
    """Projections give DTensors sharded along heads; nobody calls to_local."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, x = init_device_mesh("cpu", (2,)), normal(2, 6, 16, seed=0)
    plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v")}
    plan["out"] = RowwiseParallel()
    compare_modules(Block, lambda model: parallelize_module(model, mesh, plan), (x, x))


def check_multihead_attention() -> None:
    """Data parallel, and tensor parallel with parameters sharded along heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    mesh, x = init_device_mesh("cpu", (2,)), normal(4, 6, 16, seed=0)
    dims = {"in_proj_weight": 0, "in_proj_bias": 0, "weight": 1}

    def along_heads(_: str, module: nn.Module, mesh: Any) -> None:
        for name, p in list(module.named_parameters(recurse=False)):
            placement = Shard(dims[name]) if name in dims else Replicate()
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [placement])))

    class Self(nn.Module):
        def __init__(self, need_weights: bool):
            super().__init__()
            torch.manual_seed(0)
            self.need_weights = need_weights
            self.attention = flash4_torch.MultiheadAttention(16, 4, batch_first=True).double()

        def forward(self, x: Tensor) -> Any:
            padding = torch.zeros(4, 6, dtype=torch.bool)
            padding[1, 4:] = True
            return self.attention(x, x, x, padding, need_weights=self.need_weights)

    ways: list[tuple[Any, Any]] = [(Shard(0), None), (Replicate(), along_heads)]
    # torch's linear takes a sharded sequence since then.
    ways += [(Shard(1), None)] if torch.__version__ >= (2, 13) else []
    for need_weights in (False, True):
        for placement, partition in ways:
            compare_modules(
                lambda need=need_weights: Self(need),
                lambda model, partition=partition: distribute_module(model, mesh, partition),
                (x, distribute_tensor(x, mesh, [placement])),
            )


def check_no_shard_lacks_its_key_heads() -> None:
    """Hk = 4 divides over 2 ranks of a (3, 2) mesh but not over 3; a fake process group needs one process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=6)
    mesh = init_device_mesh("cpu", (3, 2))

    def result_of(*placed: Any) -> tuple[Any, ...]:
        q, k, v = (distribute_tensor(t, mesh, placed) for t in qkv(B=3, Hq=8, Hk=4))
        return attend(q, k, v)[0].placements

    assert result_of(Replicate(), Shard(2)) == (Replicate(), Shard(2))
    assert result_of(Shard(0), Shard(2)) == (Shard(0), Shard(2))
    assert not result_of(Shard(2), Replicate())[0].is_shard(2)
    assert not result_of(Shard(2), Shard(2))[0].is_shard(2)


# The last check takes the process group away.
CHECKS = {name.removeprefix("check_"): f for name, f in list(globals().items()) if name.startswith("check_")}


def run_checks() -> dict[str, str | None]:
    """Every check on this rank, with its traceback or None."""
    outcome: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            check()
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc()
    return outcome


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[dict[str, str | None]]]:
    own = Ranks(2)
    yield own.run(run_checks)
    own.stop()


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name: str, outcomes: list[dict[str, str | None]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome[name] is None, f"rank {rank}: {outcome[name]}"
