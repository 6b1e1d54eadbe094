"""`python -m flash4_torch bench`: speed and memory against PyTorch's own attention; see README.md."""
