"""Reads events and shows them to people."""
