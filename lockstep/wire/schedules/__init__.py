"""Collectives as data: pure functions that return which worker sends what to which, and which adds what.

`schedule` is the form, `exact` those that a run uses. A `program` is one worker's part, and `executor` runs it.
"""

from lockstep.wire.schedules.exact import direct, direct_all_gather, direct_reduce_scatter, one_root_each, oneshot
from lockstep.wire.schedules.schedule import AddPart, Collective, Cost, Schedule, ScheduleRound, SendPart, slices

__all__ = [
    "AddPart",
    "Collective",
    "Cost",
    "Schedule",
    "ScheduleRound",
    "SendPart",
    "direct",
    "direct_all_gather",
    "direct_reduce_scatter",
    "one_root_each",
    "oneshot",
    "slices",
]
