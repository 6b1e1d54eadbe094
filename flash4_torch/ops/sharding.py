"""Sharding rules for DTensor: `torch.ops.flash4` attention over batch and heads without a collective.

    q, k, v     Shard(0): batch        Shard(2): heads, where Hq and Hk are divisible by the shards
    out         like q                 lse Shard(0) or Shard(1)
    attn_mask   sharded along with q; along a dimension it broadcasts over it is replicated, and its gradient
                is a Partial sum there
    sinks       Shard(0) along heads; along the batch replicated, and their gradient is a Partial sum
    weights     Shard(0), or Shard(1) where they are not averaged over heads

Packed (varlen) tensors shard over heads, dimension 1, with replicated cu_seqlens. With dropout everything is
replicated: dropout masks are keyed by batch and head index, and each shard counts its own from zero. Masks,
sinks and cu_seqlens may be plain tensors, which every rank holds whole: they count as replicated.

This is not context parallelism: a sharded sequence is gathered, as DTensor does wherever an operator has no
rule for a placement, and `distributed` has rings and all-to-alls. torch's own `context_parallel` runs our
kernels on CUDA once `integrations.torch_sdpa` is activated, because its ring calls the aten operators.

Importing this module imports torch.distributed.tensor, which takes most of a second; so it is imported only
once that is loaded anyway.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from . import check, schema

Dims = dict[str, int]
"""The dimension at which the axis lies, by the schema's names of the tensors that have it."""

_DENSE_ROWS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
_LSE = ("lse", "lse_low", "dlse")
_OF_SCORES = ("attn_mask", "dmask", "weights", "dweights")
_BATCH: Dims = dict.fromkeys((*_DENSE_ROWS, *_LSE, *_OF_SCORES), 0)
_SINKS: Dims = {"sinks": 0, "dsinks": 0}
_HEADS: Dims = dict.fromkeys(_DENSE_ROWS, 2) | dict.fromkeys((*_LSE, *_OF_SCORES), 1) | _SINKS
_PACKED_HEADS: Dims = dict.fromkeys(_DENSE_ROWS, 1) | dict.fromkeys(("lse", "dlse"), 0) | _SINKS

_AXES: dict[str, tuple[Dims, ...]] = {
    "attention": (_BATCH, _HEADS),
    "attention_backward": (_BATCH, _HEADS),
    "attention_varlen": (_PACKED_HEADS,),
    "attention_varlen_backward": (_PACKED_HEADS,),
    "attention_weights": (_BATCH, _HEADS),
    "attention_weights_signed": (_BATCH, _HEADS),
    "attention_weights_backward": (_BATCH, _HEADS),
}


@cache
def register() -> None:
    """Registers our operators with DTensor; calling it again does no harm."""
    for name, axes in _AXES.items():
        op = getattr(schema, name)
        # Not `register_sharding`: its cache of decisions ignores dropout_p and mask_grad, and its rules
        # cannot see into how many shards the mesh splits the heads.
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
            op, _Strategy(op, axes), RuntimeSchemaInfo(_first_rule(op), ["dropout_p", "mask_grad"])
        )


def beside(q: Tensor, x: Tensor, is_state: bool = False) -> Tensor:
    """A plain tensor in a form that an operator takes with `q`: replicated, if `q` is a DTensor.

    is_state: it is the state of a generator, which every rank has drawn for itself; the first rank's counts.
    """
    if not isinstance(q, DTensor) or isinstance(x, DTensor):
        return x
    mesh = q.device_mesh
    replicated = [Replicate()] * mesh.ndim
    if is_state:
        return distribute_tensor(x, mesh, replicated)
    return DTensor.from_local(x, mesh, replicated, run_check=False)


def check_sequence(q: Tensor) -> None:
    """Requires that no sequence is gathered whose order torch's `context_parallel` may have changed."""
    if isinstance(q, DTensor) and any(p.is_shard(q.dim() - 3) for p in q.placements):
        check.not_of_torchs_context_parallel("q")


def _first_rule(op: Any) -> int:
    """Index of the first argument that is not a tensor; all later ones are options of the call."""
    return [argument.name for argument in op._schema.arguments].index("scale")


class _Strategy:
    """The acceptable placements of inputs and outputs, given the inputs' shapes."""

    def __init__(self, op: Any, axes: tuple[Dims, ...]):
        self._arguments = [argument.name for argument in op._schema.arguments]
        self._results = [result.name for result in op._schema.returns]
        self._axes = axes

    def __call__(self, call: OpSchema) -> OpStrategy:
        given = dict(zip(self._arguments, call.args_schema, strict=False)) | call.kwargs_schema
        inputs = {name: tuple(x.shape) for name, x in given.items() if isinstance(x, OpStrategy)}
        axes = () if given["dropout_p"] else self._axes
        if given.get("average_heads"):
            # The mean would be over a shard's heads, in the backward, too.
            axes = tuple(dims for dims in axes if dims is not _HEADS)
        names = list(inputs)
        return expand_to_full_mesh_op_strategy(
            call.get_mesh_from_args(),
            call,
            [self._all_replicated(inputs), *(self._along(dims, inputs, given) for dims in axes)],
            input_index=len(self._results),
            is_valid_strategy_cb=lambda specs, _: _heads_divide(dict(zip(names, specs, strict=True))),
        )

    def _all_replicated(self, inputs: dict[str, tuple[int, ...]]) -> list[Placement | None]:
        return [Replicate()] * (len(self._results) + len(inputs))

    def _along(
        self, dims: Dims, inputs: dict[str, tuple[int, ...]], given: dict[str, Any]
    ) -> list[Placement | None]:
        """Placements of results and inputs, sharded along one axis."""
        mask = inputs.get("attn_mask")
        mask_broadcasts = mask is not None and mask[dims["attn_mask"]] == 1

        def place(name: str) -> Placement:
            if name == "dmask" and not given["mask_grad"]:
                return Replicate()
            if name == "dmask" and mask_broadcasts:
                return Partial()
            if name == "dsinks" and "sinks" not in inputs:
                return Replicate()
            if name == "dsinks" and name not in dims:
                return Partial()
            if name not in dims or (name == "attn_mask" and mask_broadcasts):
                return Replicate()
            return Shard(dims[name])

        return [place(name) for name in (*self._results, *inputs)]


def _heads_divide(specs: dict[str, Any]) -> bool:
    """Whether every shard of q's heads finds all of its KV heads in k's shard."""
    heads_dim = len(specs["q"].shape) - 2
    shards = 1
    for i, placement in enumerate(specs["q"].placements):
        if placement.is_shard(heads_dim):
            shards *= specs["q"].mesh.size(i)
    return all(specs[name].shape[heads_dim] % shards == 0 for name in ("q", "k"))
