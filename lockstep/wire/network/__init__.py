"""Between hosts: messages by torch's process groups, sums by schedules, on one level or two.

`gloo` sends, `native` is its own all-reduce, `hierarchical` reduces on two levels, for which `hosts` finds who shares
memory, and `routed` sends through it inside a host. `deadline`, `keepalive`, `hangups` and `first_gone` notice who is
lost.
"""
