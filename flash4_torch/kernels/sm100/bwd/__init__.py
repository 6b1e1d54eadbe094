"""The backward kernel. Read plan, launch, kernel, load, mma, compute, reduce, epilogue; then *_2cta."""
