"""The backward's main kernel.

Read plan, launch, kernel, load, mask_tile, mainloop, weights, dq_sums, empty, epilogue.
"""
