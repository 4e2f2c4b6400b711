"""The torch.distributed backend "lockstep": collectives of one host's processes in shared memory.

`group` is what torch calls, `work` runs what was called. `members` share memory; a `call` is compared by all before
data moves. `reduce` combines numbers, with `reductions` for each dtype; `exchange` moves bytes, both in `rounds` over
`flat` memory. `messages` are sends and receives.
"""
