"""Lanes and updates as CUDA graphs, recorded once and replayed."""
