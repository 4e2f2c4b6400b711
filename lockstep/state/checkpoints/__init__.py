"""The checkpoints of a run: one on disk, a folder of them, when they are due, how they are saved and resumed from."""
