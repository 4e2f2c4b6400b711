"""What a training will hold in memory, before it runs: `sizes` of a model, the `account`, and its `table`."""
