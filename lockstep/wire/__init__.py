"""The wire: moving and adding bytes between workers.

A `reducer` adds buckets: by sending (`algorithms` says what moves where, as data; `executor` carries it out over a
`transport`), in the `shared` memory of one host, on both levels (`hierarchy`), or between GPUs (`cuda`). `link`
measures, `choice` decides.
`exchange` and `agreement` are the small talk that goes ahead of the data; `sequence` keeps the order of reductions
while the backward pass runs; `opening` makes a wire. `backend` gives all this to torch.distributed.
"""

from lockstep.wire.agreement import Agreement, Plan
from lockstep.wire.exchange import broadcast, exchange, hear
from lockstep.wire.open import (
    Wire,
    in_gpu_memory,
    in_process,
    in_shared_memory,
    over_gloo,
    over_gpus,
    over_hosts,
    over_nccl,
)
from lockstep.wire.reducer import Reducer
from lockstep.wire.sequence import Launched

__all__ = [
    "Agreement",
    "Launched",
    "Plan",
    "Reducer",
    "Wire",
    "broadcast",
    "exchange",
    "hear",
    "in_gpu_memory",
    "in_process",
    "in_shared_memory",
    "over_gloo",
    "over_gpus",
    "over_hosts",
    "over_nccl",
]
