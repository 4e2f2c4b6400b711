"""Who keeps the others waiting, and whether it does anything. Pure: what was seen goes in, findings come out.

# Note [Late, busy, hung]
# A step is late when a member has waited for the others much longer than a whole step usually takes. Those it waits
# for are missing. A missing worker that uses the processor may be evaluating, compiling or saving: it is told of,
# and left alone. One that has used none for a while is hung. So is one in uninterruptible sleep only for the eye:
# it reads or writes a disk. A stopped process (state T) can do nothing at all. A whole job that was suspended is
# none of these: when every worker is stopped, or when the supervisor itself did not run, all clocks start anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from lockstep.run.launching.status import Phase, StatusRow

STOPPED_S = 0.5
IDLE_S = 5.0
# What a process with a timer, or one that we have asked where it is, may use in that time and still do nothing.
IDLE_CPU_S = 0.02
LEAST_S, USUAL_STEPS, SLACK_S = 5.0, 5, 1.2
NOT_LEARNED_S = 60.0
GAP_S = 2.0

_AT_THE_EXCHANGE = (Phase.REDUCING, Phase.RECOVERING)
_STOPPED = "T"
# Waits for a disk, or is held by a debugger.
_BUSY_WITHOUT_CPU = ("D", "t")


@dataclass(frozen=True)
class Look:
    """One worker as it was seen just now; `state` is the letter that the kernel gives its process."""

    pid: int
    row: StatusRow
    state: str


@dataclass(frozen=True)
class Stopped:
    """A process that somebody stopped, while the others go on."""

    slot: int
    seconds: float


@dataclass(frozen=True)
class Late:
    """A step for which `waiting` have waited much longer than usual, because of `missing`."""

    generation: int
    step: int
    seconds: float
    usual_s: float | None
    waiting: tuple[int, ...]
    bucket: tuple[int, int]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Hung:
    """A missing worker that does nothing."""

    slot: int


Finding = Stopped | Late | Hung


@dataclass
class Watch:
    """Remembers what was seen, from one look to the next. Times are on the monotonic clock of the host."""

    _last_s: float | None = None
    _counts_from_s: float = 0.0
    _stopped_from_s: dict[int, float] = field(default_factory=dict)
    _idle_from: dict[int, tuple[float, float]] = field(default_factory=dict)
    """When each suspect's processor time was last seen to move, and how much it was."""
    _told: tuple[int, int] | None = None

    def look(self, now_s: float, looks: Mapping[int, Look], cpu_s: Callable[[int], float]) -> list[Finding]:
        """What is wrong now. A step is found late once; a stopped or hung worker until it is gone.

        `cpu_s(slot)` is the processor time that a worker and its children have used: asked only about suspects.
        """
        gap = self._last_s is not None and now_s - self._last_s > GAP_S
        self._last_s = now_s
        if gap or all(look.state == _STOPPED for look in looks.values()):
            self._start_anew(now_s)
            return []
        return [*self._find_stopped(now_s, looks), *self._find_late(now_s, looks, cpu_s)]

    def _start_anew(self, now_s: float) -> None:
        self._counts_from_s = now_s
        self._stopped_from_s.clear()
        self._idle_from.clear()

    def _find_stopped(self, now_s: float, looks: Mapping[int, Look]) -> list[Finding]:
        stopped = {look.pid: slot for slot, look in looks.items() if look.state == _STOPPED}
        self._stopped_from_s = {pid: self._stopped_from_s.get(pid, now_s) for pid in stopped}
        seconds = {slot: now_s - self._stopped_from_s[pid] for pid, slot in stopped.items()}
        return [Stopped(slot, stopped_s) for slot, stopped_s in seconds.items() if stopped_s >= STOPPED_S]

    def _find_late(self, now_s: float, looks: Mapping[int, Look], cpu_s: Callable[[int], float]) -> list[Finding]:
        members = {slot: look for slot, look in looks.items() if look.row.is_member}
        late = self._waited_for(now_s, {slot: look.row for slot, look in members.items()})
        if late is None or late.seconds <= (limit_s := _limit_s(late.usual_s)) - IDLE_S:
            self._idle_from.clear()
            return []
        idle_s = self._idle_s(now_s, {members[slot].pid: cpu_s(slot) for slot in late.missing})
        if late.seconds <= limit_s:
            return []
        told, self._told = self._told, (late.generation, late.step)
        found: list[Finding] = [] if told == self._told else [late]
        return found + [Hung(slot) for slot in late.missing if _is_hung(members[slot], idle_s)]

    def _waited_for(self, now_s: float, rows: Mapping[int, StatusRow]) -> Late | None:
        """The longest wait of a member, late or not; None if nobody waits or nobody is missing."""
        waiting = {slot: row for slot, row in rows.items() if row.phase == Phase.REDUCING}
        missing = tuple(sorted(slot for slot, row in rows.items() if row.phase not in _AT_THE_EXCHANGE))
        if not waiting or not missing:
            return None
        longest = min(waiting.values(), key=lambda row: row.since_ns)
        seconds = now_s - max(longest.since_ns / 1e9, self._counts_from_s)
        learned = [row.usual_step_ns / 1e9 for row in rows.values() if row.usual_step_ns]
        usual_s = median(learned) if learned else None
        bucket = (longest.detail_a, longest.detail_b)
        return Late(longest.generation, longest.step, seconds, usual_s, tuple(sorted(waiting)), bucket, missing)

    def _idle_s(self, now_s: float, cpu_s: Mapping[int, float]) -> dict[int, float]:
        """For how long each process has used no processor time worth naming."""
        before, self._idle_from = self._idle_from, {}
        for pid, used_s in cpu_s.items():
            from_s, used_then_s = before.get(pid, (now_s, used_s))
            moved = abs(used_s - used_then_s) > IDLE_CPU_S
            self._idle_from[pid] = (now_s, used_s) if moved else (from_s, used_then_s)
        return {pid: now_s - from_s for pid, (from_s, _) in self._idle_from.items()}


def _limit_s(usual_s: float | None) -> float:
    return NOT_LEARNED_S if usual_s is None else max(LEAST_S, USUAL_STEPS * usual_s) + SLACK_S


def _is_hung(look: Look, idle_s: Mapping[int, float]) -> bool:
    return look.state not in _BUSY_WITHOUT_CPU and idle_s[look.pid] >= IDLE_S
