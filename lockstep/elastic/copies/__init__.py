"""A copy of this worker as another one: why it cannot be made, if it cannot; the fork; and whoever asks for it."""
