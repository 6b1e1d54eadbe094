"""The forward kernel. Read plan, launch, kernel, load, mma, softmax, correction, epilogue."""
