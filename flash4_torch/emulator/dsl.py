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
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

from flash4_torch import env
from flash4_torch.emulator.device import as_device_arguments

L2_BYTES = 50 << 20
_RUNTIME_PREFIXES = ("_cu", "cuda_dialect_", "CuteDSLRT_")  # of the runtime library's functions

T = TypeVar("T")
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
        _change_locations(changes)
        _change_compiling(changes, learn)
        _change_host_code(changes)
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
        _replace(
            changes,
            settings,
            shared_libs=library,
            _arch=arch,
            lineinfo=env.EMULATOR_LINES.get() == "1",
            disable_file_caching=True,
        )
    # The variables are for code that reads them later, such as other libraries; the DSL caches what it reads.
    forget = import_module("cutlass.base_dsl.env_manager").get_str_env_var.cache_clear
    changes.callback(forget)
    changes.callback(env.change, env.change({"CUTE_DSL_LIBS": library, "CUTE_DSL_ARCH": arch}))
    forget()


def _change_locations(changes: ExitStack) -> None:
    """Makes line information cheap: it is a third of the time that tracing takes.

    For every operation the DSL looks for the frame of the user's code that asked for it, module by module,
    and counts through that function's instructions to the current one. Both depend on the code object alone.
    """
    op = import_module("cutlass._mlir_helpers.op")
    _replace(changes, op, _find_user_frame=_finder(op), _fast_frameinfo=_describer(op._fast_frameinfo))


def _finder(op: Any) -> Callable[[FrameType | None], FrameType | None]:
    """`_find_user_frame` of the DSL, which asks once for each code object."""
    is_framework_frame, of_code = op._is_framework_stack_frame, _OfCode[bool]()

    def find(start: FrameType | None) -> FrameType | None:
        if op._INCLUDE_LIB_FRAME or not op._ENABLE_FRAME_FILTERING:
            return start
        frame = start
        while frame is not None:
            code = frame.f_code
            is_framework = of_code.get(code)
            if is_framework is None:
                is_framework = of_code[code] = is_framework_frame(frame)
            if not is_framework:
                return frame
            frame = frame.f_back
        return start

    return find


def _describer(original: Callable[[FrameType], Any]) -> Callable[[FrameType], Any]:
    """`_fast_frameinfo` of the DSL, which asks once for each instruction."""
    of_code = _OfCode[dict[int, Any]]()

    def describe(frame: FrameType) -> Any:
        found = of_code.get(frame.f_code)
        if found is None:
            found = of_code[frame.f_code] = {}
        if frame.f_lasti not in found:
            found[frame.f_lasti] = original(frame)
        return found[frame.f_lasti]

    return describe


class _OfCode(Generic[T]):
    """A value for each code object, by identity: to hash or to compare one takes as long as it is large."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[CodeType, T]] = {}

    def get(self, code: CodeType) -> T | None:
        found = self._of.get(id(code))
        return found[1] if found else None

    def __setitem__(self, code: CodeType, value: T) -> None:
        self._of[id(code)] = code, value  # Keeps the code alive, and so its identity its own.


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


class _NoEngine:
    """A stand-in for an execution engine that nobody uses."""


def _change_host_code(changes: ExitStack) -> None:
    """Compiles the host code of functions for TVM FFI once.

    The DSL compiles it for an execution engine, looks up one address there, and then compiles it again for
    the engine that it calls.
    """
    compiler = import_module("cutlass.base_dsl.compiler").Compiler
    dsl = import_module("cutlass.base_dsl.dsl").BaseDSL
    jit, lookup = compiler.jit, dsl._lookup_jit_entry

    @functools.wraps(jit)
    def jit_unless_replaced(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        names = (op.attributes["sym_name"].value for op in module.body if "sym_name" in op.attributes)
        if any(name.startswith("__tvm_ffi_") for name in names):
            return _NoEngine()
        return jit(self, module, *args, **kwargs)

    @functools.wraps(lookup)
    def lookup_if_there(self: Any, engine: Any, name: str) -> Any:
        return None if isinstance(engine, _NoEngine) else lookup(self, engine, name)

    _replace(changes, compiler, jit=jit_unless_replaced)
    _replace(changes, dsl, _lookup_jit_entry=lookup_if_there)


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
