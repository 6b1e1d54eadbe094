"""The backward's main kernel. Read plan, launch, kernel, load, mainloop, weights, dq_sums, epilogue."""
