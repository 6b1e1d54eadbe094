"""Kernels for Hopper: wgmma, TMA, warp specialisation."""
