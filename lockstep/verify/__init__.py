"""Is it true? Digests, the naive reference trainer, traces of a run and their comparison."""
