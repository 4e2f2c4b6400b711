"""A training step in several ways, in the same processes: `plan` and, in every worker, `worker`.

`sharded_sides` are the baselines that shard, `peak` is the memory of each side.
"""
