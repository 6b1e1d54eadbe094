#!/bin/bash
# Runs tests with the emulator's engine under AddressSanitizer and UndefinedBehaviorSanitizer; any report is a failure.
#
#   tests/emulator/sanitize.sh                           all of tests/emulator
#   tests/emulator/sanitize.sh tests/emulator/test_x.py  any arguments of pytest
#
# PYTHON names the interpreter (default: .venv/bin/python). FLASH4_TEST_ALL=1 also tries all malformed
# instructions.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}

# -O1 makes reports readable; it also builds faster than the engine's own -O3, which it overrides.
export FLASH4_EMULATOR_FLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
"$python" -c "from flash4_torch.emulator import build; build.engine(); build.runtime()"

# Python is not built with the sanitizers, so their library must be loaded first, then the C++ library that throws.
export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
# Leaks and mismatches in the interpreter and its extensions are not ours. Python's own allocator would hide overruns.
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
export PYTHONMALLOC=malloc
exec "$python" -m pytest -p no:cacheprovider "${@:-tests/emulator}"
