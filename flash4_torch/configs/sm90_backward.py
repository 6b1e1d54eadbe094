"""The Hopper backward kernel's tiles: which to take for which call, and why.

`TABLE` is read from the top: the first row that admits the call serves it. The last column of a row says what
it was measured at, or that it was not: bfloat16, 32k tokens of hidden size 2048 on an H200, throughput of all
kernels relative to FlashAttention-3's. Where it cites NOTES.md, see "Table rows" in
`kernels/sm90/bwd/NOTES.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from . import programs, sm90
from .sections import Section, Workload, bounded_backward, evenly, fewer_if_long
from .sizes import BackwardSizes, may_end_inside, possible_ends
from .types import SHARED_MEMORY, Features, Mods, Scope, Sm90Backward


class Row(NamedTuple):
    """A row for head sizes up to (D, Dv)."""

    D: int
    Dv: int
    never: tuple[str, ...]
    """Features that the row does not take: names of `_TAKES`."""
    only: tuple[str, ...]
    """Features without which the row is not taken."""
    config: Sm90Backward
    why: str
    kv_head_rows: tuple[int, int] = (0, 0)
    """Query rows of a KV head up to which the scope is `kv_head`, if there are heads enough: without a bound
    to the right, and with one. 0: never."""
    q_head_keys: int = 0
    """Key positions from which the scope is `q_head`, with a bound to the right alone and `_MANY` or more
    query heads for each KV head. 0: never."""

    def admits(self, features: Features) -> bool:
        return (
            features.D <= self.D
            and features.Dv <= self.Dv
            and not any(_TAKES[name](features) for name in self.never)
            and all(_TAKES[name](features) for name in self.only)
            and self.config.shared_memory(features) <= SHARED_MEMORY
        )


_TAKES: dict[str, Callable[[Features], bool]] = {
    "bias": lambda f: f.float_mask,
    "mask": lambda f: f.mask != "" or f.mods.changes_scores,
    "dmask": lambda f: f.dmask,
    "dropout": lambda f: f.dropout,
    "softcap": lambda f: f.softcap,
    "varlen": lambda f: f.varlen,
    "right": lambda f: f.right,
    "deterministic": lambda f: f.deterministic,
    "mods": lambda f: f.mods.changes_scores,
    "ramp": lambda f: f.mods.ramp,
    "blocks": lambda f: bool(f.mods.mask_mod or f.mods.blocks),
    "scores": lambda f: f.mods.derivative_reads_score,
    "sums": lambda f: bool(f.mods.derivative) and programs.has_sums(f.mods.derivative),
    "long": lambda f: bool(f.mods.derivative) and not programs.are_short(f.mods.score_mod, f.mods.derivative),
}
"""`scores`, `sums`: score_mod's derivative reads scores, or has gradients of captured tensors; `long`: one of
both has many operations."""
_HEAVY = ("dropout", "bias", "softcap", "mods")
_ALL = ("dropout", "mask", "softcap", "varlen")
_MORE = ("dropout", "bias", "softcap", "varlen", "blocks", "sums")
"""What programs are not served next to by rows of their own."""
_IN_ORDER = ("right", "deterministic")
_VIA_DQ: dict[str, Any] = {"dkv_via_dq_smem": True, "heads_inner": True, "load_q_first": True}
_UNROLLED: dict[str, Any] = {**_VIA_DQ, "unroll_stages": True}

_MANY = 4
"""The fewest query heads of a KV head for scope `q_head`. Rows and sums of two stay in the cache: at D 128,
causal S 1k, 2k, 4k, `heads_inner` has 1.33, 1.17, 1.09, scope `q_head` 1.24, 1.13, 1.08."""

_PREPROCESS_ROWS = 512
"""The most query rows of a KV head whose statistics its CTA computes itself, with `preprocesses`.

Its tensor cores wait while it reads out and dout: up to 256 KiB, about 6 us at the 40 bytes a nanosecond that
an SM gets. The host takes 7 to 9 us to launch another kernel. An H200 took 1.6 to 2.5 us less in all, up to
these rows; in one case 9 us more (NOTES.md)."""

# fmt: off
_Tiles = Sm90Backward
TABLE = (
    # D   Dv   never, only
    Row(64, 64, _HEAVY, _IN_ORDER,
        _Tiles(128, kv_stages=2, ds_stages=2, round_weights=True, next_tile=True, heads_inner=True),
        "causal S 4k: 0.78 of the speed in any order"),
    Row(64, 64, _HEAVY, (),
        _Tiles(128, kv_stages=2, ds_stages=2, round_weights=True, next_tile=True),
        "full S 512 to 16k: 1.12 to 1.00, causal 1.19 to 0.98; scope kv_head S 256: 1.56 and 1.71 (NOTES.md)",
        kv_head_rows=(512, 1024)),
    Row(64, 64, (*_MORE, "long"), ("ramp",),
        _Tiles(128, kv_stages=2, ds_stages=2, round_weights=True, next_tile=True),
        "unmeasured: ramps like ALiBi"),
    Row(64, 64, (*_MORE, "scores", "long"), ("mods",),
        _Tiles(128, kv_stages=2, round_weights=True, next_tile=True),
        "unmeasured: sums with what depends on places; two stages of dS do not fit next to two numbers more "
        "of each row"),
    Row(64, 64, (), ("sums",), _Tiles(64, ds_stages=2, kv_stages=2),
        "unmeasured: sums of gradients of captured tensors need weights that are not rounded"),
    Row(64, 64, (), (), _Tiles(64, ds_stages=2, kv_stages=2, round_weights=True),
        "unmeasured: features that need registers", kv_head_rows=(512, 512)),
    Row(96, 96, ("dropout", "mask"), _IN_ORDER,
        _Tiles(64, q_stages=3, do_stages=3, ds_stages=2, dq_stages=2, heads_inner=True),
        "causal S 1k, 8k: 0.87, 0.88 of the speed in any order"),
    Row(96, 96, ("dropout", "mask", "right"), (),
        _Tiles(64, q_stages=3, do_stages=3, ds_stages=2, dq_stages=2, **_VIA_DQ),
        "full S 1k: 1.04, without the last three switches 1.03, but causal more; "
        "scope kv_head S 256: 1.36 (NOTES.md)", kv_head_rows=(256, 0)),
    Row(96, 96, ("dropout", "mask"), (), _Tiles(64, ds_stages=2, dq_stages=2, **_UNROLLED),
        "causal S 1k, 8k: 1.06, 1.03, head after head 1.03, 1.01; "
        "scope kv_head S 256, 512: 1.52, 1.29 (NOTES.md)", kv_head_rows=(0, 512)),
    Row(96, 96, ("dropout", "dmask"), (), _Tiles(64, q_stages=3, do_stages=3, ds_stages=2, dq_stages=2),
        "S 8k: full 1.04, causal 1.02; two stages of K and V, one of dQ 1.00 and 0.95"),
    Row(128, 128, (*_MORE, "scores", "long"), ("mods",), _Tiles(64, dq_stages=2, **_UNROLLED),
        "programs like ALiBi, step causal S 2k, 8k: 1.56, 1.67 of Triton's speed; it does not spill"),
    Row(128, 128, (*_MORE, "long"), ("mods",),
        _Tiles(64, dq_stages=2, round_weights=True, **_UNROLLED),
        "programs like softcap, step causal S 2k, 8k: 2.17, 2.24 of Triton's speed; unrounded weights spill"),
    Row(128, 128, _MORE, ("mods",), _Tiles(64, dq_stages=2, round_weights=True),
        "unmeasured: long programs; those of 25 operations for each score spill a little"),
    Row(128, 128, ("dropout", "mask"), ("softcap", "varlen", "right"),
        _Tiles(64, dq_stages=2, heads_inner=True),
        "unmeasured: unroll_stages spills, and so does scope q_head"),
    Row(128, 128, ("dropout", "mask"), (), _Tiles(64, dq_stages=2, **_UNROLLED),
        "full S 1k, 4k, 16k: 1.04, 1.04, 1.01; causal S 512 to 4k: 1.06 to 1.01, 16k: 0.98 to 1.06 "
        "(NOTES.md)",
        kv_head_rows=(512, 512), q_head_keys=1024),
    Row(128, 128, ("dropout", "dmask"), (), _Tiles(64, dq_stages=2),
        "full S 512, 4k, 16k: 1.07, 1.03, 1.01; causal 1.05, 0.99, 1.00; other switches less (NOTES.md)"),
    Row(128, 128, ("bias",), (), _Tiles(64, ds_stages=2, round_weights=True),
        "unmeasured: next to weights that are not rounded, wgmmas are serialised"),
    Row(192, 192, _ALL, _IN_ORDER,
        _Tiles(64, dq_stages=2, role_split=True, cluster=2, v_in_regs=True, heads_inner=True),
        "causal S 1k, 4k, 16k: 0.87, 0.83, 0.96 of the speed in any order; two stages of dS 0.75, 0.70, 0.74 "
        "(NOTES.md)"),
    Row(192, 192, _ALL, ("deterministic",),
        _Tiles(64, dq_stages=2, role_split=True, cluster=2, v_in_regs=True),
        "full S 4k: 0.86 of the speed in any order; one stage of dQ, or one of dO and two of dQ, 0.73"),
    Row(192, 192, _ALL, (), _Tiles(64, ds_stages=2, role_split=True, cluster=2, v_in_regs=True),
        "S 8k: full 1.10, causal 1.04; V in SMEM 1.04 and 0.98, one CTA alone 0.77 and 0.72 (NOTES.md)",
        q_head_keys=4096),
    Row(256, 256, _ALL, _IN_ORDER, _Tiles(64, do_stages=1, role_split=True, cluster=2, heads_inner=True),
        "causal S 1k, 4k, 16k: 0.86, 0.81, 0.88 of the speed in any order, head after head S 4k 0.66"),
    Row(256, 256, _ALL, (), _Tiles(64, do_stages=1, role_split=True, cluster=2),
        "S 1k, 4k, 16k: full 1.11, 1.06, 1.07, causal 1.06, 1.10, 1.10; one CTA alone 0.90 and 0.84 "
        "(NOTES.md)", q_head_keys=8192),
    Row(192, 192, (), (), _Tiles(64, role_split=True),
        "unmeasured: dK and dV each take the registers of a warpgroup; gradients of masks, too"),
    Row(256, 256, (), (), _Tiles(64, do_stages=1, role_split=True, dq_passes=2),
        "unmeasured: only a quarter of dQ at a time fits next to dK and dV"),
)
# fmt: on


def backward(features: Features, sizes: BackwardSizes) -> Sm90Backward:
    """The config of a call."""
    config = _config(features, sizes)
    return config._replace(ragged_k=may_end_inside(features, sizes, config.cluster_keys))


_RUN_LENGTH, _TILES_IN_RUNS, _HEADS_INNER_IN_SECTION = 8, 32, 8
"""Tiles of a KV head that follow one another with `heads_inner`, if it has up to 32 tiles; else KV heads of a
section. The best of runs of 4 to 16 and of 4 to 32 heads, at S 2k and 8k."""
_ORDERED, _ORDERED_IF_BOUNDED = 12, 32
"""KV heads of a section of the deterministic backward, the fastest at S 4k: of 8 to 32, and of 16 to 64."""
_ORDERED_FROM_LAST = {64: 64, 128: 48, 192: 24, 256: 32}
"""The same by head sizes, where tiles with a right bound begin at the last block, one block after another:
two to three tiles of a head, or pairs of them, at a time."""


def row(features: Features, kv_head_rows: int = 0) -> Row:
    """The row that serves a call: see `backward`."""
    kv_head_row = _kv_head_row(features)
    return (
        kv_head_row
        if kv_head_row is not None and 0 < kv_head_rows <= kv_head_row.kv_head_rows[features.right]
        else _row(features)
    )


def _config(features: Features, sizes: BackwardSizes) -> Sm90Backward:
    served_by, kv_head_rows = row(features, sizes.kv_head_rows), sizes.kv_head_rows
    if served_by is _kv_head_row(features) and 0 < kv_head_rows <= served_by.kv_head_rows[features.right]:
        preprocesses = sizes.may_preprocess and kv_head_rows <= _PREPROCESS_ROWS
        return _kv_head_config(served_by, preprocesses)
    may_be_q_head = sizes.group >= _MANY and _may_be_q_head(served_by, features)
    if may_be_q_head and sizes.Sk >= served_by.q_head_keys:
        return _q_head_config(served_by)
    return served_by.config


def section(features: Features, config: Sm90Backward, work: Workload) -> Section:
    """The order of tiles.

    Rows and sums of all heads of a group do not stay in the cache. Then `run_length` tiles of one KV head
    follow one another, and visit the same rows at the same time.
    """
    inner = config.heads_inner and not features.lists_blocks
    if config.scope == Scope.KV_HEAD:
        return Section(1)
    if features.deterministic:
        return Section(min(_ordered_heads(features, inner), work.heads))
    # Tiles of a mask differ in length, too.
    if not (features.left or features.right or features.lists_blocks):
        return Section(1)
    tiles = -(-work.Sk // config.cluster_keys)
    if inner and work.group > 1:
        if tiles <= _TILES_IN_RUNS:
            return Section(1, run_length=_RUN_LENGTH)
        heads = fewer_if_long(_HEADS_INNER_IN_SECTION, work.Sq)
        return Section(evenly(work.heads, min(heads, work.heads)))
    return bounded_backward(work, features.D, features.Dv, tiles, left=features.left)


def _ordered_heads(features: Features, inner: bool) -> int:
    """KV heads of a section: its tiles wait for each other; the more heads, the fewer of each at a time."""
    if features.right and inner:
        return next(heads for D, heads in _ORDERED_FROM_LAST.items() if max(features.D, features.Dv) <= D)
    return _ORDERED_IF_BOUNDED if features.left or features.right else _ORDERED


def limits(features: Features) -> list[str]:
    """Why no row serves the features, whose head sizes may be any: those of the forward."""
    return sm90.limits(features)


def reachable(features: Features, group: int | None = None) -> tuple[Sm90Backward, ...]:
    """Every config that `backward` returns for some sizes, and for that group or any."""
    ragged = possible_ends(features)
    row, kv_head_row = _row(features), _kv_head_row(features)
    configs = [row.config]
    if kv_head_row is not None:
        configs += [_kv_head_config(kv_head_row, preprocesses) for preprocesses in (False, True)]
    if (group or _MANY) >= _MANY and _may_be_q_head(row, features):
        configs.append(_q_head_config(row))
    return tuple(config._replace(ragged_k=ragged_k) for config in configs for ragged_k in ragged)


def _kv_head_row(features: Features) -> Row | None:
    """The row for scope `kv_head`, if it may be: the first tile of a head has to see all that others see.

    Sums have an order then anyway, so the row need not provide one.
    """
    row = _row(features._replace(deterministic=False))
    f = features
    bounded = (f.left or any(f.mods)) and f.mods != Mods(bounds="stacked")
    none = bounded or f.mask or f.varlen or not row.kv_head_rows[f.right]
    return None if none else row


def _kv_head_config(row: Row, preprocesses: bool) -> Sm90Backward:
    return row.config._replace(scope=Scope.KV_HEAD, heads_inner=True, preprocesses=preprocesses)


def _may_be_q_head(row: Row, features: Features) -> bool:
    f = features
    return bool(row.q_head_keys) and f.right and not (f.left or f.mask or any(f.mods))


def _q_head_config(row: Row) -> Sm90Backward:
    return row.config._replace(scope=Scope.Q_HEAD)


@lru_cache(maxsize=1024)
def _row(features: Features) -> Row:
    return next(row for row in TABLE if row.admits(features))
