"""Where the time of steps went, by worker. Pure.

Note [Parts of a step]
The time of a step, on one worker, goes from the commit of the step before to its own. It is cut into parts that add up
to all of it:

- compute: inside of the step's lanes;
- waiting: after the worker's own lanes, until the last worker has ended its lanes too: the time for which that worker
  was waited for;
- communication: from there to the commit. Only what is exposed: reductions that pass while lanes are computed cost
  nothing, and are counted apart, as hidden;
- data: the wait for a batch of the loader;
- update: inside of the optimizer;
- host: the rest, which is the script's own code between steps, evaluations included.

On a GPU these are times of the host, which only queues work: what it has queued is waited for in communication, or
where the script reads a number back. Steps in which workers came or went are left out: recovery has its own track.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.observe.timeline.clocks import on_one_clock
from lockstep.observe.timeline.part import Part
from lockstep.observe.timeline.spans import Activities, SpanKind, TimeSpan, activities

PARTS = ("compute", "waiting", "communication", "data", "update", "host")
"""See Note [Parts of a step]."""


@dataclass(frozen=True)
class StepTime:
    """Where the time of one step went on one worker."""

    step: int
    worker: int
    took_s: float
    parts_s: Mapping[str, float]
    reduce_s: float
    """How long the wire was at work."""
    hidden_s: float
    """As much of it as passed while lanes were computed."""
    num_lanes: int
    waited_for: int | None
    """The worker that ended its lanes last; None if it is this one."""


@dataclass(frozen=True)
class Account:
    """Where the time of some steps went, on the average of workers and steps."""

    steps: tuple[int, ...]
    workers: tuple[int, ...]
    step_s: float
    parts_s: Mapping[str, float]
    reduce_s: float
    hidden_s: float
    waited_for: Mapping[int, int]
    """In how many of the steps a worker was the last to end its lanes."""
    lane_s: Mapping[int, float]
    """What each worker takes for a lane."""
    on_gpu: bool
    num_left_out: int
    """Steps in which workers came or went."""

    def share(self, part: str) -> float:
        return self.parts_s[part] / self.step_s if self.step_s else 0.0


def make_account(parts: Sequence[Part], step: int | None = None) -> Account | None:
    """The account of one step, or of all that were recorded but the first, which warms up; None if there is none."""
    together = on_one_clock([activities(part) for part in parts])
    times, left_out = step_times(together)
    known = sorted({time.step for time in times})
    chosen = [step] if step is not None else known[1:] or known
    found = [time for time in times if time.step in set(chosen)]
    if not found:
        return None
    workers = tuple(sorted({time.worker for time in found}))
    on_gpu = any(part.head.device != "cpu" for part in parts)
    return Account(
        steps=tuple(number for number in known if number in set(chosen)),
        workers=workers,
        step_s=_mean(time.took_s for time in found),
        parts_s={name: _mean(time.parts_s[name] for time in found) for name in PARTS},
        reduce_s=_mean(time.reduce_s for time in found),
        hidden_s=_mean(time.hidden_s for time in found),
        waited_for=_last_ones(found),
        lane_s={worker: _lane_s([time for time in found if time.worker == worker]) for worker in workers},
        on_gpu=on_gpu,
        num_left_out=len(left_out - set(known)) if step is None else 0,
    )


def step_times(together: Sequence[Activities]) -> tuple[list[StepTime], set[int]]:
    """Where the time of every step went on every worker, and the steps in which workers came or went."""
    ready = _last_ready(together)
    times: list[StepTime] = []
    changed: set[int] = set()
    for activity in together:
        waits = _waits(activity)
        begins = [span.begin_ns for span in activity.spans]
        for before, commit in pairwise(activity.commits):
            inside = _between(activity.spans, begins, before.time_ns, commit.time_ns)
            wait = waits.get(commit.step)
            if wait is None or commit.step != before.step + 1 or _has_change(inside):
                changed.add(commit.step)
                continue
            last_ns, last = ready[wait.generation, wait.step]
            times.append(_of_step(inside, wait, before.time_ns, commit.time_ns, last_ns, last))
    return times, changed


def _of_step(
    inside: Sequence[TimeSpan], wait: TimeSpan, begin_ns: int, end_ns: int, last_ns: int, last: int
) -> StepTime:
    lanes = [span for span in inside if span.kind is SpanKind.LANE and span.trains]
    waiting_ns = min(max(last_ns - wait.begin_ns, 0), wait.took_ns)
    parts_ns = {
        "compute": sum(span.took_ns for span in lanes),
        "waiting": waiting_ns,
        "communication": wait.took_ns - waiting_ns,
        "data": sum(span.took_ns for span in inside if span.kind is SpanKind.DATA),
        "update": sum(span.took_ns for span in inside if span.kind is SpanKind.UPDATE),
    }
    parts_ns["host"] = max(0, end_ns - begin_ns - sum(parts_ns.values()))
    reducing = [span for span in inside if span.kind is SpanKind.REDUCE]
    return StepTime(
        step=wait.step,
        worker=wait.worker,
        took_s=(end_ns - begin_ns) / 1e9,
        parts_s={name: taken_ns / 1e9 for name, taken_ns in parts_ns.items()},
        reduce_s=sum(span.took_ns for span in reducing) / 1e9,
        hidden_s=sum(_overlap_ns(one, lane) for one in reducing for lane in lanes) / 1e9,
        num_lanes=len(lanes),
        waited_for=None if last == wait.worker else last,
    )


def _waits(activity: Activities) -> dict[int, TimeSpan]:
    """The wait at the end of each step; that of the last attempt, if there were several."""
    found = (span for span in activity.spans if span.kind is SpanKind.WAIT and span.is_whole)
    return {span.step: span for span in found if span.name.endswith("the end of a step")}


def _last_ready(together: Iterable[Activities]) -> dict[tuple[int, int], tuple[int, int]]:
    """When the last worker has ended its lanes, and which one that is, by generation and step."""
    ready: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for activity in together:
        for span in _waits(activity).values():
            ready[span.generation, span.step].append((span.begin_ns, span.worker))
    return {key: max(all_ready) for key, all_ready in ready.items()}


def _between(spans: Sequence[TimeSpan], begins: Sequence[int], begin_ns: int, end_ns: int) -> Sequence[TimeSpan]:
    return spans[bisect_right(begins, begin_ns) : bisect_right(begins, end_ns)]


def _has_change(spans: Iterable[TimeSpan]) -> bool:
    return any(span.kind in (SpanKind.RECOVERY, SpanKind.JOIN) for span in spans)


def _overlap_ns(one: TimeSpan, other: TimeSpan) -> int:
    return max(0, min(one.end_ns, other.end_ns) - max(one.begin_ns, other.begin_ns))


def _last_ones(times: Iterable[StepTime]) -> dict[int, int]:
    """In how many steps others waited for a worker, most first."""
    steps = {(time.step, time.waited_for) for time in times if time.waited_for is not None}
    return dict(Counter(worker for _, worker in steps).most_common())


def _lane_s(times: Sequence[StepTime]) -> float:
    num_lanes = sum(time.num_lanes for time in times)
    return sum(time.parts_s["compute"] for time in times) / num_lanes if num_lanes else 0.0


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
