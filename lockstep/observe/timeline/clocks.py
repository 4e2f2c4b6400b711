"""The clocks of several hosts, brought together. Pure.

Note [Clocks of hosts]
All processes of one host share its monotonic clock, so nothing is done there. Every part says how that clock stood to
the time of day, by which the clocks of two hosts are compared first; that is as good as the hosts' own
synchronisation, often milliseconds. The reductions know better: no worker has the sum of a bucket before every worker
has begun to give its own. So for workers a and b, begin(a) + shift(a) <= end(b) + shift(b), and the same the other
way round. Over all reductions this leaves an interval for the shift between two hosts, as long as the shortest
reduction. Where the time of day is outside of the interval, the nearer end of it is taken. What remains of the error is
at most the length of the shortest reduction, which is why an arrow may still seem to point back by that much.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from lockstep.observe.timeline.spans import Activities, SpanKind, TimeSpan

Reduction = tuple[int, int, int]
"""Generation, step, bucket."""


def reductions(all_activities: Iterable[Activities]) -> dict[Reduction, list[tuple[str, TimeSpan]]]:
    """The spans of each reduction, one for each worker that took part, with the hosts' clocks."""
    found: dict[Reduction, list[tuple[str, TimeSpan]]] = defaultdict(list)
    for activity in all_activities:
        for span in activity.spans:
            if span.kind is SpanKind.REDUCE and span.is_whole:
                found[span.generation, span.step, span.number].append((activity.part.head.boot, span))
    return dict(found)


def shifts_ns(all_activities: Sequence[Activities]) -> dict[str, int]:
    """What is added to the times of each clock, by its name, to bring them onto the first one's."""
    if not all_activities:
        return {}
    by_day: dict[str, int] = {}
    for activity in all_activities:
        head = activity.part.head
        by_day.setdefault(head.boot, head.wall_ns - head.monotonic_ns)
    first = all_activities[0].part.head.boot
    together = list(reductions(all_activities).values())
    return {boot: _within(at_day - by_day[first], *_bounds(first, boot, together)) for boot, at_day in by_day.items()}


def _bounds(first: str, other: str, together: Iterable[Sequence[tuple[str, TimeSpan]]]) -> tuple[float, float]:
    """The interval of the other clock's shift that the reductions leave. See Note [Clocks of hosts]."""
    if first == other:
        return 0, 0
    low, high = -inf, inf
    for workers in together:
        here = [span for boot, span in workers if boot == first]
        there = [span for boot, span in workers if boot == other]
        for mine in here:
            for theirs in there:
                low = max(low, mine.begin_ns - theirs.end_ns)
                high = min(high, mine.end_ns - theirs.begin_ns)
    return low, high


def _within(value: int, low: float, high: float) -> int:
    return int(min(max(value, low), high)) if low <= high else value


def shifted(activity: Activities, shifts: Mapping[str, int]) -> Activities:
    """The same activities, with the times of the first clock."""
    by_ns = shifts.get(activity.part.head.boot, 0)
    if not by_ns:
        return activity
    return replace(
        activity,
        spans=tuple(replace(one, begin_ns=one.begin_ns + by_ns, end_ns=one.end_ns + by_ns) for one in activity.spans),
        instants=tuple(replace(one, time_ns=one.time_ns + by_ns) for one in activity.instants),
        commits=tuple(one._replace(time_ns=one.time_ns + by_ns) for one in activity.commits),
    )


def on_one_clock(all_activities: Sequence[Activities]) -> tuple[Activities, ...]:
    """All of them with the times of the first one's clock."""
    shifts = shifts_ns(all_activities)
    return tuple(shifted(activity, shifts) for activity in all_activities)
