"""The torch.distributed backend "lockstep": collectives of one host's processes in shared memory.

`opening` makes a group for torch; `group` is what torch calls. A collective becomes a `Call` (what was asked for, in
words that all members compare) and one of two programs over `rounds`: `exchanging` moves bytes, `reducing` combines
numbers, as `reductions` says. `order` runs one operation after the other; `work` is what the caller waits for.
"""
