"""The direction of imports: who may use what, read from the syntax tree of every module of the package."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "flash4_torch"
LEAVES = frozenset(
    {
        "problem",
        "kvcache_problem",
        "flex_problem",
        "masks",
        "errors",
        "env",
        "forks",
        "processor",
        "store",
        "configs.types",
        "flex.program",
        "flex.ramp",
        "flex.table",
    }
)

# Parts of the package that each layer may import besides itself and the leaves.
MAY_IMPORT: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "configs": set(),
    "reference": set(),
    # Below backends, so that kernels may be generated from programs; flex.attention is the public part.
    "flex": {"reference"},
    "compile": set(),
    "emulator": set(),
    "kernels": set(),
    "kernels.common": set(),
    "kernels.aux_kernels": {"kernels.common"},
    "kernels.sm80": {"kernels.common", "kernels.aux_kernels"},
    "kernels.sm90": {"kernels.common", "kernels.aux_kernels"},
    "kernels.sm100": {"kernels.common", "kernels.aux_kernels"},
    "kernels.weights": {"kernels.common", "kernels.sm80", "configs"},
    "kernels.decode": {"kernels.common", "kernels.sm90", "configs"},
    "backends": {
        "kernels.sm90",
        "kernels.sm100",
        "kernels.weights",
        "kernels.decode",
        "kernels.aux_kernels",
        "kernels.common",
        "compile",
        "emulator",
        "configs",
        "reference",
        "flex",
    },
    "ops": {"backends", "flex", "reference"},
    "fast_path": {"ops", "backends"},
    "attend": {"fast_path", "ops"},
    "flex.block_mask": {"flex", "backends", "reference"},
    "flex.call": {"flex", "ops"},
    "api": {"fast_path", "ops", "backends", "flex.call", "flex.repeated"},
    "kvcache": {"fast_path", "ops", "backends", "reference"},
    "flex.repeated": {"flex", "flex.call", "fast_path", "ops", "reference"},
    "flex.attention": {"flex", "flex.call", "flex.repeated", "ops", "reference"},
    "distributed": {"api", "integrations", "nn", "ops", "reference"},
    "flash_attn": {"api", "kvcache", "ops"},
    # Its steps are written in torch's operators, as the reference is, with the reference's dropout.
    "nn.materialized": {"nn", "ops", "reference"},
    "nn": {"attend", "fast_path", "nn.materialized", "ops"},
    "integrations": {
        "ahead",
        "api",
        "flex.attention",
        "flex.call",
        "fast_path",
        "flash_attn",
        "kvcache",
        "ops",
        "backends",
    },
    # Kernels before the first call, which engines ask for, too.
    "progress": {"backends", "compile", "configs"},
    "ahead": {"backends", "compile", "configs", "progress", "reference"},
    "testing": {"api", "ops", "backends", "emulator", "reference"},
}
# The package's front and its tools, which nothing below imports: "" is flash4_torch/__init__.py.
TOP = frozenset({"", "__main__", "info", "support_table", "bench"})

TORCH_FREE = (
    "kernels",
    "emulator",
    "configs",
    "masks",
    "errors",
    "env",
    "forks",
    "processor",
    "store",
    "flex.program",
    "flex.ramp",
    "flex.table",
)
# Names outside the package, and the only layers that may use them.
ONLY_IN = {
    "cutlass": ("kernels", "compile", "emulator"),
    "torch.library": ("ops", "integrations"),
    "os.environ": ("env",),
    "os.environb": ("env",),
    "os.getenv": ("env",),
    "os.getenvb": ("env",),
    "os.putenv": ("env",),
    "os.unsetenv": ("env",),
}


class Use(NamedTuple):
    """A dotted name that a module imports, or reaches as an attribute of something it imports."""

    name: str
    line: int


def uses(source: str, module: str, *, is_package: bool = False) -> Iterator[Use]:
    """All names that `source`, the text of the module of that dotted name, takes from elsewhere."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(alias.name, node.lineno)
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module, is_package)
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield Use(name, node.lineno)
                bound[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        name = _dotted(node, bound)
        if name:
            yield Use(name, node.lineno)


def _origin(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The absolute name of the module between `from` and `import`."""
    if not node.level:
        return node.module or ""
    up = node.level - is_package
    parents = module.split(".")[:-up] if up else module.split(".")
    return ".".join([*parents, *filter(None, [node.module])])


def _dotted(node: ast.AST, bound: dict[str, str]) -> str:
    """`torch.library.Library` for that expression, aliases resolved; empty if it starts from no import."""
    if not isinstance(node, ast.Attribute):
        return ""
    owner = bound.get(node.value.id) if isinstance(node.value, ast.Name) else _dotted(node.value, bound)
    return f"{owner}.{node.attr}" if owner else ""


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def is_in_one_of(layer: str, homes: tuple[str, ...]) -> bool:
    return any(is_within(layer, home) for home in homes)


def layer_of(name: str) -> str:
    """The layer a dotted name inside the package belongs to; `kernels.sm90.fwd.load` to `kernels.sm90`."""
    inner = name.removeprefix(PACKAGE).removeprefix(".")
    matches = [layer for layer in (*MAY_IMPORT, *TOP) if layer and is_within(inner, layer)]
    return max(matches, key=len, default="")


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """A sentence for each name that the module uses against the rules above."""
    layer = layer_of(module)
    return [
        f"{module}:{use.line} uses {use.name}: {reason}"
        for use in uses(source, module, is_package=is_package)
        for reason in reasons_against(layer, use.name)
    ]


def reasons_against(layer: str, name: str) -> Iterator[str]:
    for limited, homes in ONLY_IN.items():
        if is_within(name, limited) and not is_in_one_of(layer, homes):
            yield f"only {', '.join(homes)} may"
    if is_within(name, "torch") and is_in_one_of(layer, TORCH_FREE):
        yield f"{layer} knows no torch"
    if is_within(name, PACKAGE) and layer not in TOP:
        target = layer_of(name)
        if target not in MAY_IMPORT[layer] | LEAVES | {layer}:
            yield f"{layer} may not import {target or 'the package itself'}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_keeps_the_directions(path: Path) -> None:
    found = violations(path.read_text(), module_name(path), is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_module_has_a_layer(path: Path) -> None:
    """A new folder gets a line in MAY_IMPORT; until then the rules above would not apply to it."""
    name = module_name(path)
    assert name == PACKAGE or layer_of(name), f"{name} has no line in MAY_IMPORT or TOP"


@pytest.mark.parametrize(
    "path",
    [*MODULES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))],
    ids=module_name,
)
def test_source_is_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 10))


@pytest.mark.parametrize(
    "module, source",
    [
        ("masks", "import torch"),
        ("masks", "from .problem import Spec\nfrom . import backends"),
        ("configs.sm90", "from torch import Tensor"),
        ("kernels", "import torch"),
        ("kernels.sm90.fwd.load", "import torch.nn"),
        ("kernels.sm90.fwd.load", "from ...sm100 import umma"),
        ("kernels.sm100.umma", "from flash4_torch.kernels.sm90 import wgmma"),
        ("kernels.common.gqa", "from ..sm90 import wgmma"),
        ("backends.compiled", "def launch():\n    import cutlass.cute as cute"),
        ("backends.cpu", "from ..ops import check"),
        ("backends.cpu", "from .. import nn"),
        ("reference.tiled", "import flash4_torch.backends.cpu"),
        ("reference.tiled", "import flash4_torch as f4\nf4.ops.attention"),
        ("reference.tiled", "import torch as t\nt.library.Library('x', 'DEF')"),
        ("api", "from torch import library"),
        ("api", "from torch.library import Library as L"),
        ("api", "from .nn import MultiheadAttention"),
        ("api", "from . import __version__"),
        ("ops.impl", "from ..api import attention"),
        ("kvcache.append", "from ..kernels.common import kvcache"),
        ("backends.kvcache.append", "from ...kvcache import arguments"),
        ("nn.multihead", "from .. import backends"),
        ("nn.multihead", "from ..integrations import transformers"),
        ("nn.multihead", "import os\nos.environ['X']"),
        ("bench", "from os import getenv"),
    ],
)
def test_an_offence_is_found(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}")


@pytest.mark.parametrize(
    "module, source",
    [
        ("problem", "import torch\nfrom .masks import Band"),
        ("kernels.sm90.fwd.load", "import cutlass\nfrom ..wgmma import mma\nfrom ...common import softmax"),
        ("kernels.sm90.fwd.plan", "from flash4_torch.configs.types import Tile"),
        ("backends.compiled", "def launch():\n    from ..kernels.sm90.fwd import launch"),
        ("ops.schema", "import torch\ntorch.library.Library('x', 'DEF')"),
        ("env", "import os\nos.environ['X']"),
        ("api", "import torch\nfrom . import backends, ops\nlibrary = object()\nlibrary.torch"),
        ("info", "from . import __version__, api, env"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert not violations(source, f"{PACKAGE}.{module}")


def test_relative_imports_of_a_package_start_at_itself() -> None:
    found = violations("from . import cpu\nfrom .. import nn", f"{PACKAGE}.backends", is_package=True)
    assert len(found) == 1 and "backends may not import nn" in found[0]


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a module imports, anywhere in its text, also under TYPE_CHECKING."""
    module, is_package = module_name(path), path.name == "__init__.py"
    names = {use.name for use in uses(path.read_text(), module, is_package=is_package)}
    known = {module_name(other) for other in MODULES}
    found = {max((m for m in known if is_within(name, m)), key=len, default="") for name in names}
    return found - {"", module}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Some cycle of a graph, its nodes in order; empty if it has none."""
    done: set[str] = set()

    def search(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node not in done:
            for other in sorted(graph.get(node, ())):
                if found := search(other, [*path, node]):
                    return found
            done.add(node)
        return []

    return next(filter(None, (search(node, []) for node in sorted(graph))), [])


def test_no_import_cycle() -> None:
    cycle = cycle_in({module_name(path): imports_of(path) for path in MODULES})
    assert not cycle, " imports ".join([*cycle, *cycle[:1]])


@pytest.mark.parametrize(
    "how",
    ["from . import b", "if TYPE_CHECKING:\n    from .b import B", "def f():\n    from .b import B"],
)
def test_a_cycle_is_found(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / PACKAGE
    package.mkdir()
    paths = [package / name for name in ("__init__.py", "a.py", "b.py", "c.py")]
    for path, text in zip(paths, ["", how, "from . import c", "from .a import A"], strict=True):
        path.write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "MODULES", paths)
    assert set(cycle_in({module_name(path): imports_of(path) for path in paths})) == {
        f"{PACKAGE}.{name}" for name in "abc"
    }
