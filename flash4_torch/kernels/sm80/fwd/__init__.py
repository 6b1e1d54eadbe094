"""The forward kernel. Read plan, launch, kernel, load, mainloop, epilogue."""
