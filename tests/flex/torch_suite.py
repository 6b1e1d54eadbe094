"""torch's own tests of flex_attention, run on a CPU through our door.

    python tests/flex/torch_suite.py PATH_TO/test_flex_attention.py [-k TEXT] [--results FILE.json]

PATH is a file of torch's test/inductor, of any version near the installed one; none is kept here.
test_flex_decoding.py runs, too, with `--length 0`: its windows need the keys that it has. What is compiled
is ours: `torch.compile`, with backend "aot_eager", registers `integrations.torch_flex` for a call. What a
test calls eagerly, its references too, is torch's. A test that compiles nothing runs with the door open all
the time. Devices become the CPU, with gradients, and lengths smaller.

Outcomes: "passed", "skipped", "refused" by an error of ours, and failures by their subjects (`classify`).
A test that fails runs once more with torch's own operator. flash4_torch/flex/NOTES.md has a table of them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import re
import sys
import time
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from flash4_torch.errors import Flash4Error
from flash4_torch.integrations import torch_flex

_DECORATORS = (
    "supported_platform",
    "running_on_a100_only",
    "skip_on_cpu",
    "skip_on_rocm",
    "skip_on_xpu",
    "supports_learnable_bias",
)
"""Decorators that leave tests out on a CPU, which has gradients here."""
_TEXT = (
    (r"\bcuda:0\b", "cpu"),
    (r"([\"'])cuda\1", r"\1cpu\1"),
    (r"\.cuda\(\)", ".cpu()"),
    (r"test_inference_only = True", "test_inference_only = False"),
    (r"requires_grad = device in DEVICE_SUPPORTS_BACKWARDS", "requires_grad = True"),
    (r"\.is_cuda\b", ".is_cpu"),
)
_INTERNALS = {
    "generated code": ("run_and_get_code", "FileCheck", "metrics.", "output_code"),
    "graphs and counters of torch": ("normalize_gm", "EagerAndRecordGraphs", "AotEagerAndRecordGraphs"),
    "several GPUs": ("cuda:1", "TEST_MULTIGPU"),
    "messages of torch's lowering": ("LoweringException", "InductorError", "BackendCompilerFailed"),
}
"""Words of tests that look at torch's insides, by what they look at."""


class _WithoutDecorators(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = [d for d in node.decorator_list if not self._leaves_out(d)]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if not self._leaves_out(d)]
        return self.generic_visit(node)

    def _leaves_out(self, decorator: ast.expr) -> bool:
        text = ast.unparse(decorator)
        return text.startswith(_DECORATORS) or "skipIf(TEST_ON_CUDA" in text


def load(path: Path, length: int | None) -> types.ModuleType:
    """The module of a file, made for a CPU; length: S in place of the file's."""
    text = path.read_text()
    for pattern, replacement in _TEXT:
        text = re.sub(pattern, replacement, text)
    if length is not None:
        text = re.sub(r"^S = \d+$", f"S = {length}", text, flags=re.MULTILINE)
    tree = _WithoutDecorators().visit(ast.parse(text))
    module = types.ModuleType("torch_flex_suite")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    _bridge_versions()
    exec(compile(tree, str(path), "exec"), vars(module))
    return module


def _bridge_versions() -> None:
    """Stands in for what other versions of torch have under the names that a file uses."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.testing._internal import common_device_type

    name = "flex_attention_supported_platform"
    if not hasattr(common_device_type, name):
        setattr(common_device_type, name, lambda test: test)
    assign = PagedAttention.assign

    @functools.wraps(assign)
    def assign_to_each(self: Any, batch_idx: Any, input_pos: Any, *others: Any) -> None:
        # Older files give positions once for all batch entries.
        assign(self, batch_idx, input_pos.expand(batch_idx.shape[0], -1), *others)

    PagedAttention.assign = assign_to_each
    init = PagedAttention.__init__
    # Its default device is a GPU.
    init.__defaults__ = ("cpu",)


class Door:
    """torch.compile whose functions call our operator, in place of torch's, while a test runs."""

    def __init__(self, backend: str, *, is_open: bool) -> None:
        self.backend, self.is_open = backend, is_open
        self.calls = 0
        self._compile = torch.compile

    def compile(self, model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(self.compile, **options)
        if getattr(model, "__name__", "") == "_flex_attention_hop_wrapper":
            return self._compile(model, **options)  # what torch makes of an eager call
        if isinstance(options.get("backend", "inductor"), str):
            options["backend"] = self.backend
            options.pop("mode", None)
            options.pop("options", None)
        compiled = self._compile(model, **options)

        @functools.wraps(model if callable(model) and hasattr(model, "__name__") else compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            with torch_flex.register() if self.is_open else contextlib.nullcontext():
                return compiled(*args, **kwargs)

        return call


@contextlib.contextmanager
def _opened(door: Door, always: bool) -> Any:
    from torch.nn.attention import flex_attention

    check, stock = flex_attention._validate_device, torch.compile
    # torch refuses gradients on a CPU before its own eager operator, which has them.
    flex_attention._validate_device = lambda *_: None
    torch.compile = door.compile
    try:
        with torch_flex.register() if always else contextlib.nullcontext():
            yield
    finally:
        flex_attention._validate_device = check
        torch.compile = stock


class _Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.reason = "passed", ""
        self.names: list[str] = []

    def addSkip(self, test: Any, reason: str) -> None:
        self.outcome, self.reason = "skipped", reason

    def addError(self, test: Any, err: Any) -> None:
        self._failed(err)

    def addFailure(self, test: Any, err: Any) -> None:
        self._failed(err)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.outcome = "passed"

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.outcome, self.reason = "failed", "expected to fail, and did not"

    def _failed(self, err: Any) -> None:
        error = err[1]
        chain = [error]
        while (error := error.__cause__ or error.__context__) is not None:
            chain.append(error)
        ours = [e for e in chain if isinstance(e, Flash4Error)]
        self.outcome = "refused" if ours else "failed"
        first = (ours or chain)[0]
        self.reason = f"{type(first).__name__}: {first}"


def classify(result: _Result, stock: _Result | None, source: str) -> str:
    """What an outcome is about, in a few words; stock: what torch's own operator gives here."""
    if result.outcome == "refused":
        return f"refused: {result.reason.split(':', 1)[0]}"
    if stock is None:
        return result.outcome
    if "CUDA" in result.reason:
        return "wants CUDA"
    if stock.outcome == "failed":
        return "torch's own operator fails, too"
    for kind, words in _INTERNALS.items():
        if any(word in source for word in words):
            return f"torch's internals: {kind}"
    return "to look at"


def _tests(module: types.ModuleType) -> list[unittest.TestCase]:
    loader, suites = unittest.TestLoader(), []
    for value in list(vars(module).values()):
        if (
            isinstance(value, type)
            and issubclass(value, unittest.TestCase)
            and value.__module__ == module.__name__
        ):
            suites.extend(loader.loadTestsFromTestCase(value))
    return suites


def run(test: unittest.TestCase, backend: str) -> tuple[_Result, str, _Result | None]:
    """The outcome of a test, the way of its calls ("compiled" or "eager"), and torch's own if it failed."""
    for always in (False, True):
        result, calls = _run(test, Door(backend, is_open=True), always)
        if calls or result.outcome == "skipped":
            break
    stock = None
    if result.outcome == "failed":
        stock, _ = _run(test, Door(backend, is_open=False), always=False)
    return result, "compiled" if calls else "eager", stock


def _run(test: unittest.TestCase, door: Door, always: bool) -> tuple[_Result, int]:
    result = _Result()
    torch._dynamo.reset()
    with _opened(door, always):
        test(result)
    return result, door.calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("-k", default="", help="only tests whose name has this text")
    parser.add_argument("--length", type=int, default=512, help="S of the file's own default; 0 leaves it")
    parser.add_argument("--backend", default="aot_eager", help="torch.compile's backend")
    parser.add_argument("--results", type=Path, help="a JSON file for the outcomes")
    parser.add_argument(
        "--cases", type=int, default=2, help="at most so many cases of a parametrized test; 0: all"
    )
    options = parser.parse_args()
    module = load(options.path, options.length or None)
    source = options.path.read_text()
    outcomes, results, seen = Counter[str](), [], Counter[str]()
    for test in _tests(module):
        name = test.id().removeprefix(f"{module.__name__}.")
        body = _source(source, name)
        seen[body] += 1
        if options.k not in name or (options.cases and seen[body] > options.cases):
            continue
        start = time.perf_counter()
        result, way, stock = run(test, options.backend)
        kind = classify(result, stock, body)
        outcomes[kind] += 1
        results.append({"test": name, "way": way, "kind": kind, "reason": result.reason[:2000]})
        shown = "" if result.outcome == "passed" else result.reason.strip().splitlines()[:1]
        print(f"{time.perf_counter() - start:6.1f} s  {kind}  {name}  {way}  {shown}", flush=True)
        if options.results is not None:
            options.results.write_text(json.dumps(results, indent=1))
    for kind, number in outcomes.most_common():
        print(f"{number:5}  {kind}")


def _source(text: str, name: str) -> str:
    """The text of the method whose parametrized test has a name."""
    method = name.rsplit(".", 1)[-1]
    spans: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and method.startswith(node.name):
            spans[node.name] = ast.get_source_segment(text, node) or ""
    return spans[max(spans, key=len)] if spans else ""


if __name__ == "__main__":
    main()
