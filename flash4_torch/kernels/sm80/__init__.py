"""Device code for GPUs without warpgroup MMAs: warp-level MMAs (mma.sync), ldmatrix and cp.async alone."""
