"""Repeated calls with functions: prepared launches give what the slow path gives, whatever changes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flash4_torch
from everything import EVERYTHING, one_of
from flash4_torch import backends, errors, testing
from flash4_torch.backends.compiled import MASK_BLOCKS, MASK_TRANSPOSE
from flash4_torch.backends.flex import intervals
from flash4_torch.backends.flex.intervals import Reduced
from flash4_torch.fast_path import flex as fast_flex
from flash4_torch.flex import reader
from flash4_torch.flex.block_mask import create_block_mask
from flash4_torch.flex.call import traced
from flash4_torch.flex.reads import reads_of
from flash4_torch.flex_problem import FlexInputs
from flash4_torch.ops import CallOptions
from flash4_torch.ops import flex as ops
from flex_on_cpu import emulated_gpu, gpu
from test_fast_path import DispatchMode, FunctionMode, Subclass
from test_flex_reads import Holder, Layer

B, H, S, D = 1, 2, 96, 16
GAIN: Any = 1.5
PHASES = [Phase.explicit, Phase.generate] if EVERYTHING else [Phase.explicit]
"""The examples have each change once."""


@pytest.fixture
def launches() -> Iterator[list[Any]]:
    with gpu() as launches:
        yield launches


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


class LongWay:
    """Counts forwards and backwards that reach the operators' implementation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0
        choose = ops.backends.choose

        def counting(problem: Any) -> Any:
            self.calls += 1
            return choose(problem)

        monkeypatch.setattr(ops, "backends", type("Backends", (), {"choose": staticmethod(counting)}))

    def taken(self, call: Callable[[], Any]) -> int:
        before = self.calls
        call()
        return self.calls - before


@pytest.fixture
def long_way(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> LongWay:
    return LongWay(monkeypatch)


def helper(x: Tensor) -> Tensor:
    return x * GAIN


def doubled(x: Tensor) -> Tensor:
    return 2 * x


class World:
    """A call of flex_attention, or of attention with functions, and everything that it reads."""

    def __init__(self, *, in_attention: bool = False) -> None:
        number, width, bias, other = 2.0, 40, torch.randn(H), torch.randn(H, S)
        document = torch.arange(S) // 40
        self.in_attention, self.beside = in_attention, dict[str, Any]()
        self.layer, self.tensors = Layer(), self.new_tensors()
        self.layer.bias = nn.Parameter(torch.randn(H))
        layer, options = self.layer, {"scale": 0.125, "return_lse": True}
        self.options, self.learned = options, True

        def change(name: str, value: Any) -> None:
            nonlocal number, width, bias, other, document
            if name == "number":
                number = value
            elif name == "width":
                width = value
            elif name == "bias":
                bias = value
            elif name == "other":
                other = value
            elif name == "document":
                document = value

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            near = helper(bias.exp()[h] * number) + other[h, j] * layer.bias[h] * layer.factor
            # Of the default dtype.
            return score + near * (i - j) * torch.ones(H)[h]

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (document[i] == document[j]) & (i - j < width)

        self.change, self.score_mod, self.mask_mod = change, score_mod, mask_mod
        self.mods: list[Any] = [score_mod, None]
        self.read: Callable[[], list[Tensor]] = lambda: [bias, other, layer.bias, document]
        self.new_mask()
        self.block_mask: Any = None

    def new_tensors(self, batch: int = B) -> list[Tensor]:
        return [half(batch, *((S, H) if self.in_attention else (H, S)), D) for _ in "qkv"]

    def new_mask(self) -> None:
        self.mask = create_block_mask(self.mask_mod, None, None, S, S, device="cpu", BLOCK_SIZE=32)

    def results(self) -> list[Any]:
        """What the call gives, its gradients included, and what its tensors are."""
        return_lse = self.options["return_lse"]
        inputs = [*self.tensors, *self.read()[:3]]
        with torch.set_grad_enabled(self.learned):
            functions = {"score_mod": self.mods[0], "block_mask": self.block_mask}
            call = flash4_torch.attention if self.in_attention else flash4_torch.flex_attention
            found = call(*self.tensors, **functions, **self.options, **self.beside)
            out, *lse = found if return_lse else (found,)
            wanted = [x for x in inputs if x.requires_grad]
            grads: list[Any] = []
            if out.requires_grad:
                grads += torch.autograd.grad(out.float().sum(), wanted, allow_unused=True)
        return [out.detach(), *(x.detach() for x in lse), out.requires_grad, *grads]


def in_place(x: Tensor) -> None:
    with torch.no_grad():
        x.copy_(x.flip(-1))


def strided(world: World, place: int) -> None:
    like = world.tensors[place]
    world.tensors[place] = like.transpose(1, 2).contiguous().transpose(1, 2).detach()


def fewer_blocks(world: World) -> None:
    counts = world.mask.kv_num_blocks
    counts.copy_((counts - 1).clamp(min=0))


CHANGES: dict[str, Callable[[World], Any]] = {
    "nothing": lambda world: None,
    "number": lambda world: world.change("number", 3.0),
    "int number": lambda world: world.change("number", 2),
    "zero": lambda world: world.change("number", -0.0),
    "width": lambda world: world.change("width", 20),
    "bias": lambda world: world.change("bias", torch.randn(H)),
    "learned bias": lambda world: world.change("bias", torch.randn(H, requires_grad=True)),
    "strided bias": lambda world: world.change("bias", torch.randn(2 * H)[::2]),
    "other": lambda world: world.change("other", nn.Parameter(torch.randn(H, S))),
    "same shape twice": lambda world: world.change("bias", world.layer.bias),
    "bias in place": lambda world: in_place(world.read()[0]),
    "other in place": lambda world: in_place(world.read()[1]),
    "document": lambda world: world.change("document", torch.arange(S) // 30),
    "document in place": lambda world: world.read()[3].copy_(torch.arange(S) // 25),
    "document's data": lambda world: setattr(world.read()[3], "data", torch.arange(S) // 20),
    "no block mask": lambda world: setattr(world, "block_mask", None),
    "block mask": lambda world: setattr(world, "block_mask", world.mask),
    "new block mask": lambda world: (world.new_mask(), setattr(world, "block_mask", world.mask)),
    "mask in place": fewer_blocks,
    "mask's lists": lambda world: setattr(world.mask, "kv_num_blocks", world.mask.kv_num_blocks.clone()),
    "mask's function": lambda world: setattr(world.mask, "mask_mod", lambda b, h, i, j: i - j < 27),
    "mask's blocks": lambda world: setattr(world.mask, "BLOCK_SIZE", (64, 32)),
    "no full blocks": lambda world: (
        setattr(world.mask, "full_kv_num_blocks", None),
        setattr(world.mask, "full_kv_indices", None),
    ),
    "no score_mod": lambda world: world.mods.__setitem__(0, None),
    "score_mod": lambda world: world.mods.__setitem__(0, world.score_mod),
    "softcap": lambda world: world.mods.__setitem__(0, lambda s, b, h, i, j: 9.0 * torch.tanh(s / 9.0)),
    "attribute": lambda world: setattr(world.layer, "factor", world.layer.factor + 0.5),
    "parameter": lambda world: setattr(world.layer, "bias", nn.Parameter(torch.randn(H))),
    "frozen": lambda world: world.layer.bias.requires_grad_(False),
    "q learns": lambda world: world.tensors[0].requires_grad_(),
    "no gradients": lambda world: setattr(world, "learned", False),
    "gradients": lambda world: setattr(world, "learned", True),
    "q strided": lambda world: strided(world, 0),
    "v strided": lambda world: strided(world, 2),
    "batch": lambda world: setattr(world, "tensors", world.new_tensors(3)),
    "scale": lambda world: world.options.update(scale=0.5),
    "no scale": lambda world: world.options.update(scale=None),
    "no lse": lambda world: world.options.update(return_lse=False),
    "global": lambda world: globals().update(GAIN=2.5),
    "helper": lambda world: globals().update(helper=doubled),
    "dtype": lambda world: torch.set_default_dtype(torch.float64),
}


OF_OPTIONS: dict[str, Callable[[World], Any]] = {
    "causal": lambda world: world.beside.update(causal=True),
    "window": lambda world: world.beside.update(window=(20, 3)),
    "other window": lambda world: world.beside.update(window=(9, None)),
    "cap": lambda world: world.beside.update(softcap=5.0),
    "mask_mod alone": lambda world: (
        setattr(world, "block_mask", None),
        world.beside.update(mask_mod=world.mask_mod),
    ),
    "deterministic": lambda world: world.beside.update(deterministic=True),
    "by default": lambda world: world.beside.clear(),
}
"""Changes of what attention has besides."""


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        else:
            assert x is y


@settings(max_examples=300, deadline=None, phases=PHASES)
@given(st.lists(st.sampled_from(list(CHANGES)), min_size=1, max_size=6), st.booleans())
@example(["number", "int number", "zero", "bias", "strided bias", "same shape twice"], False)
@example(["bias in place", "other", "other in place", "learned bias", "no gradients", "gradients"], True)
@example(["document", "document in place", "document's data", "width", "mask in place", "mask's lists"], True)
@example(
    ["mask's function", "mask's blocks", "no full blocks", "new block mask", "no score_mod", "softcap"], True
)
@example(["attribute", "parameter", "frozen", "global", "helper", "q learns"], False)
@example(["q strided", "v strided", "batch", "scale", "no scale", "no lse"], True)
@example(["no score_mod", "document in place", "mask in place", "score_mod", "width", "dtype"], True)
def test_whatever_changes_calls_give_what_the_slow_path_gives(changes: list[str], has_mask: bool) -> None:
    check(World(), changes, has_mask)


@settings(max_examples=300, deadline=None, phases=PHASES)
@given(
    st.lists(st.sampled_from([*CHANGES, *OF_OPTIONS]), min_size=1, max_size=6),
    st.booleans(),
)
@example(["number", "learned bias", "causal", "window", "other window", "cap"], False)
@example(["document in place", "other in place", "causal", "deterministic", "by default", "no lse"], True)
@example(["mask_mod alone", "document in place", "width", "no score_mod", "cap", "batch"], False)
@example(["q strided", "scale", "v strided", "mask's lists", "no gradients", "gradients"], True)
def test_the_same_holds_of_functions_in_attention(changes: list[str], has_mask: bool) -> None:
    check(World(in_attention=True), changes, has_mask)


def check(world: World, changes: list[str], has_mask: bool) -> None:
    torch.manual_seed(len(changes))
    names, before = globals(), {name: globals()[name] for name in ("GAIN", "helper")}
    with gpu() as launches:
        try:
            if has_mask:
                world.block_mask = world.mask
            for name in ["nothing", *changes]:
                for _ in range(3 if name == "nothing" else 1):
                    world.results()
                (CHANGES | OF_OPTIONS)[name](world)
                if world.block_mask is not None:
                    world.beside.pop("mask_mod", None)
                # The first one after a change, and those that are prepared by then.
                for _ in range(3):
                    launches.clear()
                    found, given = world.results(), list(launches)
                    launches.clear()
                    with backends.excluding("nothing"):
                        expected = world.results()
                    assert given == launches
                    assert_same(found, expected)
        finally:
            torch.set_default_dtype(torch.float32)
            names.update(before)


def test_the_third_step_takes_it(long_way: LongWay) -> None:
    """The first forward and the second step's backward prepare the others, with other tensors, too."""
    for has_mask, in_attention in ((False, False), (True, False), (False, True), (True, True)):
        world = World(in_attention=in_attention)
        world.block_mask = world.mask if has_mask else None
        assert [long_way.taken(world.results) for _ in range(4)] == [2, 1, 0, 0]
        with torch.no_grad():
            world.layer.bias.neg_()
        world.change("bias", torch.randn(H))
        world.tensors = world.new_tensors()
        assert not long_way.taken(world.results)
        world.learned = False
        assert [long_way.taken(world.results) for _ in range(3)] == [1, 0, 0]


MASKS: dict[str, tuple[Callable[..., Tensor], Callable[[Reduced], Any]]] = {
    "a band": (lambda b, h, i, j: (i >= j) & (i - j < 90), lambda found: found.problem.band.left == 89),
    "segments": (
        lambda b, h, i, j: (i // 256 == j // 256) & (i >= j),
        lambda found: found.bounds is not None and found.bounds.segments is not None,
    ),
    "bounds": (
        lambda b, h, i, j: (i // 33 == j // 33) & (i >= j),
        lambda found: found.bounds is not None and found.bounds.segments is None,
    ),
    "bits": (lambda b, h, i, j: (i - j) % 3 != 0, lambda found: found.bits is not None),
    "tables": (lambda b, h, i, j: (i - j + h) % 3 != 0, lambda found: found.problem.spec.block is not None),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_every_kind(long_way: LongWay, launches: list[Any], name: str) -> None:
    mask_mod, is_one = MASKS[name]
    H, S = 2, 512
    of_heads = H if name == "tables" else None
    mask = create_block_mask(mask_mod, None, of_heads, S, S, device="cpu", BLOCK_SIZE=64)
    inputs = [half(1, H, S, 16).requires_grad_() for _ in "qkv"]
    score_mod = (lambda s, b, h, i, j: s * 2 + h) if name == "tables" else None
    q, k, v = (x.transpose(1, 2) for x in inputs)
    mods = traced(q, k, score_mod, mask_mod, mask)
    problem = ops.describe(FlexInputs(q, k, v, mods), CallOptions(0.25))
    found = intervals.reduced(FlexInputs(q, k, v, mods), problem, has_bits=True)
    assert is_one(found)

    def step() -> list[Any]:
        launches.clear()
        out = flash4_torch.flex_attention(*inputs, score_mod, mask)
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        # A mask's bits are made once.
        return [out, *grads, *(x for x in launches if x[0] not in (MASK_BLOCKS, MASK_TRANSPOSE))]

    first, _, third = (step() for _ in range(3))
    assert not long_way.taken(step)
    assert_same(first[:4], third[:4])
    assert first[4:] == third[4:]


CASES: dict[str, tuple[Callable[..., Tensor] | None, str]] = {
    "in attention": (lambda b, h, i, j: (i // 33 == j // 33) & (i >= j), "bias"),
    "bounds": (lambda b, h, i, j: (i // 33 == j // 33) & (i >= j), "bias"),
    "bits": (lambda b, h, i, j: (i - j) % 3 != 0, ""),
    "tables": (lambda b, h, i, j: (i - j + h) % 3 != 0, "bias"),
    "no mask": (None, "slopes"),
}


@pytest.mark.parametrize("name", one_of(len(CASES), list(CASES)))
def test_kernels_in_the_emulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared launches fill all that they give, like the reference, with captured tensors of the call."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    S, (mask_mod, learns), in_attention = 70, CASES[name], name == "in attention"
    of_heads, bias = H if name == "tables" else None, torch.randn(H, S)
    mods: dict[str, Any] = {
        "": None,
        "bias": lambda s, b, h, i, j: s + bias[h, j],
        "slopes": lambda s, b, h, i, j: s + bias[h, 0] * (i - j),
    }

    def step() -> list[Any]:
        inputs = [x.clone().requires_grad_() for x in tensors]
        learned = [bias] if learns else []
        call = flash4_torch.attention if in_attention else flash4_torch.flex_attention
        found = call(*inputs, score_mod=mods[learns], block_mask=mask, return_lse=True)
        return [*found, *torch.autograd.grad(found[0].float().square().sum(), [*inputs, *learned])]

    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, None, of_heads, S, S, device="cpu", BLOCK_SIZE=32)
    with emulated_gpu():
        long_way = LongWay(monkeypatch)
        for _ in range(3):
            shape = (1, S, H, 64) if in_attention else (1, H, S, 64)
            tensors, bias = [half(*shape) for _ in "qkv"], torch.randn(H, S, requires_grad=True)
            found: list[Any] = []
            taken = long_way.taken(lambda found=found: found.extend(step()))
    assert not taken
    for x, y in zip(found, [x.detach() for x in step()], strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=0.02, atol=0.02 * float(y.abs().amax()))


def test_functions_that_are_made_anew_take_it(long_way: LongWay) -> None:
    """A layer makes its functions in each call, methods and partials among them."""
    q, layer = half(1, H, S, D), Layer()
    layer.bias.requires_grad_(False)

    def of_layer() -> Any:
        slopes = torch.ones(H)
        return lambda s, b, h, i, j: s + slopes[h] * (i - j)

    def of_number(number: float, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * number

    for make in (of_layer, lambda: layer.mod, lambda: layer, lambda: functools.partial(of_number, 0.5)):
        with torch.no_grad():
            assert [
                long_way.taken(lambda make=make: flash4_torch.flex_attention(q, q, q, make()))
                for _ in range(3)
            ] == [1, 0, 0]


def test_other_calls_go_the_long_way(long_way: LongWay) -> None:
    mod = lambda s, b, h, i, j: s + i  # noqa: E731
    q, k, v = (half(B, H, S, D) for _ in "qkv")

    def call(q: Tensor = q, k: Tensor = k, v: Tensor = v, **options: Any) -> Any:
        return flash4_torch.flex_attention(q, k, v, **{"score_mod": mod, **options})

    for _ in range(3):
        call()
    assert not long_way.taken(call)
    odd = half(1 + B * H * S * D)[1:].view(B, H, S, D)
    observed: list[tuple[Any, Callable[[], Any]]] = [
        (nullcontext(), lambda: call(odd)),
        (nullcontext(), lambda: call(k=k[:1], v=v[:1], q=q.repeat(2, 1, 1, 1))),
        (nullcontext(), lambda: call(torch._neg_view(q))),
        (nullcontext(), lambda: call(q.as_subclass(Subclass))),
        (nullcontext(), lambda: call(q[..., :12], k[..., :12], v[..., :12])),
        (nullcontext(), lambda: torch.func.vmap(call)(q[None])),
        (DispatchMode(), call),
        (FunctionMode(), call),
        (torch.device("cpu"), call),
        (torch.autocast("cpu", dtype=torch.float16), call),
        (torch.profiler.profile(acc_events=True), call),
        (testing.poisoned_memory(), call),
        (testing.backends_used(), call),
        (nullcontext(), lambda: torch.compile(call, backend="aot_eager")()),
    ]
    for context, other in observed:
        with context:
            for _ in range(2):
                assert long_way.taken(other), other
        assert not long_way.taken(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [long_way.taken(call) for _ in range(2)] == [1, 0]
    with pytest.raises(errors.ArgumentError):
        call(kernel_options=[])
    with pytest.raises(errors.ArgumentError):
        call(scale=torch.ones(2))
    with pytest.raises(errors.ArgumentError):
        call(block_mask=3)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu", BLOCK_SIZE=32)
    for _ in range(3):
        call(block_mask=mask)
    mask.seq_lengths = S, S + 1
    with pytest.raises(errors.ShapeError):
        call(block_mask=mask)


def test_gradients_that_are_asked_for_otherwise_go_the_long_way(long_way: LongWay) -> None:
    bias = torch.randn(H, requires_grad=True)
    mod = lambda s, b, h, i, j: s + bias[h]  # noqa: E731
    inputs = [half(B, H, S, D).requires_grad_() for _ in "qkv"]

    def forward() -> tuple[Tensor, Tensor]:
        return flash4_torch.flex_attention(*inputs, mod, return_lse=True)

    def grads(*results: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(x.float().sum() for x in results), [*inputs, bias], **options)

    for _ in range(3):
        grads(forward()[0])
    assert not long_way.taken(lambda: grads(forward()[0]))
    for results in (lambda: forward(), lambda: forward()[1:]):
        assert long_way.taken(lambda results=results: grads(*results())) == 1
        found = grads(*results())
        with backends.excluding("nothing"):
            assert_same(list(found), list(grads(*results())))
    with pytest.raises(errors.DoubleBackwardError):
        again = grads(forward()[0], create_graph=True)
        torch.autograd.grad(again[0].float().sum(), inputs)
    out, _ = forward()
    with torch.no_grad():
        bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(out)
    assert type(forward()[0].grad_fn).__name__ == "flash4_flex_attentionBackward"


def test_streams_and_captures_are_told_apart(long_way: LongWay, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made of a block mask is read on the stream that made it, and in no capture."""
    world, streams = World(), [1]
    world.block_mask = world.mask
    monkeypatch.setattr(fast_flex, "stream_of", lambda x: streams[-1])
    for stream, taken in ((1, [2, 1, 0]), (2, [2, 1, 0]), (1, [0, 0, 0]), (None, [2, 2, 2]), (2, [0, 0, 0])):
        streams.append(stream)
        assert [long_way.taken(world.results) for _ in range(3)] == taken


def test_tensors_of_inference_mode_are_read_in_each_call(launches: list[Any]) -> None:
    """They have no versions, so that nobody knows whether a mask still shows the same."""
    world = World()
    world.block_mask, world.learned = world.mask, False
    for _ in range(3):
        world.results()
    with torch.inference_mode():
        document = torch.arange(S) // 30
    world.change("document", document)
    for length in (30, 20):
        with torch.inference_mode():
            document.copy_(torch.arange(S) // length)
        launches.clear()
        world.results()
        given = list(launches)
        launches.clear()
        with backends.excluding("nothing"):
            world.results()
        assert given == launches


def test_nothing_is_kept(launches: list[Any]) -> None:
    """Neither functions nor tensors; what is made of a block mask goes with it."""

    def once() -> list[weakref.ref[Any]]:
        world = World()
        world.block_mask = world.mask
        for _ in range(4):
            world.results()
        assert len(fast_flex._of_mask) == 1
        lists = world.mask.kv_num_blocks, world.mask.kv_indices
        return [weakref.ref(x) for x in (*lists, world.layer, world.score_mod, *world.read(), *world.tensors)]

    known = once()
    gc.collect()
    assert [ref() for ref in known] == [None] * len(known) and not fast_flex._of_mask


def signature_of(function: Any) -> Any:
    """What calls are told apart by, of a function."""
    found = reader.read(function)
    if found is None:
        if reads_of(function) is not None:
            reader.add(function)
        found = reader.read(function)
    if found is None:
        return None
    tensors = [(type(x), x.shape, x.stride(), x.dtype, x.device) for x in found.tensors]
    return found.reader, tuple(found.numbers), tuple(tensors)


def test_functions_that_a_reader_takes_for_the_same_have_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all that are known have a reader."""
    monkeypatch.setattr(reader, "_MOST_OF_CODE", 100)
    holder, layer, one, other = Holder(), Layer(), torch.randn(4), torch.randn(4)
    holder.next = Holder()

    def made(*held: Any, default: Any = 1) -> Any:
        def mod(s: Tensor, b: Any, h: Any, i: Any, j: Any, more: Any = default) -> Tensor:
            return s + held[0] * held[1] + more

        return mod

    def pair(x: Any, y: Any) -> Any:
        return lambda s, b, h, i, j: s + x[h] * y[j]

    def of(x: Any) -> Any:
        return lambda s, b, h, i, j: s * x.own + x.next.own

    plain = [
        1,
        1.0,
        True,
        0.0,
        -0.0,
        float("nan"),
        2,
        one,
        other,
        "a",
        None,
        (1, 2),
        (1, 2.0),
        nn.Parameter(one),
    ]
    functions: list[Any] = [
        *(made(x, 2) for x in plain),
        *(made(2, x, default=x) for x in plain),
        *(pair(x, y) for x, y in ((one, other), (one, one), (other, other), (other, one))),
        *(functools.partial(lambda n, s, b, h, i, j: s * n, n) for n in (1, 1.0, 2)),
        *(lambda s, b, h, i, j, n=n: holder.helped(s, j) * n for n in (1, 2)),
        of(holder),
        layer,
        layer.mod,
        Layer(),
        holder.mod,
        Holder.Called(holder),
    ]
    seen: dict[Any, Any] = {}
    for change in (
        lambda: None,
        lambda: setattr(holder, "own", 7.0),
        lambda: setattr(holder, "scale", 5.0),
        lambda: setattr(holder.next, "own", 2),
        lambda: setattr(holder, "table", torch.arange(8.0)[::2]),
        lambda: setattr(layer, "factor", 4),
        lambda: layer.register_buffer("table", torch.ones(2, 4)[1]),
        lambda: setattr(layer, "inner", nn.Linear(5, 1)),
        lambda: layer.register_forward_hook(lambda module, args, out: out * 2),
        lambda: torch.set_default_dtype(torch.float64),
    ):
        try:
            change()
            for function in functions:
                known, signature = reads_of(function), signature_of(function)
                assert (known is None) == (signature is None)
                if known is not None:
                    key = signature, torch.get_default_dtype()
                    assert seen.setdefault(key, known.key) == known.key
                    assert {id(x) for x in known.tensors} == {id(x) for x in reader.read(function).tensors}
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(seen) > 40


def test_what_classes_and_torch_have_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    holder, layer = Holder(), Layer()
    functions = [holder.mod, layer.mod, lambda s, b, h, i, j: torch.tanh(s).exp()]
    patches: list[tuple[Any, str, Any]] = [
        (Holder, "scale", 9.0),
        (Holder, "helped", lambda self, score, j: score - j),
        (Holder, "own", property(lambda self: 1.0)),
        (Holder, "__getattr__", lambda self, name: 2.0),
        (Holder, "__getattribute__", lambda self, name: 2.0),
        (Layer, "factor", 3.0),
        (torch, "tanh", torch.sin),
        (Tensor, "exp", Tensor.sin),
        (torch, "exp", torch.sin),
    ]
    before = [signature_of(f) for f in functions]
    assert None not in before
    for owner, name, value in patches:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            keys = [reads_of(f) for f in functions]
            changed = [x != y for x, y in zip(map(signature_of, functions), before, strict=True)]
        for known, f, is_changed in zip(keys, functions, changed, strict=True):
            now = reads_of(f)
            assert is_changed or (known is not None and now is not None and known.key == now.key), name
        assert any(changed), name
    assert [signature_of(f) for f in functions] == before
