"""`python -m flash4_torch bench`: speed and memory against PyTorch's and others' attention. See README.md."""
