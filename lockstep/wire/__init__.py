"""The wire: moving and adding bytes between workers.

A `reducer` adds buckets: by sending (`schedules` are the moves as data, and their executor runs them over a
`transport`), in the `shared` memory of one host, on both levels (`network`), or between GPUs (`cuda`). `link`
measures, `choice` decides. `exchange` and `agreement` carry the small messages ahead of the data, by the `route` of
each worker; `reduction_queue` keeps the order of reductions while the backward pass runs; `open` makes a wire, and
a `generation` is a wire with its members and lanes.
"""

from lockstep.wire.agreement import Agreement, Proposal
from lockstep.wire.exchange import broadcast, exchange, exchange_with_peers
from lockstep.wire.open import (
    Wire,
    WireOptions,
    in_gpu_memory,
    in_process,
    in_shared_memory,
    open_wire,
    over_gloo,
    over_gpus,
    over_hosts,
    over_nccl,
)
from lockstep.wire.reducer import Reducer
from lockstep.wire.reduction_queue import PendingReduction

__all__ = [
    "Agreement",
    "PendingReduction",
    "Proposal",
    "Reducer",
    "Wire",
    "WireOptions",
    "broadcast",
    "exchange",
    "exchange_with_peers",
    "in_gpu_memory",
    "in_process",
    "in_shared_memory",
    "open_wire",
    "over_gloo",
    "over_gpus",
    "over_hosts",
    "over_nccl",
]
