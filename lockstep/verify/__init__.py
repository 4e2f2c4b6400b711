"""Verifies the promise: digests, the naive reference trainer, traces of a run and their comparison."""
