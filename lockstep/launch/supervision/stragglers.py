"""Which worker slows the others down, and with what. Pure: rows of the status page in, findings out.

# Note [Slow]
# Workers step together, so a slow one makes the others wait. Workers are compared over a window of steps. The time in
# which a worker does not wait is its own: data, compute, other. A worker is slow in a window when its own time, by the
# step and by the lane that it carries, is SLOW_TIMES that of the others, and the others wait longer than it does by
# WAITING_SHARE of the time. By the lane, because a worker with more lanes is not slow; by the step, because what every
# worker has to do weighs more where there are few lanes. Longer than it does, because waiting has other causes: on a
# GPU the lanes are only begun in a worker's own time, and computed while it waits.
#
# It is named when two windows in a row agree, so that one pause (an evaluation, a checkpoint) names no worker. Windows
# begin when all have learned their usual step, which leaves out warming up, and again when workers or lanes change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from lockstep.errors import BadArgument
from lockstep.launch.channels.status import StatusRow

SLOW_TIMES = 1.5
WAITING_SHARE = 0.2
# The least own time that a comparison assumes.
_LEAST_S = 1e-6


class SlowCause(StrEnum):
    """What a worker spends its own time on."""

    DATA = "data"
    """It waits for its loader."""
    COMPUTE = "compute"
    """It is in its lanes."""
    OTHER = "other"
    """The user's code between steps, the optimizer included."""


@dataclass(frozen=True)
class TimeSpent:
    """What one worker spent a window's time on."""

    num_steps: int
    num_lanes: int
    own_s: Mapping[SlowCause, float]
    waiting_s: float

    @property
    def step_s(self) -> float:
        """Its own time by the step."""
        return max(sum(self.own_s.values()) / self.num_steps, _LEAST_S)

    @property
    def lane_s(self) -> float:
        """Its own time by the step and the lane."""
        return self.step_s / max(self.num_lanes, 1)

    @property
    def waiting_share(self) -> float:
        """The part of its time in which it waited."""
        return self.waiting_s / (self.waiting_s + self.step_s * self.num_steps)

    def needs_s(self, cause: SlowCause, num_lanes: int) -> float:
        """What it would spend by the step with so many lanes: time between steps does not depend on them."""
        times = 1.0 if cause is SlowCause.OTHER else num_lanes / max(self.num_lanes, 1)
        return self.own_s[cause] / self.num_steps * times


@dataclass(frozen=True)
class Slow:
    """The worker's own time is `times` that of the others, most of all in `cause`."""

    slot: int
    times: float
    num_steps: int
    cause: SlowCause
    cause_s: float
    """What it spends on the cause by the step."""
    others_s: float
    """What the others would spend for as many lanes."""
    waiting_share: float
    """The part of their time in which the others wait."""
    num_others: int


@dataclass(frozen=True)
class CaughtUp:
    """A worker that was named as slow is so no longer."""

    slot: int


PaceFinding = Slow | CaughtUp


def time_spent(before: StatusRow, after: StatusRow) -> TimeSpent:
    """What a worker's time went into between two looks at its row. See Note [Where the time goes] in status.py."""
    data_ns = after.data_ns - before.data_ns
    compute_ns = after.compute_ns - before.compute_ns
    waiting_ns = after.waiting_ns - before.waiting_ns
    other_ns = max(0, after.committed_ns - before.committed_ns - data_ns - compute_ns - waiting_ns)
    own_s = {SlowCause.DATA: data_ns / 1e9, SlowCause.COMPUTE: compute_ns / 1e9, SlowCause.OTHER: other_ns / 1e9}
    return TimeSpent(after.step - before.step, after.num_lanes, own_s, waiting_ns / 1e9)


def combined(first: TimeSpent, second: TimeSpent) -> TimeSpent:
    """What a worker spent in two windows, one after the other."""
    own_s = {cause: first.own_s[cause] + second.own_s[cause] for cause in SlowCause}
    return TimeSpent(first.num_steps + second.num_steps, second.num_lanes, own_s, first.waiting_s + second.waiting_s)


def slow_workers(window: Mapping[int, TimeSpent]) -> dict[int, Slow]:
    """The workers that slow the others down in this window, by slot. See Note [Slow]."""
    found = {slot: _compared(slot, window) for slot in window}
    return {slot: slow for slot, slow in found.items() if slow is not None}


def _compared(slot: int, window: Mapping[int, TimeSpent]) -> Slow | None:
    mine = window[slot]
    # A worker without lanes has nothing to do, and is no measure for the others.
    others = [took for other, took in window.items() if other != slot and took.num_lanes]
    if not others:
        return None
    times = min(mine.step_s / _middle(others, lambda o: o.step_s), mine.lane_s / _middle(others, lambda o: o.lane_s))
    waiting = _middle(others, lambda o: o.waiting_share)
    if times < SLOW_TIMES or waiting - mine.waiting_share < WAITING_SHARE:
        return None
    cause = max(SlowCause, key=lambda cause: mine.needs_s(cause, mine.num_lanes) - _others_s(cause, mine, others))
    cause_s = mine.needs_s(cause, mine.num_lanes)
    return Slow(slot, times, mine.num_steps, cause, cause_s, _others_s(cause, mine, others), waiting, len(others))


def _others_s(cause: SlowCause, mine: TimeSpent, others: list[TimeSpent]) -> float:
    return _middle(others, lambda other: other.needs_s(cause, mine.num_lanes))


def _middle(others: list[TimeSpent], number: Callable[[TimeSpent], float]) -> float:
    return median(number(other) for other in others)


@dataclass(frozen=True)
class _LastReport:
    """When a worker was last reported as slow, and with which cause; None once it has caught up."""

    now_s: float
    cause: SlowCause | None


@dataclass
class StragglerDetector:
    """Compares the workers window by window, and returns only new findings."""

    window_steps: int = 20
    window_s: float = 5.0
    again_s: float = 300.0
    """The least time between two reports of the same slow worker."""
    _began: Mapping[int, StatusRow] = field(default_factory=dict)
    """The rows at the beginning of the window; none while there is nothing to compare."""
    _before: Mapping[int, TimeSpent] = field(default_factory=dict)
    """The window before; none if workers or lanes have changed since."""
    _last_reports: dict[tuple[int, int], _LastReport] = field(default_factory=dict)
    """By slot and process: a replacement starts without one."""

    def __post_init__(self) -> None:
        if not (self.window_steps >= 1 and self.window_s > 0 and self.again_s >= 0):
            raise BadArgument(
                "a window needs at least one step and more than 0 seconds, and the time between two tales is 0 seconds "
                f"or more, not {self.window_steps!r}, {self.window_s!r} and {self.again_s!r}"
            )

    def look(self, now_s: float, rows: Mapping[int, StatusRow]) -> list[PaceFinding]:
        """The new findings: which worker is slow, or no longer so. None before the second window in a row ends.

        `rows` are those of all running workers; `now_s` is on any monotonic clock.
        """
        members = {slot: row for slot, row in rows.items() if row.is_member}
        if not self._is_comparable(members):
            self._restart_windows(members)
            return []
        if not self._is_over(members):
            return []
        window = {slot: time_spent(self._began[slot], row) for slot, row in members.items()}
        before, self._before, self._began = self._before, window, members
        return self._news(now_s, before, window) if before else []

    def _is_comparable(self, members: Mapping[int, StatusRow]) -> bool:
        """Whether the rows can be compared with those at the beginning of the window."""
        if not self._began or _places(members) != _places(self._began):
            return False
        # A pass that only updates statistics commits too, without being a step: a row may then go back by one.
        return all(row.step >= old.step - 1 for row, old in self._pairs(members))

    def _restart_windows(self, members: Mapping[int, StatusRow]) -> None:
        self._began = members if all(row.usual_step_ns for row in members.values()) else {}
        self._before = {}
        workers = {(slot, row.pid) for slot, row in members.items()}
        self._last_reports = {worker: last for worker, last in self._last_reports.items() if worker in workers}

    def _is_over(self, members: Mapping[int, StatusRow]) -> bool:
        """Whether every member has reached the steps and the time of a window."""
        spans = [(row.step - old.step, row.committed_ns - old.committed_ns) for row, old in self._pairs(members)]
        return all(steps >= self.window_steps and span_ns >= self.window_s * 1e9 for steps, span_ns in spans)

    def _pairs(self, members: Mapping[int, StatusRow]) -> list[tuple[StatusRow, StatusRow]]:
        return [(row, self._began[slot]) for slot, row in members.items()]

    def _news(
        self, now_s: float, before: Mapping[int, TimeSpent], window: Mapping[int, TimeSpent]
    ) -> list[PaceFinding]:
        slow_before, slow_now = slow_workers(before), slow_workers(window)
        slow_in_both = slow_workers({slot: combined(before[slot], window[slot]) for slot in window})
        found: list[PaceFinding] = []
        for slot in window:
            verdicts = [verdicts.get(slot) for verdicts in (slow_before, slow_now, slow_in_both)]
            found += self._news_of(now_s, slot, verdicts)
        return found

    def _news_of(self, now_s: float, slot: int, verdicts: list[Slow | None]) -> list[PaceFinding]:
        """The finding about one worker, if it is new, from the window before, this one, and both together."""
        worker = (slot, self._began[slot].pid)
        last = self._last_reports.get(worker)
        before, now, slow = verdicts
        if slow is not None and before is not None and now is not None and before.cause == now.cause == slow.cause:
            if last is not None and (last.cause == slow.cause or now_s - last.now_s < self.again_s):
                return []
            self._last_reports[worker] = _LastReport(now_s, slow.cause)
            return [slow]
        if before is None and now is None and last is not None and last.cause is not None:
            self._last_reports[worker] = _LastReport(last.now_s, None)
            return [CaughtUp(slot)]
        return []


def _places(members: Mapping[int, StatusRow]) -> dict[int, tuple[int, int, int]]:
    return {slot: (row.pid, row.generation, row.num_lanes) for slot, row in members.items()}
