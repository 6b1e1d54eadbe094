"""The backward kernel. Read plan, launch, kernel, load, mainloop, walk, weights, store_dq, epilogue."""
