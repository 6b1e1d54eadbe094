"""The emulator's sm_90a half against a Hopper GPU: the same compiled kernels, launches and memory on both.

Where CuTe-DSL is installed, with or without a GPU, launches run in the emulator and are recorded:

    PYTHONPATH=.:tests python -m emulator.hardware.record recording.pkl
    PYTHONPATH=.:tests python -m emulator.hardware.record --peers recording.pkl  # with flash-attn-4's

On a machine with a Hopper GPU, which needs only torch and cuda-python, they run again and the results are
compared:

    PYTHONPATH=tests python -m emulator.hardware.replay recording.pkl result.json

A recording holds the cubin that the DSL made from the very PTX that the emulator ran, each launch's
parameters, and all memory that these point to, before and after. So every launch starts from the same bytes
on both sides.
"""
