"""Collectives as data: pure functions that say which worker sends what to whom, and who adds what."""

from lockstep.wire.schedules.broadcast import binomial, direct_broadcast, scatter_gather
from lockstep.wire.schedules.circulant import circulant, doubling_all_gather, halving_reduce_scatter
from lockstep.wire.schedules.direct import direct, direct_all_gather, direct_reduce_scatter, one_root_each
from lockstep.wire.schedules.halving import halving_doubling
from lockstep.wire.schedules.hierarchical import HostReduction, Hosts, hierarchical, host_reduction
from lockstep.wire.schedules.oneshot import oneshot, oneshot_exact
from lockstep.wire.schedules.ring import ring, ring_all_gather, ring_reduce_scatter
from lockstep.wire.schedules.schedule import Add, Collective, Round, Schedule, Send, slices
from lockstep.wire.schedules.tree import double_tree, tree

__all__ = [
    "Add",
    "Collective",
    "HostReduction",
    "Hosts",
    "Round",
    "Schedule",
    "Send",
    "binomial",
    "circulant",
    "direct",
    "direct_all_gather",
    "direct_broadcast",
    "direct_reduce_scatter",
    "double_tree",
    "doubling_all_gather",
    "halving_doubling",
    "halving_reduce_scatter",
    "hierarchical",
    "host_reduction",
    "one_root_each",
    "oneshot",
    "oneshot_exact",
    "ring",
    "ring_all_gather",
    "ring_reduce_scatter",
    "scatter_gather",
    "slices",
    "tree",
]
