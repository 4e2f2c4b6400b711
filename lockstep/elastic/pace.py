"""Which worker is slow, and how many lanes each should carry: decided alike by all. Pure, but for what it remembers.

# Note [Lanes follow the pace]
# What each lane took travels in the step's record, so all workers know the same times and come to the same decision in
# the same step, without a word more. Times are added up over windows of steps. At the end of a window each worker's
# time for a lane is known; the lanes are dealt out so that the slowest is done as early as possible. They move when
# two windows in a row say, each by itself, that this makes a step's lanes shorter by GAIN. Every worker keeps a lane,
# so that one that has recovered is seen to have, and the same rule moves lanes back.
#
# It is damped: windows begin anew after each move, and a move that takes the one before it back doubles the number of
# windows that must agree on the next. When workers come or go, lanes are even again and all is forgotten: the new
# generation's members know no common past.
#
# Bits do not depend on who carries a lane, so none of this shows in them. On a GPU a lane's time on the host says
# nothing, and where lanes were given out by hand they stay: there nothing moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.lanes import Assignment

WINDOW_STEPS = 20
WINDOW_S = 2.0
"""A window has so many steps, and so many seconds of the slowest worker's lanes."""
WARM_STEPS = 5
"""Steps that are left out when windows begin."""
GAIN = 0.1
AGREEING = 2
"""How many windows in a row must agree."""
MOST_AGREEING = 64


@dataclass(frozen=True)
class LaneWindow:
    """What lanes took in some steps: the seconds of each rank, and how many lanes these were for."""

    seconds: tuple[float, ...]
    lanes: tuple[int, ...]

    @property
    def lane_s(self) -> tuple[float, ...] | None:
        """What each rank takes for a lane; None if one has computed none."""
        if not all(self.lanes) or not all(self.seconds):
            return None
        return tuple(seconds / lanes for seconds, lanes in zip(self.seconds, self.lanes, strict=True))

    def __add__(self, other: "LaneWindow") -> "LaneWindow":
        seconds = tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True))
        return LaneWindow(seconds, tuple(a + b for a, b in zip(self.lanes, other.lanes, strict=True)))


@dataclass(frozen=True)
class LaneMove:
    """Lanes are to move: `lane_s` is what each rank takes for one, by which `counts` were found."""

    counts: tuple[int, ...]
    before: tuple[int, ...]
    lane_s: tuple[float, ...]

    @property
    def assignment(self) -> Assignment:
        """Lanes in a row, rank by rank."""
        ends = [sum(self.counts[: rank + 1]) for rank in range(len(self.counts))]
        return Assignment(tuple(tuple(range(end - count, end)) for end, count in zip(ends, self.counts, strict=True)))

    def sentence(self, slots: Sequence[int], step: int) -> str:
        """`worker 2 takes 2.1 times as long for a lane as worker 0: from step 41 on lanes are 5, 5 and 2 (were ...)`"""
        slow = max(range(len(slots)), key=lambda rank: self.lane_s[rank])
        fast = min(range(len(slots)), key=lambda rank: self.lane_s[rank])
        times = self.lane_s[slow] / self.lane_s[fast]
        carried = ", ".join(f"worker {slot}: {count}" for slot, count in zip(slots, self.counts, strict=True))
        if max(self.counts) - min(self.counts) <= 1:
            why = "workers are about as fast as each other again"
        else:
            why = f"worker {slots[slow]} takes {times:.1f} times as long for a lane as worker {slots[fast]}"
        return f"{why}: from step {step} on lanes are carried so: {carried} (rebalance=False leaves them)"


def wanted_counts(lane_s: Sequence[float], num_lanes: int) -> tuple[int, ...]:
    """How many lanes each rank should carry, at least one, so that the last one is done as early as possible.

    Lanes go one by one to who would be done with it first, which is best for lanes of equal work.
    """
    counts = [1] * len(lane_s)
    for _ in range(num_lanes - len(lane_s)):
        first = min(range(len(lane_s)), key=lambda rank: ((counts[rank] + 1) * lane_s[rank], rank))
        counts[first] += 1
    return tuple(counts)


def gain(counts: Sequence[int], before: Sequence[int], lane_s: Sequence[float]) -> float:
    """By which part a step's lanes are shorter under `counts` than they were."""
    took = max(count * seconds for count, seconds in zip(before, lane_s, strict=True))
    takes = max(count * seconds for count, seconds in zip(counts, lane_s, strict=True))
    return 1 - takes / took


def decide(windows: Sequence[LaneWindow], before: tuple[int, ...]) -> LaneMove | None:
    """Whether lanes move after these windows, in which each rank has carried `before`.

    By the times of all windows together, if it is better in each of them. See Note [Lanes follow the pace].
    """
    whole = windows[0]
    for window in windows[1:]:
        whole += window
    if len(before) > sum(before) or whole.lane_s is None:
        return None
    counts = wanted_counts(whole.lane_s, sum(before))
    each = [window.lane_s for window in windows]
    if any(lane_s is None or gain(counts, before, lane_s) < GAIN for lane_s in each):
        return None
    return LaneMove(counts, before, whole.lane_s)


def longest_s(times_s: Sequence[float | None], assignment: Assignment) -> float:
    """How long the worker took that was longest in its lanes."""
    return max(sum(times_s[lane] or 0.0 for lane in lanes) for lanes in assignment.lanes_of)


@dataclass
class LanePace:
    """What one worker remembers of all workers' times since the windows began anew; the same on all of them."""

    _windows: list[LaneWindow] = field(default_factory=list)
    _now: LaneWindow | None = None
    _num_steps: int = 0
    _slowest_s: float = 0.0
    _agreeing: int = AGREEING
    _last: LaneMove | None = None

    def forget(self) -> None:
        """Workers have come or gone, or lanes were dealt out anew."""
        self._begin_windows()
        self._agreeing, self._last = AGREEING, None

    def take(self, times_s: Sequence[float | None], assignment: Assignment) -> None:
        """A step is committed: what each lane took, None for one that had no samples."""
        self._num_steps += 1
        if self._num_steps <= WARM_STEPS:
            return
        known = [[times_s[lane] for lane in lanes] for lanes in assignment.lanes_of]
        taken = [[time_s for time_s in lanes if time_s is not None] for lanes in known]
        step = LaneWindow(tuple(map(sum, taken)), tuple(map(len, taken)))
        self._now = step if self._now is None else self._now + step
        self._slowest_s += max(step.seconds)

    def move(self, assignment: Assignment) -> LaneMove | None:
        """The move that is due before the next step, if one is; the windows then begin anew."""
        if self._now is None or self._num_steps - WARM_STEPS < WINDOW_STEPS or self._slowest_s < WINDOW_S:
            return None
        self._windows = [*self._windows, self._now][-self._agreeing :]
        self._now, self._num_steps, self._slowest_s = None, WARM_STEPS, 0.0
        if len(self._windows) < self._agreeing:
            return None
        found = decide(self._windows, tuple(map(len, assignment.lanes_of)))
        if found is not None:
            takes_back = self._last is not None and found.counts == self._last.before
            self._agreeing = min(2 * self._agreeing, MOST_AGREEING) if takes_back else self._agreeing
            self._last = found
            self._begin_windows()
        return found

    def _begin_windows(self) -> None:
        self._windows, self._now, self._num_steps, self._slowest_s = [], None, 0, 0.0
