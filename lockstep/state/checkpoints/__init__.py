"""Many checkpoints of one run: when they are due, written beside the training, kept, found again, and agreed upon."""
