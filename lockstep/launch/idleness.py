"""For how long workers have shown no sign of work. Pure: what was seen goes in, seconds come out.

# Note [Signs of work]
# A worker works while it, or a process that it has started, uses the processor, reads or writes, starts or ends a
# process, writes something new on its page, or is woken again and again: a thread that waits for a network is woken for
# every piece. Every process is woken now and then by a timer of a library, so a rate of about one a second does not
# count. Neither does what a process with such a timer uses of the processor, nor what it does when it is asked where it
# is: it wakes up and writes its answer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lockstep.launch.process_stats import Activity

WINDOW_S = 5.0
# What a process that does nothing may do in a window.
IDLE_CPU_S = 0.02
IDLE_WAKES_PER_S, IDLE_WAKES = 1.0, 2


@dataclass(frozen=True)
class Observation:
    """A worker as it was seen: what its processes had done, and when it last wrote something on its page."""

    activity: Activity
    updated_ns: int


@dataclass(frozen=True)
class _Watched:
    idle_from_s: float
    window_s: float
    """When the present window began."""
    then: Observation
    """What was seen at that time."""


@dataclass
class IdlenessTracker:
    """Remembers what was seen of suspects, by id, from one look to the next."""

    longest_s: float = 0.0
    """The longest idleness after which a worker went on by itself."""
    _watched: dict[str, _Watched] = field(default_factory=dict)
    _excused: set[str] = field(default_factory=set)

    def look(self, now_s: float, seen: Mapping[str, Observation]) -> dict[str, float]:
        """For how long each worker has been idle. A worker that is not looked at is forgotten."""
        before, self._watched = self._watched, {}
        for worker, now in seen.items():
            self._watched[worker] = self._followed(now_s, now, before.get(worker), worker in self._excused)
        self._excused.clear()
        return {worker: now_s - watched.idle_from_s for worker, watched in self._watched.items()}

    def forget(self) -> None:
        self._watched = {}

    def excuse(self, workers: Iterable[str]) -> None:
        """What these workers do until the next look is no sign of work: they answer a question."""
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


def shows_work(then: Observation, now: Observation, seconds: float) -> bool:
    """Whether what was seen at two times shows work between. See Note [Signs of work]."""
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
