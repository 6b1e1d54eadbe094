"""Attention in plain torch: `attention` is the definition, `tiled` the algorithm, `dropout` the mask."""
