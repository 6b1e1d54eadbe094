"""Which tiles and switches a kernel is compiled with: readable tables, tested without a GPU."""
