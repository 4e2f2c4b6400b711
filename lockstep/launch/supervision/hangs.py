"""Which workers keep the others waiting, and whether they work. Pure: observations in, findings out.

# Note [Late, busy, hung]
# Workers wait for each other in steps (a reduction, a recovery) and in calls that all of them make. A step is late when
# a worker has waited in it much longer than a whole step usually takes, a call when it has waited for PLACE_S. The
# workers that it waits for are missing, and are named. They may be evaluating, compiling or uploading, so they are left
# alone as long as there is any sign of work (Note [Signs of work]). One that has shown none for `hang_s` is hung,
# unless it waits for a disk, is held by a debugger, or has asked for patience.
#
# If no worker waits and none shows a sign of work, all of them hang. If all wait, each for the others, something is
# broken that no signal can show: they are hung when that has lasted for `hang_s`.
#
# A stopped process (state T) can do nothing at all. A whole job that was suspended is none of these: when every worker
# is stopped, or when the supervisor itself did not run, all clocks start again.

# Note [Signs of work]
# A worker works while it, or a process that it has started, uses the processor, reads or writes, starts or ends a
# process, writes something new on its page, or is woken again and again: a thread that waits for a network is woken for
# every piece. Every process is woken now and then by a timer of a library, so a rate of about one a second does not
# count. Neither does the processor time of such a timer, nor the answer to a stack query.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from lockstep.events import Wait
from lockstep.launch.channels.status import Collective, Phase, StatusRow
from lockstep.launch.host.processes import Activity
from lockstep.launch.job import HANG_S

STOPPED_S = 0.5
LEAST_S, USUAL_STEPS, SLACK_S = 5.0, 5, 1.2
NOT_LEARNED_S = 60.0
PLACE_S = 10.0
IDLE_S = 10.0
GAP_S = 2.0
OBSERVED_S = 1.0
"""A suspicion must last so long before processes are observed, and they are observed so often."""
LEARNED_TIMES = 2.0
"""A worker may be idle for so many times the longest idleness after which one went on."""

WINDOW_S = 5.0
# What a process that does nothing may do in a window.
IDLE_CPU_S = 0.02
IDLE_WAKES_PER_S, IDLE_WAKES = 1.0, 2

STEP = "step"
CALLS: Mapping[int, str] = {call: Wait[call.name].value for call in Collective if call is not Collective.STATISTICS}
"""The calls in which workers wait for each other; synchronised batch norm is a part of a step."""
_STOPPED = "T"
# Waits for a disk, or is held by a debugger.
_BUSY_WITHOUT_CPU = ("D", "t")


@dataclass(frozen=True)
class WorkerView:
    """One worker as it is now; `state` is the kernel's letter for its process.

    `joins`: it was started after the founders. No worker waits for it before it is a member.
    """

    id: str
    row: StatusRow
    state: str
    joins: bool = False

    @property
    def takes_part(self) -> bool:
        return self.row.is_member or not self.joins


@dataclass(frozen=True)
class StoppedWorker:
    """A process that was stopped (SIGSTOP), while others run."""

    slot: int
    seconds: float


@dataclass(frozen=True)
class Late:
    """A step or a call (`what`) in which `waiting` have waited too long for `missing`.

    If nobody is missing, all wait for each other. If nobody waits, none of the missing shows a sign of work.
    """

    generation: int
    step: int
    what: str
    seconds: float
    usual_s: float | None
    waiting: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def named(self) -> tuple[int, ...]:
        return self.waiting + self.missing

    @property
    def suspects(self) -> tuple[int, ...]:
        return self.missing or self.waiting


@dataclass(frozen=True)
class Hung:
    """Workers that will not go on: a missing one, or all."""

    slots: tuple[int, ...]
    seconds: float
    is_all: bool = False


HangFinding = StoppedWorker | Late | Hung


@dataclass(frozen=True)
class Observation:
    """What a worker's processes had done, and when it last wrote its status row."""

    activity: Activity
    updated_ns: int


@dataclass(frozen=True)
class _Watched:
    idle_from_s: float
    window_s: float
    """When the present window began."""
    then: Observation
    """The observation at that time."""


@dataclass
class IdlenessTracker:
    """Keeps the observations of suspects, by id, from one look to the next."""

    longest_s: float = 0.0
    """The longest idleness after which a worker went on by itself."""
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _excused: set[str] = field(default_factory=set)

    def look(self, now_s: float, seen: Mapping[str, Observation]) -> dict[str, float]:
        """For how long each worker has been idle. A worker that is not in `seen` is forgotten."""
        before, self._watched = self._watched, {}
        for worker, now in seen.items():
            self._watched[worker] = self._followed(now_s, now, before.get(worker), worker in self._excused)
        self._excused.clear()
        return {worker: now_s - watched.idle_from_s for worker, watched in self._watched.items()}

    def forget(self) -> None:
        self._watched = {}

    def excuse(self, workers: Iterable[str]) -> None:
        """What these workers do until the next look is no sign of work: they answer a stack query."""
        self._excused.update(workers)

    def _followed(self, now_s: float, now: Observation, before: _Watched | None, is_excused: bool) -> _Watched:
        if before is None:
            return _Watched(now_s, now_s, now)
        if is_excused:
            return _Watched(before.idle_from_s, now_s, now)
        if shows_work(before.then, now, now_s - before.window_s):
            self.longest_s = max(self.longest_s, now_s - before.idle_from_s)
            return _Watched(now_s, now_s, now)
        if now_s - before.window_s >= WINDOW_S:
            return _Watched(before.idle_from_s, now_s, now)
        return before


@dataclass(frozen=True)
class WaitsNow:
    """Who waits now, for how long, and for whom. `rows` are those of all workers that take part."""

    rows: Mapping[int, StatusRow]
    waited_s: Mapping[int, float]
    missing: Mapping[int, WorkerView]
    """Without those that have asked for patience."""
    is_excused: bool
    """Nobody else is missing where others wait; or nobody waits, and one has asked for patience."""

    @property
    def usual_s(self) -> float | None:
        learned = [row.usual_step_ns / 1e9 for row in self.rows.values() if row.usual_step_ns]
        return median(learned) if learned else None

    @property
    def step_limit_s(self) -> float:
        usual_s = self.usual_s
        return NOT_LEARNED_S if usual_s is None else max(LEAST_S, USUAL_STEPS * usual_s) + SLACK_S

    def late(self, slot: int, seconds: float) -> Late:
        """As the worker in `slot` sees it."""
        row, waiting, missing = self.rows[slot], tuple(sorted(self.waited_s)), tuple(sorted(self.missing))
        return Late(row.generation, row.step, call_of(row), seconds, self.usual_s, waiting, missing)


@dataclass
class HangDetector:
    """Keeps what it needs from one look to the next. Times are on the monotonic clock of the host."""

    hang_s: float = HANG_S
    _last_s: float | None = None
    _counts_from_s: float = 0.0
    _stopped_from_s: dict[str, float] = field(default_factory=dict)
    _idleness: IdlenessTracker = field(default_factory=IdlenessTracker)
    _idle_s: dict[str, float] = field(default_factory=dict)
    """For how long the suspects have been idle, by id, as they were last observed."""
    _observed_s: float = float("-inf")
    _found: set[tuple[object, ...]] = field(default_factory=set)

    def look(
        self, now_s: float, views: Mapping[int, WorkerView], activity: Callable[[int], Activity | None]
    ) -> list[HangFinding]:
        """What is wrong now. What is late is returned once; a stopped or hung worker until it is gone.

        `activity(slot)` is what a worker and its children have done until now. It is called only for suspects.
        """
        gap = self._last_s is not None and now_s - self._last_s > GAP_S
        self._last_s = now_s
        if gap or all(view.state == _STOPPED for view in views.values()):
            self._reset_clocks(now_s)
            return []
        waits = self._waits(now_s, views)
        self._observe(now_s, self._suspects(now_s, waits), activity)
        return [*self._find_stopped(now_s, views), *self._find_late(waits)]

    @property
    def limit_s(self) -> float:
        """For how long a worker may be idle: `hang_s`, or longer where idle workers have gone on by themselves."""
        return max(self.hang_s, LEARNED_TIMES * self._idleness.longest_s)

    def forget(self) -> None:
        """All workers were started again: findings about the earlier ones may be returned again."""
        self._found.clear()

    def _reset_clocks(self, now_s: float) -> None:
        self._counts_from_s = now_s
        self._stopped_from_s.clear()
        self._idleness.forget()

    def _waits(self, now_s: float, views: Mapping[int, WorkerView]) -> WaitsNow:
        crowd = {slot: view for slot, view in views.items() if view.takes_part}
        rows = {slot: view.row for slot, view in crowd.items()}
        since_s = {slot: max(row.since_ns / 1e9, self._counts_from_s) for slot, row in rows.items() if row.is_waiting}
        missing = {slot: view for slot, view in crowd.items() if slot not in since_s}
        impatient = {slot: view for slot, view in missing.items() if view.row.patient_until_ns / 1e9 <= now_s}
        is_excused = len(impatient) < len(missing) and not (since_s and impatient)
        return WaitsNow(rows, {slot: now_s - began_s for slot, began_s in since_s.items()}, impatient, is_excused)

    # -- stopped -------------------------------------------------------------------------------------------------

    def _find_stopped(self, now_s: float, views: Mapping[int, WorkerView]) -> list[HangFinding]:
        stopped = {view.id: slot for slot, view in views.items() if view.state == _STOPPED}
        self._stopped_from_s = {worker: self._stopped_from_s.get(worker, now_s) for worker in stopped}
        seconds = {slot: now_s - self._stopped_from_s[worker] for worker, slot in stopped.items()}
        return [StoppedWorker(slot, stopped_s) for slot, stopped_s in seconds.items() if stopped_s >= STOPPED_S]

    # -- idle ----------------------------------------------------------------------------------------------------

    def _suspects(self, now_s: float, waits: WaitsNow) -> Mapping[int, WorkerView]:
        """Those who are missing, when they have been for a moment."""
        if waits.is_excused or not waits.missing:
            return {}
        lasts_s = max(waits.waited_s.values()) if waits.waited_s else self._silent_s(now_s, waits.missing)
        return waits.missing if lasts_s > OBSERVED_S else {}

    def _silent_s(self, now_s: float, views: Mapping[int, WorkerView]) -> float:
        """For how long no worker has written its status row, while all are members and none has ended."""
        rows = [view.row for view in views.values()]
        if not all(row.is_in_run for row in rows):
            return 0.0
        return now_s - max(self._counts_from_s, *(row.updated_ns / 1e9 for row in rows))

    def _observe(
        self, now_s: float, suspects: Mapping[int, WorkerView], activity: Callable[[int], Activity | None]
    ) -> None:
        if not suspects:
            self._idleness.forget()
            self._idle_s = {}
        elif now_s - self._observed_s >= OBSERVED_S:
            self._observed_s = now_s
            idlers = {slot: view for slot, view in suspects.items() if view.state not in _BUSY_WITHOUT_CPU}
            seen = {
                view.id: Observation(done, view.row.updated_ns)
                for slot, view in idlers.items()
                if (done := activity(slot)) is not None
            }
            self._idle_s = self._idleness.look(now_s, seen)

    # -- late: see Note [Late, busy, hung] -----------------------------------------------------------------------

    def _find_late(self, waits: WaitsNow) -> list[HangFinding]:
        if waits.is_excused or not waits.rows:
            return []
        if not waits.missing:
            return self._find_deadlock(waits)
        return self._find_missing(waits) if waits.waited_s else self._find_idle(waits)

    def _find_missing(self, waits: WaitsNow) -> list[HangFinding]:
        """Of the wait that has lasted longest beyond its limit."""
        limits_s = {s: waits.step_limit_s if call_of(waits.rows[s]) == STEP else PLACE_S for s in waits.waited_s}
        slot = max(limits_s, key=lambda slot: waits.waited_s[slot] - limits_s[slot])
        if waits.waited_s[slot] <= limits_s[slot]:
            return []
        idle_s = {slot: self._idle_s.get(view.id, 0.0) for slot, view in waits.missing.items()}
        hung = [Hung((slot,), seconds) for slot, seconds in idle_s.items() if seconds >= self.limit_s]
        return [*self._once(waits, waits.late(slot, waits.waited_s[slot])), *hung]

    def _find_idle(self, waits: WaitsNow) -> list[HangFinding]:
        idle_s = min(self._idle_s.get(view.id, 0.0) for view in waits.missing.values())
        if idle_s < IDLE_S:
            return []
        late = waits.late(min(waits.missing), idle_s)
        hung = [Hung(late.missing, idle_s, is_all=True)] if idle_s >= self.limit_s else []
        return [*self._once(waits, late), *hung]

    def _find_deadlock(self, waits: WaitsNow) -> list[HangFinding]:
        """All wait. That is normal in a recovery, and for a moment before they go on."""
        if any(row.phase == Phase.RECOVERING or row.is_ending for row in waits.rows.values()):
            return []
        slot = min(waits.waited_s, key=lambda slot: waits.waited_s[slot])
        shortest_s, limit_s = waits.waited_s[slot], max(NOT_LEARNED_S, waits.step_limit_s)
        if shortest_s <= limit_s:
            return []
        late = waits.late(slot, shortest_s)
        hung = [Hung(late.waiting, shortest_s, is_all=True)] if shortest_s >= max(self.limit_s, limit_s) else []
        return [*self._once(waits, late), *hung]

    def _once(self, waits: WaitsNow, late: Late) -> list[HangFinding]:
        """The finding, if it is new; then the stacks of those who are missing will be asked for."""
        key = (late.what, late.generation, late.step, bool(late.waiting))
        if key in self._found:
            return []
        self._found.add(key)
        self._idleness.excuse(view.id for view in waits.missing.values())
        return [late]


def call_of(row: StatusRow) -> str:
    """The call in which the worker waits, or STEP."""
    return CALLS.get(row.detail_a, STEP) if row.phase == Phase.AWAITING else STEP


def shows_work(then: Observation, now: Observation, seconds: float) -> bool:
    """Whether two observations show work between them. See Note [Signs of work]."""
    before, after = then.activity, now.activity
    return (
        now.updated_ns != then.updated_ns
        or after.processes != before.processes
        or after.io_bytes != before.io_bytes
        or after.cpu_s - before.cpu_s > IDLE_CPU_S
        or _most_wakes(before, after) > IDLE_WAKES_PER_S * seconds + IDLE_WAKES
    )


def _most_wakes(before: Activity, after: Activity) -> int:
    return max((wakes - before.wakes.get(thread, 0) for thread, wakes in after.wakes.items()), default=0)
