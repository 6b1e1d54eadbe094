"""Measures how fast the emulator runs flash-attn-4.

    PYTHONPATH=.:tests/emulator python tests/emulator/peer_speed.py [sm_90a or sm_100a]

Prints a line for each launch of a causal forward and backward of B=1 S=2048 H=4 D=128: seconds of CPU time,
million warp instructions a second, GFLOP/s of the tensor cores. In the second round everything is already
compiled and lowered.
"""

from __future__ import annotations

import sys
import time

import torch

from flash4_torch.bench.fa4_emulated import flash_attn_4
from flash4_torch.emulator import host
from flash4_torch.testing.emulate import Device, Options

S, H, D = 2048, 4, 128


def main(arch: str) -> None:
    device = Device(arch)

    def timed(launch: host.Launch) -> None:
        start = time.process_time()
        device.launch(launch)
        seconds = time.process_time() - start
        report = device.reports.pop()
        counters = report.counters
        print(
            f"  {seconds:6.3f} s  {1e-6 * counters.instructions / seconds:5.1f} M/s"
            f"  {1e-9 * counters.mma_flops / seconds:5.1f} GFLOP/s  {report.kernel[:60]}"
        )

    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, S, H, D).bfloat16() for _ in range(4))
    with flash_attn_4(timed, arch) as interface:
        for races in (False, True):
            device.options = Options(races=races)
            for what in ("first round", "second round"):
                print(f"races {'on' if races else 'off'}, {what}")
                out, lse, *_ = interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
                interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=True)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["sm_100a"])
