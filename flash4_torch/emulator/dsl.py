"""Everything that the emulator changes in CuTe-DSL while installed; only this module knows its internals.

It is written for the version of nvidia-cutlass-dsl that pyproject.toml names. The DSL is imported only when
it is connected; running PTX of other origin does not need it.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from flash4_torch import env
from flash4_torch.emulator.device import as_device_arguments

L2_BYTES = 50 << 20
_RUNTIME_PREFIXES = ("_cu", "cuda_dialect_", "CuteDSLRT_")  # of the runtime library's functions

Calling = Callable[[], AbstractContextManager[None]]


def connect(
    *,
    library: str,
    arch: str,
    num_sms: int,
    learn: Callable[[bytes, str], None],
    calling: Calling,
    device_attribute: Callable[[int], int],
) -> ExitStack:
    """Connects the DSL to the stand-in `library`; closing the result disconnects it.

    learn: receives the cubin and the PTX of every function that is compiled.
    calling: a context around every call of a compiled function.
    device_attribute: returns a device attribute by CUDA's number.
    """
    with ExitStack() as changes:
        _change_settings(changes, library, arch)
        _change_compiling(changes, learn)
        _change_tensors(changes)
        _change_calling(changes, calling)
        _change_device(changes, num_sms, device_attribute)
        return changes.pop_all()


def _replace(changes: ExitStack, owner: Any, **values: Any) -> None:
    for name, value in values.items():
        changes.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _change_settings(changes: ExitStack, library: str, arch: str) -> None:
    """Changes the DSL's settings for the emulator.

    Line information lets reports name source lines. Functions from the file cache would lack their PTX.
    """
    cutlass_dsl = import_module("cutlass.cutlass_dsl.cutlass")
    for dsl in (cutlass_dsl.CuTeDSL, cutlass_dsl.CuteExperimentalDSL):
        settings = dsl._get_dsl().envar
        _replace(changes, settings, shared_libs=library, _arch=arch, lineinfo=True, disable_file_caching=True)
    # The variables are for code that reads them later, such as other libraries; the DSL caches what it reads.
    forget = import_module("cutlass.base_dsl.env_manager").get_str_env_var.cache_clear
    changes.callback(forget)
    changes.callback(env.change, env.change({"CUTE_DSL_LIBS": library, "CUTE_DSL_ARCH": arch}))
    forget()


def _change_compiling(changes: ExitStack, learn: Callable[[bytes, str], None]) -> None:
    compiler = import_module("cutlass.base_dsl.compiler").Compiler
    original = compiler.compile

    @functools.wraps(original)
    def compile_and_learn(self: Any, module: Any, pipeline: str, *args: Any, **kwargs: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            pipeline, cubin, ptx = _with_dumps(pipeline, Path(folder))
            compiled = original(self, module, pipeline, *args, **kwargs)
            if cubin.exists():  # otherwise it is host code alone
                learn(cubin.read_bytes(), ptx.read_text())
        _bind(compiled)
        return compiled

    _replace(changes, compiler, compile=compile_and_learn)


def _bind(module: Any) -> None:
    """Lets host code call the stand-in under names of its own.

    Under the usual names it would find any runtime library that the process has loaded before.
    """
    table = import_module("cutlass._mlir.ir").SymbolTable
    for function in module.body.operations:
        name = function.attributes["sym_name"].value if "sym_name" in function.attributes else ""
        if name.startswith(_RUNTIME_PREFIXES) and not function.regions[0].blocks:
            own = "flash4_" + name.lstrip("_")
            table.replace_all_symbol_uses(name, own, module.operation)
            table.set_symbol_name(function, own)


def _with_dumps(pipeline: str, folder: Path) -> tuple[str, Path, Path]:
    """The pipeline, made to write cubin and PTX to `folder` if it writes none already; and their paths."""
    chip = re.search(r"cubin-chip=(\w+)", pipeline)
    paths = []
    for kind in ("cubin", "ptx"):
        given = re.search(rf"dump-{kind}-path='([^']*)'", pipeline)
        start = given[1] if given else folder / "kernel"
        if chip and not given:
            pipeline = pipeline.replace(chip[0], f"dump-{kind}-path='{start}' {chip[0]}")
        paths.append(Path(f"{start}.{chip[1] if chip else ''}.{kind}"))
    return pipeline, paths[0], paths[1]


def _change_tensors(changes: ExitStack) -> None:
    tensor = import_module("cutlass.cute.runtime")._Tensor
    original = tensor.__init__

    @functools.wraps(original)
    def init(self: Any, source: Any, *args: Any, **kwargs: Any) -> None:
        original(self, as_device_arguments(source), *args, **kwargs)

    _replace(changes, tensor, __init__=init)


def _change_calling(changes: ExitStack, calling: Calling) -> None:
    executor = import_module("cutlass.base_dsl.jit_executor")
    for owner in (executor.JitExecutor, executor.JitCompiledFunction):
        run = _called_within(calling, owner.run_compiled_program)
        _replace(changes, owner, run_compiled_program=run)
    if importlib.util.find_spec("tvm_ffi"):
        provider = import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
        for owner in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
            _replace(changes, owner, __call__=_called_within(calling, _with_device_arguments(owner.__call__)))


def _called_within(calling: Calling, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with calling():
            return original(*args, **kwargs)

    return call


def _with_device_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: as_device_arguments(value) for name, value in kwargs.items()}
        return original(self, *as_device_arguments(args), **kwargs)

    return call


def _change_device(changes: ExitStack, num_sms: int, device_attribute: Callable[[int], int]) -> None:
    """Replaces what the DSL itself asks of the CUDA driver from Python."""
    compiled = import_module("cutlass.cutlass_dsl.cuda_jit_executor").CudaDialectJitCompiledFunction
    load = compiled._load_cuda_library

    @functools.wraps(load)
    def load_on_one_device(self: Any) -> list[Any]:
        self.num_devices = 1
        load(self)
        return []  # CUDA has nothing to unload

    _replace(changes, compiled, _load_cuda_library=load_on_one_device)

    def attribute(attribute: Any, device_id: int = 0) -> int:
        return device_attribute(int(attribute))

    _replace(changes, import_module("cutlass.base_dsl.runtime.cuda"), get_device_attribute=attribute)

    def init(self: Any, device_id: int = 0) -> None:
        self.device_id = device_id

    def clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        return num_sms // cluster_size

    _replace(
        changes,
        import_module("cutlass.utils.hardware_info").HardwareInfo,
        __init__=init,
        get_max_active_clusters=clusters,
        get_l2_cache_size_in_bytes=lambda self: L2_BYTES,
        get_device_multiprocessor_count=lambda self: num_sms,
    )
