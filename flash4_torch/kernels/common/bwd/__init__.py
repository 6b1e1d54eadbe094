"""Device code that the backward kernels share, and the layouts of their workspaces."""
