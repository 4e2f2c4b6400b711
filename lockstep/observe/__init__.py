"""Readers of events that show or record them."""
