"""Costs and effects of `import flash4_torch`: our own modules, the public names, and nothing switched on."""

import json
import subprocess
import sys
import sysconfig
from importlib import resources
from typing import Any

import pytest

import flash4_torch
from flash4_torch import ahead, testing

PUBLIC = [
    "MultiheadAttention",
    "append_kvcache",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "create_block_mask",
    "distributed",
    "errors",
    "flash_attn",
    "flex_attention",
    "flex_support",
    "integrations",
    "merge_states",
    "replace_attention",
    "scaled_dot_product_attention",
    "support",
    "testing",
    "warmup",
]

# What `import sysconfig`, a part of the standard library, loads under a name of its own.
SYSCONFIG = sysconfig._get_sysconfigdata_name()

PROBE = """
import json, sys
import torch
import torch.nn.attention
before = set(sys.modules)
import flash4_torch
new = sorted(set(sys.modules) - before)
current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
print(json.dumps({"new": new, "flash_attention_impl": current()}))
"""


def probe() -> dict[str, Any]:
    """The report of a fresh interpreter with torch loaded, after it has imported us."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "importing is silent"
    return json.loads(done.stdout)


OUTSIDE = """
import torch
from torch._subclasses import FakeTensorMode
with {mode}:
    import flash4_torch
    from flash4_torch.nn import materialized
q = torch.randn(1, 9, 2, 8)
seen = torch.ones(9, 9, dtype=torch.bool).tril()
for options in ({{"attn_mask": seen}}, {{"dropout_p": 0.1}}, {{"attn_mask": seen, "window": (2, None)}}):
    assert type(flash4_torch.attention(q, q, q, **options)) is torch.Tensor
module, x = torch.nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), torch.randn(1, 9, 8)
flash4_torch.replace_attention(module)
module(x, x, x, attn_mask=~seen)[0].sum().backward()
"""


@pytest.mark.parametrize("mode", ["torch.device('meta')", "FakeTensorMode()"])
def test_modes_that_are_active_at_import_leave_nothing(mode: str) -> None:
    """Models are built, and their modules imported, on the meta device."""
    code = OUTSIDE.format(mode=mode)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_loads_only_our_own_modules_and_leaves_torch_as_it_was() -> None:
    """No kernel compiler, Triton or transformers, nor any corner of torch that torch itself leaves out."""
    seen = probe()
    foreign = [
        name
        for name in seen["new"]
        if name.partition(".")[0] not in {"flash4_torch", *sys.stdlib_module_names, SYSCONFIG}
    ]
    assert foreign == []
    assert seen["flash_attention_impl"] is None


def test_integrations_are_loaded_on_demand() -> None:
    heavy = (
        "flash4_torch.integrations.",
        "flash4_torch.bench",
        "flash4_torch.flash_attn",
        "flash4_torch.testing",
    )
    assert [name for name in probe()["new"] if name.startswith(heavy)] == []


def test_public_names_are_fixed() -> None:
    assert flash4_torch.__all__ == PUBLIC
    assert [name for name in PUBLIC if not hasattr(flash4_torch, name)] == []


DIR = """
import sys, flash4_torch, flash4_torch.testing
public = [dir(flash4_torch), dir(flash4_torch.testing)]
assert public[0] == sorted([*flash4_torch.__all__, "__version__"])
assert public[1] == sorted(flash4_torch.testing.__all__)
assert "flash4_torch.emulator" not in sys.modules
assert flash4_torch.testing.emulate.device
from flash4_torch import *
import flash4_torch.bench.command
assert public == [dir(flash4_torch), dir(flash4_torch.testing)]
"""


def test_dir_is_what_is_public_whatever_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", DIR], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_star_brings_what_is_public() -> None:
    names: dict[str, Any] = {}
    exec("from flash4_torch import *", names)
    assert sorted(names.keys() - {"__builtins__"}) == PUBLIC
    assert names["warmup"] is ahead.warmup and names["testing"] is testing


def test_type_information_ships() -> None:
    assert resources.files("flash4_torch").joinpath("py.typed").is_file()


LATE = """
import importlib.util, sys, torch, flash4_torch
for name in ("torch.distributed.tensor", "torch.utils.flop_counter"):
    assert name not in sys.modules
    assert all(importlib.util.find_spec(name) for _ in range(2)) and name not in sys.modules
def learned():
    from torch.utils.flop_counter import FlopCounterMode
    x = torch.randn(1, 8, 2, 4)
    with FlopCounterMode(display=False) as counter:
        flash4_torch.attention(x, x, x)
    return counter.get_total_flops() == 2 * 2 * 2 * 8 * 8 * 4
assert learned()
from torch.distributed.tensor import DTensor
op = torch.ops.flash4.attention.default
assert op in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
importlib.reload(sys.modules["torch.utils.flop_counter"])
assert learned()
"""


def test_what_is_imported_later_still_learns_of_our_operators() -> None:
    """It does so also after its spec has been looked up, and when it is reloaded."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
