"""Device code that the forward kernels share."""
