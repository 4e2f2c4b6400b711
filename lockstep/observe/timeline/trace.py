"""The timeline of a run as a trace of Chrome's JSON format, which Perfetto and chrome://tracing open. Pure.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A worker is a "process"
of the trace, and each of its tracks a "thread". Times are microseconds since the first of them.

Note [Arrows]
The sum of a bucket is there when the last worker has begun to give its part of it. So an arrow leads from the reduction
of the worker that began last to that of every other one: it shows whom the others have waited for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.observe.timeline.clocks import on_one_clock, reductions
from lockstep.observe.timeline.part import Part
from lockstep.observe.timeline.spans import Activities, Instant, TimelineTrack, TimeSpan, activities

LAUNCHER_PID = 1
_FIRST_PID = 2
_TRACKS = {
    TimelineTrack.SCRIPT: "script: data, lanes, backward, waiting, update",
    TimelineTrack.BUCKETS: "buckets filling",
    TimelineTrack.REDUCTION: "reduction",
    TimelineTrack.CHECKPOINT: "checkpoint",
    TimelineTrack.MEMBERSHIP: "membership",
}


@dataclass(frozen=True)
class LauncherMark:
    """What the launcher did or saw, `at` a time of day in seconds: its host may have no part in the timeline."""

    name: str
    worker: int
    step: int
    at: float


def make_trace(parts: Sequence[Part], marks: Sequence[LauncherMark] = ()) -> dict[str, Any]:
    """The whole trace. See Note [Clocks of hosts] in clocks.py."""
    together = on_one_clock([activities(part) for part in parts])
    day_ns = parts[0].head.wall_ns - parts[0].head.monotonic_ns if parts else 0
    marked = [(int(mark.at * 1e9) - day_ns, mark) for mark in marks]
    begin_ns = min([*_begins(together), *(time_ns for time_ns, _ in marked)], default=0)
    workers = sorted({activity.part.head.worker for activity in together})
    events: list[dict[str, Any]] = [*_names(workers, bool(marks))]
    for activity in together:
        events += [_slice(span, begin_ns) for span in activity.spans]
        events += [_instant(instant, begin_ns) for instant in activity.instants]
    events += _arrows(together, begin_ns)
    events += [_mark(mark, _us(time_ns, begin_ns)) for time_ns, mark in marked]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"hosts": _hosts(parts)}}


def _begins(together: Iterable[Activities]) -> Iterator[int]:
    for activity in together:
        yield from (span.begin_ns for span in activity.spans)
        yield from (instant.time_ns for instant in activity.instants)


def _hosts(parts: Iterable[Part]) -> dict[str, str]:
    return {f"worker {part.head.worker}": part.head.host for part in parts}


def _pid(worker: int) -> int:
    return _FIRST_PID + worker


def _tid(worker: int, track: TimelineTrack) -> int:
    """Its own in the whole trace: some readers know threads by it alone."""
    return _pid(worker) * 10 + track


def _names(workers: Iterable[int], has_launcher: bool) -> Iterator[dict[str, Any]]:
    if has_launcher:
        yield from _named(LAUNCHER_PID, LAUNCHER_PID, "process", "launcher", 0)
        yield from _named(LAUNCHER_PID, LAUNCHER_PID, "thread", "workers that come and go", 0)
    for worker in workers:
        yield from _named(_pid(worker), _tid(worker, TimelineTrack.SCRIPT), "process", f"worker {worker}", worker + 1)
        for track, name in _TRACKS.items():
            yield from _named(_pid(worker), _tid(worker, track), "thread", name, track)


def _named(pid: int, tid: int, what: str, name: str, order: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _us(time_ns: int, begin_ns: int) -> float:
    return (time_ns - begin_ns) / 1e3


def _slice(span: TimeSpan, begin_ns: int) -> dict[str, Any]:
    facts = {"step": span.step, "generation": span.generation, **dict(span.facts)}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind.name.lower(),
        "pid": _pid(span.worker),
        "tid": _tid(span.worker, span.track),
        "ts": _us(span.begin_ns, begin_ns),
        "dur": span.took_ns / 1e3,
        "args": facts if span.is_whole else {**facts, "unfinished": True},
    }


def _instant(instant: Instant, begin_ns: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "p",
        "name": instant.name,
        "cat": "membership",
        "pid": _pid(instant.worker),
        "tid": _tid(instant.worker, TimelineTrack.MEMBERSHIP),
        "ts": _us(instant.time_ns, begin_ns),
        "args": {"step": instant.step, **dict(instant.facts)},
    }


def _mark(mark: LauncherMark, time_us: float) -> dict[str, Any]:
    about: Mapping[str, Any] = {"step": mark.step} if mark.worker < 0 else {"step": mark.step, "worker": mark.worker}
    at = {"pid": LAUNCHER_PID, "tid": LAUNCHER_PID, "ts": time_us}
    return {"ph": "i", "s": "g", "name": mark.name, "cat": "launcher", **at, "args": about}


def _arrows(together: Sequence[Activities], begin_ns: int) -> Iterator[dict[str, Any]]:
    """See Note [Arrows]."""
    for (generation, step, bucket), workers in reductions(together).items():
        spans = sorted((span for _, span in workers), key=lambda span: (span.begin_ns, span.worker))
        last = spans[-1]
        for span in spans[:-1]:
            id = f"{generation}.{step}.{bucket}.{last.worker}-{span.worker}"
            yield _arrow("s", id, last, last.begin_ns, begin_ns)
            yield _arrow("f", id, span, min(max(last.begin_ns, span.begin_ns), span.end_ns), begin_ns)


def _arrow(end: str, id: str, span: TimeSpan, time_ns: int, begin_ns: int) -> dict[str, Any]:
    return {
        "ph": end,
        "bp": "e",
        "id": id,
        "name": "waited for",
        "cat": "reduction",
        "pid": _pid(span.worker),
        "tid": _tid(span.worker, span.track),
        "ts": _us(time_ns, begin_ns),
    }
