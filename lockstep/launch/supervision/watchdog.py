"""Watches the workers of a pool: names those that are stopped, late, hung or slow, and kills those that will not go on.

hangs.py decides which worker is stopped, late or hung, stragglers.py which is slow. The watchdog reads the pool,
reports findings and kills workers; the supervisor then sees an exit like any other. No worker is killed for being slow.
"""

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from lockstep.events import Event
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.events import CatchUpFound, HangFound, LateFound, SlowFound, StoppedFound
from lockstep.launch.pool import StackQuery, WorkerPool
from lockstep.launch.supervision.hangs import HangDetector, Hung, Late, StoppedWorker, WorkerView
from lockstep.launch.supervision.stragglers import CaughtUp, StragglerDetector

ANSWER_S = 1.0
_ENDED = ("Z", "X")


@dataclass(frozen=True)
class PendingReport:
    """A late step or call that is not reported yet: the suspects have until `until_s` to answer with their stacks."""

    finding: Late
    queries: Mapping[int, StackQuery]
    until_s: float


@dataclass
class Watchdog:
    pool: WorkerPool
    report: Callable[[Event], None]
    stragglers: StragglerDetector = field(default_factory=StragglerDetector)
    hangs: HangDetector = field(default_factory=HangDetector)
    condemned: dict[str, str] = field(default_factory=dict)
    """What was wrong with the workers that were killed here, by id."""
    _pending: PendingReport | None = None

    def look(self, now_s: float, joiners: Collection[int] = ()) -> list[int]:
        """Reports what is wrong; returns the slots of the workers that it has killed.

        `joiners` were started after the founders.
        """
        views = self._views(joiners)
        killed: list[int] = []
        for finding in self.hangs.look(now_s, views, self.pool.activity):
            match finding:
                case Late():
                    self._ask(finding, now_s)
                case StoppedWorker(slot):
                    self.report(_stopped(finding, views[slot]))
                    killed += self._kill([slot], "it was stopped")
                case Hung(slots) if self._pending is None:  # else what is late is reported first
                    first, step = slots[0], views[slots[0]].row.step
                    self.report(HangFound(slots, finding.is_all, finding.seconds, worker=first, step=step))
                    killed += self._kill(slots, "it did nothing")
        self._report_late(views, now_s)
        for news in self.stragglers.look(now_s, {slot: view.row for slot, view in views.items()}):
            stamp = {"worker": news.slot, "step": views[news.slot].row.step}
            self.report(CatchUpFound(**stamp) if isinstance(news, CaughtUp) else SlowFound(news, **stamp))
        return killed

    def _views(self, joiners: Collection[int]) -> dict[int, WorkerView]:
        views = {
            slot: WorkerView(id, self.pool.row(slot), self.pool.state(slot), slot in joiners)
            for slot, id in self.pool.running.items()
            if id not in self.condemned
        }
        return {slot: view for slot, view in views.items() if view.state not in _ENDED}

    def _kill(self, slots: Collection[int], why: str) -> Collection[int]:
        for slot in slots:
            self.condemned[self.pool.running[slot]] = why
            self.pool.send(slot, signal.SIGKILL)
        return slots

    def _ask(self, finding: Late, now_s: float) -> None:
        sent = {slot: self.pool.ask_stack(slot) for slot in finding.suspects}
        queries = {slot: query for slot, query in sent.items() if query is not None}
        self._pending = PendingReport(finding, queries, now_s + ANSWER_S)

    def _report_late(self, views: Mapping[int, WorkerView], now_s: float) -> None:
        """Reports what is late when all have answered, or at `until_s`; nothing if a named worker has ended."""
        if self._pending is None:
            return
        finding, queries = self._pending.finding, self._pending.queries
        answers = {slot: query.answer() for slot, query in queries.items()}
        places: dict[int, Frame] = {slot: frame for slot, frame in answers.items() if frame is not None}
        if len(places) < len(queries) and now_s < self._pending.until_s:
            return
        self._pending = None
        if all(slot in views for slot in finding.named):
            stamp = {"worker": finding.suspects[0], "step": finding.step}
            self.report(LateFound(finding, views, places, time_s=now_s, **stamp))


def _stopped(finding: StoppedWorker, view: WorkerView) -> StoppedFound:
    row = view.row
    return StoppedFound(view.id, row.is_member, finding.seconds, worker=finding.slot, step=row.step)
