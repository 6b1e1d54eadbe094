"""The backward kernel. Read plan, launch, kernel, load, mainloop, store_dq, epilogue."""
