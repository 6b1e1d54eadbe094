"""Gradients. Read plan, launch, kernel, load, mainloop, walk, weights, store_dq, finish_dq and epilogue."""
