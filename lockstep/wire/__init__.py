"""The wire: moving and adding bytes between workers.

`algorithms` says what moves where, as data; `executor` carries it out over a `transport`; `exchange` and `agreement`
are the small talk that goes ahead of the data; `sequence` keeps the order of exchanges while the backward pass runs.
"""

from lockstep.wire.agreement import Agreement, Plan
from lockstep.wire.exchange import broadcast, exchange
from lockstep.wire.executor import Executor
from lockstep.wire.opening import Wire, in_process, over_gloo

__all__ = ["Agreement", "Executor", "Plan", "Wire", "broadcast", "exchange", "in_process", "over_gloo"]
