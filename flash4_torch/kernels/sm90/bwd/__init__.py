"""Gradients. Read plan, launch, kernel, load, mainloop, preprocess, walk, weights, store_commands,
store_warp, finish_dq and epilogue.
"""
