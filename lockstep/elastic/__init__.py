"""Who takes part: decides it, performs it, and guards every step while workers come and go.

`membership` decides, without a socket. `recovery` performs its actions: `endpoint` is where other workers reach this
one, `client` reaches another's, `opener` opens the wire of a generation. `store` is the small store by which they
speak, for those who know the run's secret; `address` is where others find this host.

`formation` forms each generation; `newcomer`, `first_worker` and `pace` are its parts, and `copies` replaces a worker
by a fork of another. `guard` stands around each step, and puts what this worker asks of all (`requests`) into its
record. `shown_waits` shows what a worker waits for.

`entrance` finds whether this worker founds the run or joins it: by a `roster`, where members are found between hosts.
`rendezvous` and `founders` bring the first workers together, by `agent_store` where torchrun has started them.
"""
