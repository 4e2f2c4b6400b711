"""Whole programs built on lockstep, which the commands start: the benchmark, the demo, the verification."""
