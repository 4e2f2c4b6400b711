"""What a worker did from when to when: the records of a part as spans on tracks. Pure.

Note [Tracks]
A worker has five tracks. Spans of one track are disjoint, or one stands inside of another. On SCRIPT is what the
script's thread does: a step with its lanes, the backward passes in them, and the wait at its end; between steps data
and updates. BUCKETS shows buckets as they fill, each from the one before it or from the begin of the backward pass.
REDUCTION shows what the wire adds, on its own thread, beside the backward pass. CHECKPOINT and MEMBERSHIP show what
their names say. A span whose end was never written, because the worker was killed or the step was undone, ends where
the next thing begins, and is `is_whole=False`.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from lockstep.events import Wait
from lockstep.observe.timeline.part import Part, Record


class TimelineTrack(IntEnum):
    """See Note [Tracks]."""

    SCRIPT = 0
    BUCKETS = 1
    REDUCTION = 2
    CHECKPOINT = 3
    MEMBERSHIP = 4


class SpanKind(IntEnum):
    """What a span shows."""

    STEP = 0
    LANE = 1
    BACKWARD = 2
    WAIT = 3
    WAIT_PART = 4
    DATA = 5
    UPDATE = 6
    FILL = 7
    REDUCE = 8
    CHECKPOINT = 9
    RECOVERY = 10
    JOIN = 11


@dataclass(frozen=True)
class TimeSpan:
    """From `begin_ns` to `end_ns` on the monotonic clock of the worker's host."""

    kind: SpanKind
    name: str
    track: TimelineTrack
    worker: int
    step: int
    generation: int
    begin_ns: int
    end_ns: int
    number: int = 0
    """The lane or the bucket."""
    trains: bool = True
    is_whole: bool = True
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class Instant:
    """Something that has no length."""

    name: str
    worker: int
    step: int
    time_ns: int
    facts: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Activities:
    """All that one part shows."""

    part: Part
    spans: tuple[TimeSpan, ...]
    instants: tuple[Instant, ...]
    commits: tuple[Record, ...]


def activities(part: Part) -> Activities:
    """The spans of a part, by their begin; a longer one comes first where two begin together."""
    reader = _Reader(part)
    for record in part.records:
        reader.read(record)
    reader.end()
    spans = sorted(reader.spans, key=lambda span: (span.begin_ns, -span.end_ns, span.kind))
    commits = tuple(record for record in part.records if record.kind == "StepCommitted")
    return Activities(part, tuple(spans), tuple(reader.instants), commits)


@dataclass
class _Open:
    """A span that has begun."""

    kind: SpanKind
    name: str
    track: TimelineTrack
    step: int
    begin_ns: int
    number: int = 0
    trains: bool = True


@dataclass
class _Reader:
    """Reads the records of one part in the order of their times."""

    part: Part
    spans: list[TimeSpan] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    _open: list[_Open] = field(default_factory=list)
    _generation: int = 0
    _filled_ns: int = 0
    """When the last bucket was filled, or the backward pass began."""
    _script_ns: int = 0
    """When the last span of the script's track has ended."""
    _undone: bool = False
    """Whether a step was under way when a recovery began."""

    def __post_init__(self) -> None:
        self._generation = self.part.head.generation

    def read(self, record: Record) -> None:
        match record.kind:
            case "StepBegan":
                self._cut(record, TimelineTrack.SCRIPT)
                self._begin(record, SpanKind.STEP, f"step {record.step}")
            case "LaneBegan":
                lane, trains = record.values
                name = f"lane {lane}" if trains else f"lane {lane} (evaluation)"
                self._begin(record, SpanKind.LANE, name, lane, trains=bool(trains))
            case "LaneEnded":
                self._end(record, SpanKind.LANE)
            case "BackwardBegan":
                self._filled_ns = record.time_ns
                self._begin(record, SpanKind.BACKWARD, "backward")
            case "BackwardEnded":
                self._end(record, SpanKind.BACKWARD)
            case "UpdateBegan":
                self._begin(record, SpanKind.UPDATE, "update")
            case "UpdateEnded":
                self._end(record, SpanKind.UPDATE)
            case "StepCommitted":
                self._end(record, SpanKind.STEP)
            case _:
                self._read_others(record)

    def _read_others(self, record: Record) -> None:
        match record.kind:
            case "BucketFilled":
                self._fill(record)
            case "ReduceBegan":
                bucket = record.values[0]
                self._begin(record, SpanKind.REDUCE, f"reduce bucket {bucket}", bucket, TimelineTrack.REDUCTION)
            case "ReduceDone":
                self._end(record, SpanKind.REDUCE)
            case "WaitBegan":
                self._wait(record)
            case "WaitEnded":
                self._end(record, SpanKind.WAIT)
            case "BatchLoaded":
                self._load(record)
            case "CheckpointSaved":
                self._save(record)
            case _:
                self._change(record)

    def _change(self, record: Record) -> None:
        """Of workers that come and go, and of the end."""
        match record.kind:
            case "RecoveryBegan":
                self._undone = self._undone or any(one.kind is SpanKind.STEP for one in self._open)
                self._cut(record, TimelineTrack.SCRIPT, TimelineTrack.REDUCTION, TimelineTrack.MEMBERSHIP)
                self._begin(record, SpanKind.RECOVERY, "recovery", track=TimelineTrack.MEMBERSHIP)
            case "JoinBegan":
                self._cut(record, TimelineTrack.MEMBERSHIP)
                self._begin(record, SpanKind.JOIN, "joining", track=TimelineTrack.MEMBERSHIP)
            case "GenerationFormed":
                self._form(record)
            case "Copied":
                self.instants.append(Instant("begins as a copy", self.part.head.worker, record.step, record.time_ns))
            case "Closed":
                self._cut(record, *TimelineTrack)
                self.instants.append(Instant("run closed", self.part.head.worker, record.step, record.time_ns))

    def end(self) -> None:
        """Nothing follows: what is open ends with the last record."""
        if self.part.records:
            self._cut(self.part.records[-1], *TimelineTrack)

    def _begin(
        self,
        record: Record,
        kind: SpanKind,
        name: str,
        number: int = 0,
        track: TimelineTrack = TimelineTrack.SCRIPT,
        trains: bool = True,
    ) -> None:
        if kind is SpanKind.LANE:  # one that was left has no end
            self._close(record.time_ns, lambda one: one.kind in (SpanKind.LANE, SpanKind.BACKWARD), is_whole=False)
        self._open.append(_Open(kind, name, track, record.step, record.time_ns, number, trains))

    def _end(self, record: Record, kind: SpanKind) -> None:
        """Ends the span of this kind, and what stands inside of it."""
        found = [place for place, one in enumerate(self._open) if one.kind is kind]
        if found:
            outer = self._open[found[-1]]
            inner = {id(one) for one in self._open[found[-1] :] if one.track is outer.track}
            self._close(record.time_ns, lambda one: id(one) in inner)

    def _cut(self, record: Record, *tracks: TimelineTrack) -> None:
        """What is open on these tracks has no end."""
        self._close(record.time_ns, lambda one: one.track in tracks, is_whole=False)

    def _close(self, end_ns: int, chosen: Any, is_whole: bool = True) -> None:
        closed = [one for one in self._open if chosen(one)]
        self._open = [one for one in self._open if not chosen(one)]
        for one in closed:
            self._add(one, end_ns, is_whole)

    def _add(self, one: _Open, end_ns: int, is_whole: bool = True, facts: tuple[tuple[str, Any], ...] = ()) -> None:
        worker = self.part.head.worker
        self.spans.append(
            TimeSpan(
                one.kind, one.name, one.track, worker, one.step, self._generation, one.begin_ns, end_ns, one.number,
                one.trains, is_whole, facts,
            )
        )  # fmt: skip
        if one.track is TimelineTrack.SCRIPT:
            self._script_ns = max(self._script_ns, end_ns)

    def _fill(self, record: Record) -> None:
        bucket = record.values[0]
        begin_ns = self._filled_ns or record.time_ns
        self._filled_ns = record.time_ns
        filling = _Open(SpanKind.FILL, f"bucket {bucket} fills", TimelineTrack.BUCKETS, record.step, begin_ns, bucket)
        self._add(filling, record.time_ns)

    def _wait(self, record: Record) -> None:
        """At the end of a step there is a record for each bucket that is waited for; they stand inside of one wait."""
        wait, bucket, num_buckets = record.values
        self._close(record.time_ns, lambda one: one.kind is SpanKind.WAIT_PART)
        if not any(one.kind is SpanKind.WAIT for one in self._open):
            self._begin(record, SpanKind.WAIT, f"wait: {wait}")
        if wait == Wait.STEP:
            name = f"wait for bucket {bucket} of {num_buckets}" if num_buckets else "wait for all records"
            self._begin(record, SpanKind.WAIT_PART, name, bucket)

    def _load(self, record: Record) -> None:
        loader, waited_s = record.values
        begin_ns = max(record.time_ns - int(waited_s * 1e9), self._script_ns)
        name = f"data of loader {loader}"
        self._add(_Open(SpanKind.DATA, name, TimelineTrack.SCRIPT, record.step, begin_ns, loader), record.time_ns)

    def _save(self, record: Record) -> None:
        path, took_s = record.values
        begin_ns = record.time_ns - int(took_s * 1e9)
        saving = _Open(SpanKind.CHECKPOINT, "checkpoint", TimelineTrack.CHECKPOINT, record.step, begin_ns)
        self._add(saving, record.time_ns, facts=(("path", path),))

    def _form(self, record: Record) -> None:
        generation, slots, lost, left, joined, moved_lanes, moved_to, committed = record.values
        facts = {
            "workers": slots, "lost": lost, "left": left, "joined": joined, "moved lanes": moved_lanes,
            "moved to": moved_to, "step counts": committed,
        }  # fmt: skip
        known = tuple((name, value) for name, value in facts.items() if value not in ([], None))
        forming = [one for one in self._open if one.track is TimelineTrack.MEMBERSHIP]
        self._open = [one for one in self._open if one.track is not TimelineTrack.MEMBERSHIP]
        self._generation = generation
        for one in forming:
            self._add(one, record.time_ns, facts=known)
        if self._undone and not committed:
            self._begin(record, SpanKind.STEP, f"step {record.step} again")
        self._undone = False
        name = f"generation {generation}: {len(slots)} workers"
        self.instants.append(Instant(name, self.part.head.worker, record.step, record.time_ns, known))
