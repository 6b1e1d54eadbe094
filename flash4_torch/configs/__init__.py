"""The tiles and switches that a kernel is compiled with: readable tables, tested without a GPU."""
