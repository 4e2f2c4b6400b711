"""The checkpoints of a run: one on disk, a folder of them, when they are due, how a run saves and resumes."""
