"""Kernels for programmable attention: the calls that they serve, and their launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...configs.splits import Split
from ...configs.types import Features, Mods
from ...errors import TraceError
from ...flex import ramp
from ...flex.program import Derivative, parse_derivative
from ...flex_problem import FlexGradients, FlexInputs, FlexProblem, FlexSaved, new_out
from ...kernels.common import lowering
from ...problem import Inputs, Saved
from .. import tile_counters
from ..base import Order, Results
from ..compiled import TARGETS, Target, backward, forward, limits, prepared
from ..compiled.backend import num_sms
from ..compiled.backward import Kernels
from ..compiled.served import OnTargets
from ..compiled.targets import BackwardConfig, Find, ForwardConfig
from ..compiled.tensors import allocator_like, is_empty, is_readable, readable, unpad
from ..emulator import Emulator, emulated_find, emulated_num_sms, emulated_target, why_not_emulated
from ..tiled import sinks_gradient
from ..views import Layout
from . import intervals, totals
from .base import FlexBackwardLaunch, FlexLaunch
from .bits import TablesOf
from .captured import element, scalars_of
from .intervals import Bounds, Reduced, Segments
from .plain import plain_inputs, plain_problem
from .tables import TileSize, kept, tables
from .tiled import mods_of, program_of


class Compiled(OnTargets):
    """The backend that serves the GPUs of its targets."""

    def why_not(self, problem: FlexProblem) -> list[str]:
        spec = problem.spec
        if spec.device != "cuda":
            return [f"the tensors are on {spec.device}, and it serves cuda"]
        target = self._any_target(spec.capability)
        return [*self._why_not_here(spec.capability), *why_not_kernels(target, problem)]

    def forward(self, inputs: FlexInputs, problem: FlexProblem) -> tuple[Tensor, Tensor, Tensor]:
        target, (inputs, problem, bounds, bits) = self.target(problem), self._reduced(inputs, problem)
        spec, mods = problem.spec, inputs.mods
        q, sinks = inputs.q, mods.sinks
        *batch, Sq, Hq, _ = q.shape
        lse = q.new_empty(*batch, Hq, Sq, dtype=torch.float32)
        if is_empty(plain_inputs(inputs), plain_problem(problem)):
            lse = lse.fill_(-math.inf) if sinks is None else lse.copy_(sinks[:, None].expand(lse.shape))
            return new_out(q, spec.Dv).zero_(), lse, torch.zeros_like(lse)
        given, problem, bounds = _by_segments(inputs, problem, bounds)
        index, find = q.get_device(), self.find(problem)
        features, kernel = _kernel(target, find, problem, self.sms(index))
        read = given._replace(q=readable(q), k=readable(inputs.k), v=readable(inputs.v))
        arguments = _forward_arguments(inputs, problem, kernel.config, bounds, bits, find)(mods.captured)
        out = new_out(q, features.Dv)
        low = torch.empty_like(lse) if features.large_scores else None
        shapes = forward.shapes_of(read.q, read.v)
        launch = forward.launcher(kernel, shapes, kernel.params, allocator_like(read.q))
        launch(Results(out, lse, low), read, self.counter(index), arguments)
        if features.Dv != spec.Dv:
            out = new_out(q, spec.Dv).copy_(out[..., : spec.Dv])
        return out, lse, torch.zeros_like(lse) if low is None else low

    def backward(self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem) -> FlexGradients:
        target, (inputs, problem, bounds, bits) = self.target(problem), self._reduced(inputs, problem)
        given, problem, bounds = _by_segments(inputs, problem, bounds)
        plain, mods = plain_problem(problem), inputs.mods
        rows = Saved(saved.dout, saved.dlse, saved.out, saved.lse)
        sums = _sums(mods.captured, problem.spec.dcaptured, exact=problem.spec.deterministic)
        if is_empty(given, plain):
            dq, dk, dv = (x.new_zeros(x.shape) for x in inputs[:3])
            return FlexGradients(dq, dk, dv, _like(sums, mods.captured), sinks_gradient(rows, given))
        index = inputs.q.get_device()
        find = self.find(problem)
        of_mods, config, kernels = _backward_kernels(target, find, problem, self.sms(index))
        q, k, v, out, dout = (readable(x) for x in (*inputs[:3], saved.out, saved.dout))
        arguments = _backward_arguments(inputs, problem, of_mods, config, bounds, bits, find)
        given_to_main = arguments(mods.captured, sums)
        launch = backward.sequence(
            kernels,
            backward.shapes_of(q, k, v, given.cu_seqlens_q, kernels),
            q.dtype,
            problem.scale,
            kernels.params,
            lambda mask: given_to_main,
            allocator_like(q),
        )
        rows = Saved(
            dout,
            None if saved.dlse is None else saved.dlse.contiguous(),
            out,
            saved.lse.contiguous(),
            lse_low=saved.lse_low.contiguous() if of_mods.makes_large_scores else None,
        )
        found = launch(rows, given._replace(q=q, k=k, v=v), None, self.counter(index))
        D, Dv = problem.spec.D, problem.spec.Dv
        dq, dk, dv = unpad(found.dq, D), unpad(found.dk, D), unpad(found.dv, Dv)
        return FlexGradients(dq, dk, dv, _like(sums, mods.captured), found.dsinks)

    def prepare(self, inputs: FlexInputs, problem: FlexProblem, order: Order) -> FlexLaunch | None:
        if not _is_prepared(inputs, problem):
            return None
        target, (inputs, problem, bounds, bits) = self.target(problem), self._reduced(inputs, problem)
        given, problem, bounds = _by_segments(inputs, problem, bounds)
        ends = given.cu_seqlens_q, given.cu_seqlens_k
        index, find = inputs.q.get_device(), self.find(problem)
        features, kernel = _kernel(target, find, problem, self.sms(index))
        arguments = _forward_arguments(inputs, problem, kernel.config, bounds, bits, find)
        run = prepared.forward(
            kernel,
            given,
            plain_problem(problem),
            index,
            arguments,
            order,
            Layout.of(new_out(inputs.q, features.Dv)),
            features.large_scores,
        )

        def launch(q: Tensor, k: Tensor, v: Tensor, captured: Captured) -> tuple[Any, ...]:
            return run(q, k, v, captured, None, None, *ends)[:3]

        return launch

    def prepare_backward(
        self, saved: FlexSaved, inputs: FlexInputs, problem: FlexProblem, order: Order
    ) -> FlexBackwardLaunch | None:
        if not _is_prepared(inputs, problem) or problem.spec.dlse:
            return None
        if not is_readable(saved.out) or not saved.lse.is_contiguous():
            return None
        target, (inputs, problem, bounds, bits) = self.target(problem), self._reduced(inputs, problem)
        given, problem, bounds = _by_segments(inputs, problem, bounds)
        ends = given.cu_seqlens_q, given.cu_seqlens_k
        index, find = inputs.q.get_device(), self.find(problem)
        of_mods, config, kernels = _backward_kernels(target, find, problem, self.sms(index))
        arguments = _backward_arguments(inputs, problem, of_mods, config, bounds, bits, find)

        def of_both(given: Any) -> ModArgs | None:
            captured, sums = given
            found: ModArgs | None = arguments(captured, sums)
            return found

        run = prepared.backward(
            kernels,
            given,
            plain_problem(problem),
            index,
            of_both,
            saved.dout,
            order,
        )
        wanted, has_low = problem.spec.dcaptured, of_mods.makes_large_scores

        def launch(
            dout: Tensor,
            out: Tensor,
            lse: Tensor,
            low: Tensor | None,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            captured: Captured,
        ) -> tuple[Any, ...]:
            sums = _sums(captured, wanted, exact=False)
            given = captured, sums
            rows = dout, out, lse, low if has_low else None
            dq, dk, dv, _ = run(*rows, q, k, v, given, None, None, *ends)
            return dq, dk, dv, _like(sums, captured)

        return launch

    def find_on(self, capability: tuple[int, int]) -> Find | None:
        """What finds its kernels on a GPU of that compute capability, if it serves any call there."""
        if self._why_not_here(capability):
            return None
        return self._targets[capability].find

    def _reduced(self, inputs: FlexInputs, problem: FlexProblem) -> Reduced:
        target, find = self.target(problem), self.find(problem)
        return intervals.reduced(inputs, problem, target.has_bounds, takes_bits(target, problem), find)

    # The emulator's backend overrides the following methods.

    def target(self, problem: FlexProblem) -> Target:
        return self._targets[problem.spec.capability]

    def find(self, problem: FlexProblem) -> Find:
        return self.target(problem).find

    def sms(self, index: int) -> int:
        return num_sms(index)

    def counter(self, index: int) -> Tensor:
        return tile_counters.counter(index)


class Emulated(Compiled):
    """The kernels of the GPU that FLASH4_ARCH names, run in the emulator."""

    def __init__(self) -> None:
        super().__init__(Emulator.name, *TARGETS.values())
        self._counter = torch.zeros(1, dtype=torch.int32)

    def find_on(self, capability: tuple[int, int]) -> Find | None:
        return None

    def why_not(self, problem: FlexProblem) -> list[str]:
        if why := why_not_emulated(problem.spec.device):
            return why
        return list(why_not_kernels(emulated_target(), problem))

    def target(self, problem: FlexProblem) -> Target:
        return emulated_target()

    def find(self, problem: FlexProblem) -> Find:
        return emulated_find

    def sms(self, index: int) -> int:
        return emulated_num_sms()

    def counter(self, index: int) -> Tensor:
        return self._counter


_BOUNDS = {False: "", True: "table"}
"""`Mods.bounds` for calls without bounds of rows, and with them."""
_COMMON_KEYS = 64
"""Keys that the blocks of block masks mostly have a multiple of."""
_WIDEST = 256
"""Columns of the widest heads that kernels with functions have."""


@lru_cache(maxsize=1024)
def why_not_kernels(target: Target, problem: FlexProblem) -> tuple[str, ...]:
    """The reasons why the target's kernels cannot serve the problem, on whatever device it is."""
    spec = problem.spec
    why = list(limits(target, plain_problem(problem)))
    if spec.backward and not why:
        # Functions take registers that the same call without them leaves.
        mods = Mods(spec.score_mod, spec.mask_mod, "" if spec.block is None else "rows")
        why += target.backward_configs.limits(backward.features_of(plain_problem(problem), mods))
    if spec.dtype == torch.float32:
        why.append(f"the dtype is {spec.dtype}, and functions are served in bfloat16 and float16")
    if max(spec.D, spec.Dv) > _WIDEST:
        why.append(f"D is {spec.D} and Dv is {spec.Dv}, and functions are served up to {_WIDEST}")
    for name, text in (("score_mod", spec.score_mod), ("mask_mod", spec.mask_mod)):
        if text:
            why += lowering.limits(name, program_of(text))
    if spec.backward and spec.score_mod and not why:
        why += _why_not_differentiated(problem)
    return tuple(why)


@lru_cache(maxsize=1024)
def takes_bits(target: Target, problem: FlexProblem) -> bool:
    """Whether the target's kernels read bits in the place of the problem's mask."""
    return not limits(target, plain_problem(problem._replace(spec=problem.spec._replace(bits=1))))


def _why_not_differentiated(problem: FlexProblem) -> list[str]:
    spec = problem.spec
    try:
        derived = derivative_of(spec.score_mod, spec.dcaptured)
    except TraceError as error:
        return [str(error)]
    why = lowering.limits("score_mod's derivative", derived.program)
    if spec.deterministic and derived.gathers:
        why += totals.limits(spec.dcaptured_elements, problem.extent, len(derived.gathers))
    return why


def _by_segments(
    inputs: FlexInputs, problem: FlexProblem, bounds: Bounds | None
) -> tuple[Inputs, FlexProblem, Bounds | None]:
    """The call without its programs and blocks, as one of segments where these serve it instead of bounds.

    A score_mod has positions of the batch entry, and kernels those of the segment.
    """
    given = plain_inputs(inputs)
    segments = None if bounds is None or problem.spec.score_mod else bounds.segments
    if segments is None:
        return given, problem, bounds
    given = given._replace(cu_seqlens_q=segments.ends, cu_seqlens_k=segments.ends)
    return given, _of_segments(problem, segments), None


def _of_segments(problem: FlexProblem, segments: Segments) -> FlexProblem:
    """The problem as one of sequences in the place of bounds."""
    band, longest = segments.band, segments.longest
    spec = problem.spec._replace(varlen=True, segments=True, bounds=False)
    spec = spec._replace(left=False, right=band.right is not None)
    extent = problem.extent._replace(B=len(segments.ends) - 1, Sq=longest, Sk=longest)
    return problem._replace(spec=spec, extent=extent, band=band)


class Kernel(NamedTuple):
    """The forward's kernels, and the features of the call, which are not split."""

    features: Features
    compiled: forward.Kernel


@lru_cache(maxsize=1024)
def _kernel(target: Target, find: Find, problem: FlexProblem, num_sms: int) -> Kernel:
    plain, divided = plain_problem(problem), chosen_split(target, problem, num_sms)
    if divided is not None:
        features, split = divided
        return Kernel(features, forward.with_splits(target, plain, split, features, num_sms, find))
    features, config = chosen(target, problem)
    function = find(target.forward, (features, config))
    params = forward.params_of(target, plain, config, num_sms)
    return Kernel(features, forward.Kernel(function, config, params))


@lru_cache(maxsize=1024)
def _backward_kernels(
    target: Target, find: Find, problem: FlexProblem, num_sms: int
) -> tuple[Mods, BackwardConfig, Kernels]:
    mods, config = chosen_backward(target, problem, num_sms)
    return mods, config, backward.decide(target, plain_problem(problem), num_sms, find, mods)


class Choice(NamedTuple):
    """The kernel that serves a call."""

    features: Features
    config: ForwardConfig


@lru_cache(maxsize=1024)
def chosen(target: Target, problem: FlexProblem) -> Choice:
    """The forward's kernel, if keys are in one piece."""
    plain = plain_problem(problem)
    if problem.spec.bits:
        return _chosen_for_bits(target, problem)
    features = _features_of(problem)
    config = forward.config_of(target, plain, None, features)
    return Choice(_with_states(features, problem, config), config)


class SplitChoice(NamedTuple):
    """The features of a call, and how the keys of its tiles are divided."""

    features: Features
    split: Split


@lru_cache(maxsize=1024)
def chosen_split(target: Target, problem: FlexProblem, num_sms: int) -> SplitChoice | None:
    """How the keys of the forward's tiles are divided, None if they are in one piece."""
    plain = plain_problem(problem)
    features = forward.features_of(plain) if problem.spec.bits else _features_of(problem)
    split = forward.split_of(target, plain, num_sms, features)
    if split is None:
        return None
    return SplitChoice(_with_states(features, problem, split.config), split)


def _features_of(problem: FlexProblem) -> Features:
    """What the kernel must have, in whatever tiles."""
    spec = problem.spec
    blocks, ramp = "", has_ramp(problem)
    if spec.block is not None:
        blocks = _states(spec.block[1], _COMMON_KEYS, problem.extent.Sk)
    mods = Mods(spec.score_mod, spec.mask_mod, blocks, bounds=_BOUNDS[spec.bounds], ramp=ramp)
    return forward.features_of(plain_problem(problem), mods)


def _with_states(features: Features, problem: FlexProblem, config: ForwardConfig) -> Features:
    """The features in tiles of a config, which a block mask's blocks may be as long as."""
    block = problem.spec.block
    if not features.mods.blocks or block is None:
        return features
    states = _states(block[1], config.keys, problem.extent.Sk)
    return features._replace(mods=features.mods._replace(blocks=states))


def _chosen_for_bits(target: Target, problem: FlexProblem) -> Choice:
    """attn_mask's kernel; in tiles for lists of blocks, if its own would lie across the mask's blocks and
    have fewer keys.

    Tiles of 192 rows visit 6 to 21 % more of masks whose blocks have 128 (`flex/NOTES.md`). At D 64, where
    they have as many keys, three warpgroups make up for it; at D 128 they do not.
    """
    plain, rows = plain_problem(problem), problem.spec.bits
    config = forward.config_of(target, plain, None)
    if config.queries % rows and rows % config.queries:
        listed = problem.spec._replace(bits=0, block=(rows, 1))
        aligned = chosen(target, problem._replace(spec=listed)).config
        config = aligned if config.keys < aligned.keys else config
    return Choice(forward.features_of(plain), config)


class BackwardChoice(NamedTuple):
    """What the backward's kernels do to scores, and the tiles of the main one."""

    mods: Mods
    config: BackwardConfig


@lru_cache(maxsize=1024)
def chosen_backward(target: Target, problem: FlexProblem, num_sms: int) -> BackwardChoice:
    """The backward's kernels."""
    spec, extent = problem.spec, problem.extent
    mods = _backward_features(problem).mods
    config = backward.config_of(target, plain_problem(problem), num_sms, mods)
    if spec.block is not None:
        mods = mods._replace(blocks=_states(spec.block[0], config.queries, extent.Sq))
    return BackwardChoice(mods, config)


def _backward_features(problem: FlexProblem) -> Features:
    spec = problem.spec
    derived = derivative_of(spec.score_mod, spec.dcaptured).text() if spec.score_mod else ""
    blocks = "" if spec.block is None else "rows"
    mods = Mods(spec.score_mod, spec.mask_mod, blocks, derived, _BOUNDS[spec.bounds], has_ramp(problem))
    return backward.features_of(plain_problem(problem), mods)


_LEAST_SCALE = 2.0**-64
"""Ramps are divided by the scale."""
_LONGEST_DISTANCE = 1 << 24
"""Positions that float32 has exactly."""
_LONGEST = 1 << 14
"""Positions up to which a ramp may leave rows with large maxima: gradients take an lse of the size of the
ramp times the length, rounded to float32."""


def has_ramp(problem: FlexProblem) -> bool:
    """Whether score_mod is served as a ramp."""
    text = ramp.of(problem.spec.score_mod) if problem.spec.score_mod else ""
    longest = _LONGEST_DISTANCE if text and ramp.depends_on_distance_alone(text) else _LONGEST
    is_short = max(problem.extent.Sq, problem.extent.Sk) <= longest
    return bool(text) and is_short and problem.scale >= _LEAST_SCALE


@lru_cache(maxsize=256)
def derivative_of(score_mod: str, wanted: tuple[bool, ...]) -> Derivative:
    """The derivative of a score_mod, for the captured tensors that want a gradient."""
    # Deriving needs make_fx, which not every import of the package should load.
    from ...flex.derive import derivative

    return derivative(program_of(score_mod), wanted)


def _states(block: int, columns: int, length: int) -> str:
    """`Mods.blocks` for a mask's blocks of that many columns, and the kernel's."""
    return "rows" if block % columns == 0 or block >= length else "scores"


ModArgs = tuple[Any, ...]
"""What a kernel takes for the mods: `kernels.common.mods.ModArgs`."""


Captured = Sequence[Tensor]
"""score_mod's tensors, then mask_mod's."""
Sums = Sequence["Tensor | None"]
"""What gradients of score_mod's tensors are added to, where they are wanted."""
Arguments = Callable[..., "ModArgs | None"]
"""What a kernel takes for the mods: of captured tensors and, in a backward, their sums."""


def _forward_arguments(
    inputs: FlexInputs,
    problem: FlexProblem,
    config: ForwardConfig,
    bounds: Bounds | None,
    bits: TablesOf | None,
    find: Find,
) -> Arguments:
    if bits is not None:
        made = bits(forward.mask_plan("bool", config), find, False)
        return lambda captured: made
    own = None if bounds is None else bounds.of_rows
    tile = TileSize(config.queries, config.keys, config.pack_gqa)
    return _arguments(inputs, problem, tile, own, (), find, is_transposed=False)


def _backward_arguments(
    inputs: FlexInputs,
    problem: FlexProblem,
    mods: Mods,
    config: BackwardConfig,
    bounds: Bounds | None,
    bits: TablesOf | None,
    find: Find,
) -> Arguments:
    if bits is not None:
        made = bits(backward.mask_plan("bool", config), find, True)
        return lambda captured, sums: made
    own = None if bounds is None else bounds.of_keys
    tile = TileSize(config.cluster_keys, config.queries)
    read = parse_derivative(mods.derivative).tensors if mods.derivative else ()
    return _arguments(inputs, problem, tile, own, read, find, is_transposed=True)


def _arguments(
    inputs: FlexInputs,
    problem: FlexProblem,
    tile: TileSize,
    bounds: Tensor | None,
    read: Sequence[int],
    find: Find,
    *,
    is_transposed: bool,
) -> Arguments:
    """read: the tensors that a derivative reads; `is_transposed`: rows are keys."""
    mods, pair = inputs.mods, mods_of(inputs)
    found = [mod for mod in pair if mod is not None]
    number = sum(len(mod.tensors) for mod in found)
    scalars = tuple([value for mod in found for value in scalars_of(mod)])
    of_blocks = None
    if mods.kv_num_blocks is not None:
        lists = mods.lists
        lengths, size = problem.extent[1:3], (mods.q_block, mods.kv_block)
        how = {"is_decided": pair[1] is None, "is_transposed": is_transposed}
        key = lengths, size, tile, *how.values()
        of_blocks = kept(lists, key, lambda: tables(lists, size, lengths, tile, find, **how))
    if not found and of_blocks is None and bounds is None:
        return lambda captured, sums=(): None

    def arguments(captured: Captured, sums: Sums = ()) -> ModArgs:
        tensors = tuple([element(x) for x in captured[:number]])
        added = tuple([x for i in read if (x := sums[i]) is not None])
        return tensors or None, scalars or None, of_blocks, added or None, bounds

    return arguments


def _is_prepared(inputs: FlexInputs, problem: FlexProblem) -> bool:
    """Whether launches can be prepared: kernels read the call's tensors where they are."""
    mods = inputs.mods
    if is_empty(plain_inputs(inputs), plain_problem(problem)) or not all(map(is_readable, inputs[:3])):
        return False
    return mods.sinks is None and mods.rng_state is None and mods.cu_seqlens_q is None


def _sums(captured: Captured, wanted: Sequence[bool], *, exact: bool) -> list[Tensor | None]:
    """What the gradients of captured tensors are added to, where they are wanted."""
    pairs = zip(captured, wanted, strict=False)
    return [totals.zeros(x, exact=exact) if wants else None for x, wants in pairs]


def _like(sums: Sums, captured: Captured) -> list[Tensor | None]:
    """Gradients of captured tensors, in their dtypes and shapes."""
    pairs = zip(sums, captured, strict=False)
    return [None if x is None else totals.rounded(x).to(of.dtype).view(of.shape) for x, of in pairs]
