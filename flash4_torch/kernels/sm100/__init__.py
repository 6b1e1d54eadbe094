"""Device code for Blackwell, sm_100a: tensor-memory accumulators, products issued by one thread."""
