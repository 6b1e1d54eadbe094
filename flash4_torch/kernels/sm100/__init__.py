"""Device code for Blackwell, sm_100a: accumulators in TMEM, MMAs issued by one thread."""
