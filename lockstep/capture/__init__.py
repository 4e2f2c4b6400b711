"""Lanes and updates as CUDA graphs, recorded once and replayed.

`captures` is what `run.captured` returns; `lanes` and `update` are the two kinds, made of a recorded `graph`.
"""
