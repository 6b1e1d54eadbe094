"""Tracing: a user's function of one score, run once on numbers without data, becomes a program.

Nothing of its source is read. Tensors that it captures, wherever it keeps them (closures, partial, attributes
of objects and modules), become arguments, and so do its Python numbers, unless they decide on the course of
Python itself or are an exponent or an integer above 2**53: functions that do the same have the same program.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from .. import forks
from ..errors import ArgumentError, DeviceError, DtypeError, TraceError
from .build import Builder, Free, Lane, Number, Symbol, Unsupported, translate
from .program import Program
from .reads import reads_of
from .recipe import Recipe

aten = torch.ops.aten
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = get_decompositions(
    [
        aten.silu,
        aten.softplus,
        aten.leaky_relu,
        aten.elu,
        aten.hardtanh,
        aten.hardsigmoid,
        aten.hardswish,
        aten.log_sigmoid_forward,
        aten.gelu,
        aten.lerp,
        aten.addcmul,
        aten.addcdiv,
        aten.logit,
        aten.tanh_backward,
        aten.sigmoid_backward,
        aten.threshold_backward,
        aten.isneginf,
        aten.isposinf,
    ]
)
"""Operations that consist of others of the table."""

_one_at_a_time = forks.Lock(reentrant=True)
"""Lock around torch's tracer, which changes `nn.Module` and a global of torch.fx for all threads. A traced
function may call what traces another."""

SCORE, MASK = "score_mod", "mask_mod"


class Traced(NamedTuple):
    """A function's program, and the arguments that it takes from this function."""

    program: Program
    tensors: tuple[Tensor, ...]
    scalars: tuple[float, ...]
    text: str
    """The program's."""


_MOST_RECIPES = 512
_recipes: dict[Hashable, Recipe] = {}
"""What functions were traced to, by what they read."""


def trace(
    function: Callable[..., Any],
    kind: str,
    device: torch.device,
    score_dtype: torch.dtype = torch.float32,
    extra: Sequence[Tensor] = (),
) -> Traced:
    """The program of a score_mod or, with `kind` MASK, of a mask_mod.

    The function gets 0-dim tensors: the score in `score_dtype` (score_mod only), then b, h, q_idx and kv_idx,
    int32; then `extra`, tensors that are arguments rather than captured.
    """
    foreign = Foreign()
    reads = None if extra else reads_of(function)
    key = reads and (reads.key, kind, device, score_dtype)
    with without_autocast(device):
        if reads is not None and (recipe := _recipes.get(key)) is not None:
            tensors = tuple(_on(x, device) for x in recipe.tensors(reads.tensors))
            return Traced(recipe.program, tensors, recipe.scalars, recipe.text)
        try:
            translated = _translated(function, kind, device, score_dtype, extra, foreign)
        except Exception:
            if not foreign.has_symbols:
                raise
            # A symbol decides on a shape or on the course of Python: another size needs another program.
            foreign, reads = Foreign(fixed=True), None
            translated = _translated(function, kind, device, score_dtype, extra, foreign)
        if reads is not None and (recipe := translated.recipe(reads.tensors)) is not None:
            if len(_recipes) >= _MOST_RECIPES:
                _recipes.clear()
            _recipes[key] = recipe
        return translated.traced(device)


def recipe_of(
    function: Callable[..., Any], kind: str, device: torch.device, score_dtype: torch.dtype
) -> tuple[Recipe, tuple[Tensor, ...]] | None:
    """What a function was traced to, and the tensors that it reads; None if it is traced in each call."""
    reads = reads_of(function)
    recipe = reads and _recipes.get((reads.key, kind, device, score_dtype))
    return None if reads is None or recipe is None else (recipe, reads.tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A user's function computes in the dtypes that it says."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return _unrecorded(torch.autocast(device.type, enabled=False))


@contextmanager
def _unrecorded(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """`mode`, whose begin and end are not recorded where a graph is exported: torch could not load the region
    again, in which the graph does nothing."""
    with torch._C.DisableTorchFunction():
        mode.__enter__()
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            mode.__exit__(None, None, None)


class _Translated(NamedTuple):
    """A function's program, and the graph that its tensors come from."""

    program: Program
    scalars: tuple[float, ...]
    graph: fx.GraphModule
    free: list[fx.Node]
    """Nodes that give the program's tensors."""
    given: dict[fx.Node, Tensor]
    foreign: Foreign

    def traced(self, device: torch.device) -> Traced:
        tensors = _tensors(self.graph, self.free, self.given, self.foreign, device)
        _fix_sizes(self.program, tensors)
        return Traced(self.program, tensors, self.scalars, self.program.text())

    def recipe(self, captured: Sequence[Tensor]) -> Recipe | None:
        """How the tensors come from captured ones, if they come from nothing else."""

        def place_of(node: fx.Node) -> int | None:
            stood_for = self.foreign.tensor(getattr(self.graph, str(node.target)))
            return next((i for i, x in enumerate(captured) if x is stood_for), None)

        if self.foreign.has_symbols:
            return None
        return Recipe.of(self.program, self.scalars, self.free, place_of, len(captured))


def _translated(
    function: Callable[..., Any],
    kind: str,
    device: torch.device,
    score_dtype: torch.dtype,
    extra: Sequence[Tensor],
    foreign: Foreign,
) -> _Translated:
    dtypes = [score_dtype] * (kind == SCORE) + [torch.int32] * 4
    graph = _graph(function, kind, device, dtypes, extra, foreign)
    builder = Builder(dtypes)
    lanes = [Lane(Symbol("input", i), dtype) for i, dtype in enumerate(dtypes)]
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    beside = placeholders[len(dtypes) :]
    try:
        (result,) = translate(graph.graph, builder, [*lanes, *map(Free, beside)])
    except Unsupported as error:
        where = _line_of(function, device, dtypes, extra, foreign, graph.graph, error.node)
        raise TraceError(kind, name(function), str(error.node.target), error.reason, where) from None
    program = builder.finish([_result(result, builder, kind, score_dtype)])
    given = dict(zip(beside, extra, strict=True))
    return _Translated(program, tuple(builder.values), graph, builder.free, given, foreign)


def name(function: Callable[..., Any]) -> str:
    """The function's name for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    label: str = getattr(function, "label", "")
    return label or getattr(function, "__qualname__", type(function).__qualname__)


def _graph(
    function: Callable[..., Any],
    kind: str,
    device: torch.device,
    dtypes: list[torch.dtype],
    extra: Sequence[Tensor],
    foreign: Foreign,
) -> fx.GraphModule:
    outer = get_proxy_mode()
    try:
        with _alone() as fake:
            numbers = [torch.zeros((), dtype=dtype, device=device) for dtype in dtypes]
            beside = [stand_in(x) for x in extra]

            def checked(*arguments: Tensor) -> Tensor:
                if (mode := get_proxy_mode()) is not None:
                    # All sizes in here are known: symbols are another tracer's, who records what they give.
                    mode.__sym_dispatch__ = _call if outer is None else outer.__sym_dispatch__  # type: ignore[method-assign, assignment]
                with Indexing(fake, foreign, device):
                    result = function(*arguments)
                if not isinstance(result, Tensor):
                    raise ArgumentError(
                        kind, f"a function that returns {result!r:.60}", "it must return a tensor"
                    )
                return result

            return recorded(checked, *numbers, *beside)
    except (ArgumentError, TraceError):
        raise
    except _Forbidden as error:
        where = _where(function) or _innermost(error.__traceback__)
        raise TraceError(kind, name(function), *error.args, where) from None
    except Exception as error:
        operation = _data_dependence(error)
        if operation is None:
            raise
        reason = "it needs a value on the host, but a score has none while it is traced; torch.where chooses"
        where = _where(function) or _innermost(error.__traceback__)
        raise TraceError(kind, name(function), operation, reason, where) from None


def recorded(function: Callable[..., Any], *arguments: Tensor) -> fx.GraphModule:
    """The graph of what a function of these tensors does, of `DECOMPOSITIONS`' operations."""
    with _one_at_a_time.held():
        return make_fx(function, DECOMPOSITIONS)(*arguments)


def _data_dependence(error: Exception) -> str | None:
    """The operation that needs data, if that is the error's cause."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        is_item = "_local_scalar_dense" in str(error.func)
        return "a tensor's value (bool(), int(), float(), item() or `if`)" if is_item else str(error.func)
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error):
        return "a tensor's value"
    if ".tolist() is not supported" in str(error):
        return "a tensor's values (tolist())"
    return None


class _Forbidden(Exception):
    """A call that the modes below refuse: `_Forbidden(operation, reason)`."""


def _call(function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


@contextmanager
def _alone() -> Iterator[FakeTensorMode]:
    """A mode of fake tensors, without modes and transforms of whoever calls us. Gradients are enabled, of
    which no tensor here has any, so that a function can disable them for a part of what it does.
    """
    with (
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        _unrecorded(torch.enable_grad()),
        FakeTensorMode() as fake,
    ):
        yield fake


def stand_in(x: Tensor) -> Tensor:
    """A tensor like `x` in the current mode, of known sizes and strides if those of x are symbols."""
    sizes, strides = ([_known_size(n) for n in numbers] for numbers in (x.shape, x.stride()))
    return torch.empty_strided(sizes, strides, dtype=x.dtype, device=x.device)


def _known_size(n: Any) -> int:
    hint = n if isinstance(n, int) else n.node.hint
    return int(n) if hint is None else int(hint)


class Foreign:
    """Tensors that a function captures, symbolic sizes of another tracer, and what stands for both.

    Sizes are stood for by 0-dim tensors, or with `fixed` by the numbers that they are now.
    """

    def __init__(self, fixed: bool = False) -> None:
        self.fixed, self.has_symbols = fixed, False
        self._stand_ins: dict[Any, tuple[Any, Tensor]] = {}
        self._originals: dict[int, tuple[Any, Tensor]] = {}

    def replaced(self, arguments: Any, fake: FakeTensorMode, device: torch.device, indexes: bool) -> Any:
        """Arguments of a call with stand-ins for what is foreign; `indexes` if symbols are indices."""
        values, spec = tree_flatten(arguments)
        values = [self._known(x, fake) for x in values]
        if any(map(_is_symbol, values)):
            self.has_symbols = True
            tensors = [x for x in values if isinstance(x, Tensor)]
            values = [
                self._number(x, [] if indexes else tensors, device) if _is_symbol(x) else x for x in values
            ]
        return tree_unflatten(values, spec)

    def _known(self, x: Any, fake: FakeTensorMode) -> Any:
        if self.fixed and _is_symbol(x):
            return int(x) if isinstance(x, torch.SymInt) else float(x)
        return self._stand_in(x, id(x), lambda: stand_in(x)) if _is_foreign(x, fake) else x

    def _number(self, x: Any, beside: list[Tensor], device: torch.device) -> Tensor:
        """A symbol as a tensor of the dtype that a Python number has in an operation with `beside`."""
        example: Any = 1 if isinstance(x, torch.SymInt) else 1.0
        dtype = torch.tensor(example).dtype
        if beside:
            common = functools.reduce(torch.promote_types, (y.dtype for y in beside))
            dtype = torch.result_type(torch.empty(1, dtype=common, device="meta"), example)
        return self._stand_in(x, (id(x), dtype), lambda: torch.empty((), dtype=dtype, device=device))

    def _stand_in(self, x: Any, key: Any, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._stand_ins:
            with disable_proxy_modes_tracing():
                made = make()
            self._stand_ins[key] = x, made
            self._originals[id(made)] = x, made
        return self._stand_ins[key][1]

    def tensor(self, x: Any) -> Tensor | None:
        """The captured tensor that `x` stands for."""
        found, _ = self._originals.get(id(x), (None, x))
        return found if isinstance(found, Tensor) else None

    def original(self, x: Tensor, device: torch.device) -> Tensor:
        """What `x` stands for as a tensor, or x."""
        found, _ = self._originals.get(id(x), (x, x))
        return (
            found if isinstance(found, Tensor) else torch.scalar_tensor(found, dtype=x.dtype, device=device)
        )


def _is_symbol(x: Any) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat))


def _is_foreign(x: Any, fake: FakeTensorMode) -> bool:
    return isinstance(x, Tensor) and not (isinstance(x, FakeTensor) and x.fake_mode is fake)


class Indexing(TorchFunctionMode):
    """Indices may be 0-dim tensors, which torch itself would read on the host; nothing is printed; and what
    is made without gradients is detached."""

    def __init__(self, fake: FakeTensorMode, foreign: Foreign, device: torch.device) -> None:
        super().__init__()
        self.fake, self.foreign, self.device = fake, foreign, device
        self.records = True
        """Whether the function has gradients enabled."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _SIZES or getattr(function, "__name__", "").startswith("sym_"):
            return function(*args, **(kwargs or {}))
        if function is torch._C._set_grad_enabled:
            self.records = bool(args[0])
            with torch._C.DisableTorchFunction():
                return function(*args)
        if torch.is_grad_enabled() != self.records:
            reason = "its backward is not traced, while score.detach() is"
            raise _Forbidden("torch.autograd.Function, or inference_mode", reason)
        indexes = function is Tensor.__getitem__
        args, kwargs = self.foreign.replaced((args, kwargs or {}), self.fake, self.device, indexes)
        if function in _PRINTS:
            raise _Forbidden("printing or formatting", "a score has no value while it is traced")
        if function is Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_number(x) for x in indices):
                return self._recorded(element(args[0], indices))
        return self._recorded(function(*args, **(kwargs or {})))

    def _recorded(self, made: Any) -> Any:
        """What a function has made, without gradients if it has disabled them."""
        if self.records or not isinstance(made, Tensor) or not made.is_floating_point():
            return made
        return made.detach()


_SIZES = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel))  # type: ignore[attr-defined]
_PRINTS = frozenset((Tensor.__repr__, Tensor.__format__))


def _is_number(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 0 and index.dtype != torch.bool


def element(x: Tensor, indices: tuple[Any, ...]) -> Tensor:
    """x[indices], where 0-dim tensors are indices that no host reads."""
    taken = sum(1 for index in indices if index is not None and index is not Ellipsis)
    full: list[Any] = []
    for index in indices:
        full += [slice(None)] * (x.dim() - taken) if index is Ellipsis else [index]
    is_plain = all(map(_is_number, full))
    view = x if is_plain else x[tuple(slice(None) if _is_number(index) else index for index in full)]
    positions: list[Tensor | None] = []
    for index in full:
        if _is_number(index):
            positions.append(index)
        elif not isinstance(index, int):
            positions.append(None)
    return aten.index.Tensor(view, positions)


def _result(result: Any, builder: Builder, kind: str, score_dtype: torch.dtype) -> Lane:
    """What the function returns, as a value of the program."""
    if isinstance(result, Number):
        result = builder.number(result, result.dtype or score_dtype)
    if isinstance(result, Free):
        value: Tensor = result.node.meta["val"]
        result = builder.add("gather", (builder.tensor(result),), value.dtype, value.shape)
    if result.shape:
        limit = "it must return a 0-dim tensor, from 0-dim score and indices"
        raise ArgumentError(kind, f"a function that returns a tensor of shape {result.shape}", limit)
    if kind == MASK:
        if result.dtype != torch.bool:
            raise DtypeError(kind, f"a function that returns {result.dtype}", "it must return torch.bool")
        return result
    if not result.dtype.is_floating_point:
        raise DtypeError(kind, f"a function that returns {result.dtype}", "it must return a floating score")
    return builder.converted(result, score_dtype)


def _tensors(
    graph: fx.GraphModule,
    nodes: list[fx.Node],
    given: dict[fx.Node, Tensor],
    foreign: Foreign,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """The tensors of a call, computed from the captured ones in torch, with their gradients."""
    known: dict[fx.Node, Any] = dict(given)

    def value(node: fx.Node) -> Any:
        if node not in known:
            if node.op == "get_attr":
                known[node] = foreign.original(getattr(graph, str(node.target)), device)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), source)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    def source(node: fx.Node) -> Any:
        x = value(node)
        if isinstance(x, Tensor):
            # The recorded operation may depend on the sizes that were known; a guard holds symbols to them.
            tuple(map(int, x.shape))
        return x

    return tuple(_on(value(node), device) for node in nodes)


def _fix_sizes(program: Program, tensors: tuple[Tensor, ...]) -> None:
    """Holds symbolic sizes to those of the arrays that a program takes from its tensors."""
    for node in program.nodes:
        if node.op == "gather" and node.shape:
            source, *positions = node.args
            x = tensors[source.value - program.first_tensor]
            positions += [None] * (x.dim() - len(positions))
            sizes = [int(n) for n, position in zip(x.shape, positions, strict=True) if position is None]
            if sizes != list(node.shape):
                raise AssertionError("the captured tensor's sizes are those that were traced")


def _on(x: Tensor, device: torch.device) -> Tensor:
    if x.device == device:
        return x
    if x.dim() == 0 and x.device.type == "cpu":
        return x.to(device)
    raise DeviceError("a captured tensor", x.device, f"it must be on the queries' device, {device}")


class _Until(TorchDispatchMode):
    """Stops at the n-th call of an operation, with the user's line."""

    def __init__(self, target: Any, n: int) -> None:
        super().__init__()
        self.target, self.left = target, n
        self.where = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is self.target:
            if self.left == 0:
                self.where = _calling(sys._getframe())
                raise _Forbidden
            self.left -= 1
        return function(*args, **(kwargs or {}))


def _line_of(
    function: Callable[..., Any],
    device: torch.device,
    dtypes: list[torch.dtype],
    extra: Sequence[Tensor],
    foreign: Foreign,
    graph: fx.Graph,
    culprit: fx.Node,
) -> str:
    """The user's line that calls the operation of a node, found by running the function once more."""
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target == culprit.target]
    until = _Until(culprit.target, calls.index(culprit))
    with _alone() as fake:
        numbers = [torch.zeros((), dtype=dtype, device=device) for dtype in dtypes]
        beside = [stand_in(x) for x in extra]
        try:
            with until, Indexing(fake, Foreign(foreign.fixed), device):
                function(*numbers, *beside)
        except _Forbidden:
            return _where(function) or until.where
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "its line is not known"


def _where(function: Callable[..., Any]) -> str:
    """The user's line that a recorded function runs, '' for any other function."""
    return getattr(function, "where", "")


_OURS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


def _is_users(filename: str) -> bool:
    return not filename.startswith(_OURS)


def _shown(filename: str, line: int) -> str:
    text = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: {text}" if text else f"{filename}:{line}"


def _calling(frame: FrameType | None) -> str:
    """The innermost of the user's lines that led to a frame."""
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "its line is not known" if frame is None else _shown(frame.f_code.co_filename, frame.f_lineno)


def _innermost(traceback: TracebackType | None) -> str:
    """The innermost of the user's lines in a traceback."""
    where = "its line is not known"
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if _is_users(filename):
            where = _shown(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return where


def is_identity(program: Program) -> bool:
    """Whether a score program returns the score as it is."""
    return program.outputs[0].value == 0


def always_true(program: Program) -> bool:
    """Whether a mask program hides nothing."""
    node = program.node(program.outputs[0])
    return node is not None and node.op == "constant" and bool(node.args[0])
