"""A training step in several ways, in the same processes: `plan` and, in every worker, `worker`."""
