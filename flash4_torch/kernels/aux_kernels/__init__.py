"""Kernels of one file each, the same source for every architecture."""
