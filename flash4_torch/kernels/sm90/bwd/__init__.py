"""Gradients. Read plan, launch, kernel, load, mainloop, preprocess, walk, weights, store_dq, finish_dq and epilogue."""
