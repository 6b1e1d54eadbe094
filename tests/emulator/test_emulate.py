"""flash4_torch.testing.emulate, the interface for kernel authors: devices, reports, command line, example."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

from flash4_torch import env
from flash4_torch.emulator import build
from flash4_torch.emulator.errors import EmulatorError, LaunchError
from flash4_torch.testing import emulate

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports name lines, though `make test` asks for none."""
    monkeypatch.setenv(env.EMULATOR_LINES.name, "1")


@cute.kernel
def double_kernel(x: cute.Tensor, y: cute.Tensor, beyond: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread + beyond] * 2.0


@cute.jit
def double(x: cute.Tensor, y: cute.Tensor, beyond: cutlass.Constexpr) -> None:
    double_kernel(x, y, beyond).launch(grid=(1, 1, 1), block=(64, 1, 1))


def doubled(device: emulate.Device, beyond: int = 0) -> bool:
    x, y = torch.randn(64), torch.full((64,), torch.nan)
    # Without any options of its own it would have line information once something else has had it.
    compiled = cute.compile(double, from_dlpack(x), from_dlpack(y), beyond, options="--opt-level 3")
    with device.touching(x, y):
        compiled(from_dlpack(x), from_dlpack(y))
    return torch.equal(y, x * 2)


@cute.kernel
def early_kernel(x: cute.Tensor, y: cute.Tensor, order: cutlass.Constexpr) -> None:
    thread, _, _ = cute.arch.thread_idx()
    value = cutlass.Float32(0.0)
    if cutlass.const_expr(order == "reads first"):
        value = x[thread]
    if cutlass.const_expr(order == "half of it waits"):
        if thread < 32:
            cute.arch.griddepcontrol_wait()
            y[thread] = x[thread] * 2.0
        else:
            y[thread] = x[thread] * 2.0
    else:
        if cutlass.const_expr(order != "never waits"):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(order != "reads first"):
            value = x[thread]
        y[thread] = value * 2.0


@cute.jit
def launch_early(
    x: cute.Tensor, y: cute.Tensor, order: cutlass.Constexpr, use_pdl: cutlass.Constexpr
) -> None:
    early_kernel(x, y, order).launch(grid=(1, 1, 1), block=(64, 1, 1), use_pdl=use_pdl)


@pytest.mark.parametrize("order", ["right", "reads first", "half of it waits", "never waits"])
def test_an_early_kernel_waits_before_it_reads(order):
    """A kernel that may begin before the one ahead has ended is refused, unless all of it waits first."""
    x = torch.randn(64)
    with emulate.device("sm_90a"):
        for use_pdl in (False, True):
            y = torch.full((64,), torch.nan)
            compiled = cute.compile(launch_early, from_dlpack(x), from_dlpack(y), order, use_pdl)
            if use_pdl and order != "right":
                with pytest.raises(LaunchError, match=r"early_kernel.* may begin before the kernel ahead"):
                    compiled(from_dlpack(x), from_dlpack(y))
                assert y.isnan().all()
            else:
                compiled(from_dlpack(x), from_dlpack(y))
                assert torch.equal(y, 2 * x)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_kernel_runs_and_is_counted(arch):
    with emulate.device(arch) as device:
        assert doubled(device)
    (report,) = device.reports
    assert report.findings == [] and "double_kernel" in report.kernel
    assert report.counters.global_read == report.counters.global_written == 64 * 4
    assert report.counters.instructions == sum(sum(line.counts) for line in report.lines)
    assert sum(report.counters.by_pipe.values()) == report.counters.instructions
    assert all(line.counts[0] == line.counts[1] for line in report.lines)  # both warps do the same


@pytest.mark.parametrize("lines", ["1", "0"])
def test_a_wrong_kernel_raises_and_names_the_line(lines, monkeypatch):
    monkeypatch.setenv(env.EMULATOR_LINES.name, lines)
    with (
        emulate.device("sm_90a") as device,
        pytest.raises(emulate.EmulationError, match="out-of-bounds") as raised,
    ):
        doubled(device, beyond=1 << 20)
    (finding,) = raised.value.findings
    assert finding.at.ptx_line is not None
    assert (finding.at.source is not None) == (lines == "1")
    if lines == "0":
        return
    file, line = finding.at.source
    assert Path(file).name == Path(__file__).name
    assert "x[thread + beyond]" in Path(__file__).read_text().splitlines()[line - 1]


def test_unchecked_devices_only_report():
    with emulate.device("sm_90a", check=False) as device:
        doubled(device, beyond=1 << 20)
    assert [finding.kind for finding in device.reports[0].findings] == ["out-of-bounds"]


def test_the_device_is_as_large_as_it_is_said_to_be():
    with emulate.device("sm_90a", num_sms=3) as device:
        assert device.options.num_sms == 3


def test_a_kernel_may_read_its_modules_variables():
    """PTX ISA, .global: such variables belong to the module, so no argument of the launch points to them."""
    text = """
        .version 8.8
        .target sm_90a
        .address_size 64
        .global .align 4 .b32 table[2] = {7, 9};
        .visible .entry kernel(.param .u64 out)
        {
            .reg .b32 %value;
            .reg .b64 %out, %table;
            ld.param.u64 %out, [out];
            mov.u64 %table, table;
            ld.global.u32 %value, [%table+OFFSET];
            st.global.u32 [%out], %value;
            ret;
        }
    """
    out = torch.zeros(1, dtype=torch.int32)
    emulate.run_ptx(text.replace("OFFSET", "4"), [out])
    assert out.item() == 9
    with pytest.raises(emulate.EmulationError, match="out-of-bounds"):
        emulate.run_ptx(text.replace("OFFSET", "8"), [out])


def test_one_device_at_a_time():
    with emulate.device("sm_90a"), pytest.raises(EmulatorError, match="sm_90a"), emulate.device("sm_100a"):
        pass
    with emulate.device("sm_100a") as device:
        assert doubled(device)


@pytest.mark.parametrize(
    ("arch", "options", "word"),
    [
        ("sm_75", {}, "sm_75"),
        ("sm_90a", {"schedule": "lazy"}, "lazy"),
        ("sm_90a", {"strict": frozenset({"x"})}, "x"),
    ],
)
def test_bad_options_are_named(arch, options, word):
    with pytest.raises(ValueError, match=word), emulate.device(arch, **options):
        pass


def test_the_kernel_may_be_transformed():
    """A kernel without its store leaves the output as it was."""
    from flash4_torch.emulator import mutate

    with emulate.device("sm_90a") as device:
        device.transform = lambda kernel: mutate.without(
            kernel, next(i for i, ins in enumerate(kernel.instructions) if ins.opcode.startswith("st.global"))
        )
        assert not doubled(device)


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flash4_torch.testing.emulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_command_line_prints_a_table(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_emulate as t, torch, cutlass.cute as cute\n"
        "x, y = torch.randn(64 + int(sys.argv[1])), torch.zeros(64)\n"
        "f = cute.compile(t.double, *map(t.from_dlpack, (x, y)), 0)\n"
        "f(*map(t.from_dlpack, (x, y)))\n"
        "print('right' if torch.equal(y, x[:64] * 2) else 'wrong')\n"
    )
    done = command_line("--arch", "sm_90a", "--schedule", "late", "--lines", "2", str(script), "0")
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout and "no findings" in done.stdout and "warp-instructions" in done.stdout


@pytest.fixture
def script(tmp_path):
    """A script that launches once on its own device.

    It imports what lies next to it, and ends with the status given.
    """
    (tmp_path / "beside_the_script.py").write_text("BEYOND = 1 << 20\n")
    path = tmp_path / "script.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import beside_the_script, test_emulate as t\n"
        "from flash4_torch.testing import emulate\n"
        "with emulate.device(check=False) as device:\n"
        "    assert t.doubled(device, beside_the_script.BEYOND * int(sys.argv[1])) == (sys.argv[1] == '0')\n"
        "    print(device.arch, device.options.schedule, device.options.num_sms)\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    return str(path)


def test_a_device_that_gives_way_is_back_afterwards():
    with emulate.device("sm_100a", gives_way=True, schedule="late", num_sms=3) as outer:
        assert doubled(outer)
        with emulate.device("sm_90a", seed=5) as inner:
            assert inner.arch == "sm_90a" and inner.options == emulate.Options("late", 5, num_sms=3)
            assert doubled(inner)
            with pytest.raises(EmulatorError, match="sm_90a device is active"), emulate.device():
                pass
        assert len(inner.reports) == 1
        assert doubled(outer) and len(inner.reports) == 1
        with emulate.device() as same:
            assert same.arch == "sm_100a"
    assert len(outer.reports) == 3 and outer.reports[1] is inner.reports[0]
    with emulate.device("sm_90a") as device:
        assert doubled(device)


def test_command_line_reports_devices_of_the_script(script, capsys):
    options = ["--arch", "sm_103a", "--schedule", "late", "--num-sms", "7", script]
    assert emulate.main([*options, "0", "0"]) == 0
    shown = capsys.readouterr().out
    assert "sm_103a late 7" in shown and shown.endswith("\nno findings in 1 launch\n")
    assert emulate.main([*options, "0", "3"]) == 3
    assert emulate.main([*options, "1", "3"]) == 1
    shown = capsys.readouterr().out
    assert "out-of-bounds" in shown.rpartition("\nfindings in 1 of 1 launch\n")[2]


def test_command_line_refuses_what_it_cannot_run(tmp_path, capsys, monkeypatch):
    assert emulate.main([str(tmp_path / "nowhere.py")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    (tmp_path / "script.py").write_text("print('ran')")
    monkeypatch.setenv("FLASH4_ARCH", "nope")
    assert emulate.main([str(tmp_path / "script.py")]) == 2
    shown = capsys.readouterr()
    assert "FLASH4_ARCH is 'nope'" in shown.err and shown.out == ""
    assert emulate.main(["--arch", "sm_90a", str(tmp_path / "script.py")]) == 0
    assert capsys.readouterr().out == "ran\nnothing was launched\n"


def test_command_line_reports_before_a_traceback(script, capsys):
    with pytest.raises(IndexError):
        emulate.main([script, "1"])
    assert "out-of-bounds" in capsys.readouterr().out


def test_the_first_build_says_so_once(monkeypatch, tmp_path, capsys):
    source = tmp_path / "part.cpp"
    source.write_text("int part() { return 1; }\n")
    monkeypatch.setenv("FLASH4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_unsaid", threading.Lock())
    for flags in (["-shared", "-fPIC"], ["-shared", "-fPIC"], ["-shared", "-fPIC", "-O1"]):
        build.shared_object("libpart", [source], flags)
    assert capsys.readouterr().err == "flash4_torch: compiling the emulator once, about a minute\n"


def test_command_line_helps():
    done = command_line("--help")
    assert done.returncode == 0 and "--schedule" in done.stdout


def test_the_example_finds_its_race():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "find_a_race.py")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("with the barrier")
    assert "race" in before and "find_a_race.py" in before
    assert "no findings, the result is right" in after


def test_the_example_runs_under_the_command():
    done = command_line("examples/find_a_race.py")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    example, _, found = done.stdout.rpartition("\nfindings in 1 of 2 launches\n")
    assert "no findings, the result is right" in example and "warp-instructions" in example
    assert "race" in found and "find_a_race.py" in found
