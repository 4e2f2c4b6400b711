"""Verifies the promise.

`digest` is over bits, `reference` the naive trainer. `trace` writes what a worker computed, `evidence` compares traces,
`cause` and `fault_cause` judge why they differ.
"""
