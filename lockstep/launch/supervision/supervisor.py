"""Follows the workers of a job to the end: `decisions` decides what follows from an event, and the pool does it."""

import signal
import time
from collections.abc import Callable

from lockstep.errors import BadEnvironment
from lockstep.events import Events
from lockstep.launch import events
from lockstep.launch.channels.failure import EXITED, KILLED, Failure
from lockstep.launch.channels.status import StatusRow
from lockstep.launch.host.signals import SCALE, LauncherSignals
from lockstep.launch.job import Job
from lockstep.launch.pool import ExitStatus, WorkerEvent, WorkerPool
from lockstep.launch.scale import read_wanted
from lockstep.launch.supervision import decisions
from lockstep.launch.supervision.hangs import HangDetector
from lockstep.launch.supervision.supervisor_state import initial_state, restarted_state
from lockstep.launch.supervision.watchdog import Watchdog
from lockstep.settings.environments.stop_signals import ENGINE_GRACE_S

WAKE_S = 0.25
SEEN_S = 1.0
"""So often what the workers do is an event."""
# Workers that fail because of the first failure get this long to report theirs.
GRACE_S = 0.3
END_S = 1.0
UNSTARTED_S = 30.0
"""The supervisor warns if no worker has called `lockstep.start` for so long."""
INTERRUPT_S = 2.4


class Supervisor:
    """Runs a job with a pool; what it does and sees goes to `events`. `interrupts` are the signals that ask it to end.

    An event about one worker is stamped with its slot and its step, another with LAUNCHER and the steps of the run.
    """

    def __init__(self, job: Job, pool: WorkerPool, signals: LauncherSignals, events: Events) -> None:
        self._job, self._pool, self._signals, self._events = job, pool, signals, events
        self.interrupts: list[signal.Signals] = []
        self._is_scale_requested = False
        self._state = initial_state(job.num_workers, job.fault_budget)
        self._watchdog = Watchdog(pool, events.publish, hangs=HangDetector(job.hang_s))
        self._next_look_s = self._next_seen_s = 0.0
        self._began_s = time.monotonic()
        # A script that opens a process group of its own need not be a lockstep run.
        self._is_together = job.num_workers == 1 or job.torch_distributed or not job.is_run
        self._has_warned_apart = False
        self._used_slots: set[int] = set()

    @property
    def num_workers(self) -> int:
        return self._state.wanted

    @property
    def num_steps(self) -> int:
        """How many steps the run has made, as far as they were seen."""
        return self._state.num_steps or 0

    @property
    def turned_away(self) -> tuple[str, ...]:
        """The new workers' own reports of why they could not take part."""
        return tuple(failure.sentence for failure in self._state.turned_away if failure.sentence)

    @property
    def ran_apart(self) -> bool:
        """Whether several workers run the whole script, each alone, because none has called `lockstep.start`."""
        self._is_together = self._is_together or bool(self._pool.rows())
        return not self._is_together

    def run(self) -> signal.Signals | decisions.Over | None:
        """Runs the job to its end. Returns the signal or failure that ended it; None if every worker finished."""
        self._start()
        while True:
            self._follow(lambda: self._state.failures or self._state.done)
            if self._state.failures:
                self._follow(lambda: not self._pool.running, GRACE_S)
            if self.interrupts:
                return self._interrupt()
            if self._state.done:
                return None
            verdict = decisions.judge(self._state)
            if isinstance(verdict, decisions.Over):
                return verdict
            self._restart()

    def num_well(self, over: decisions.Over) -> int:
        """How many workers were well when the run was over, those included that only reported another's failure."""
        failed = {over.first.rank, *(failure.rank for failure in over.others)}
        return sum(failure.secondary for failure in over.others) + len(self._pool.running.keys() - failed)

    def end_others(self) -> None:
        """Sends SIGTERM to all workers that have not reported a failure, and waits END_S for all to end."""
        reported = {failure.worker_id for failure in self._state.failures}
        for slot, id in list(self._pool.running.items()):
            if id not in reported:
                self._pool.send(slot, signal.SIGTERM)
        self._await_end(END_S, most_interrupts=0)

    # -- reporting ---------------------------------------------------------------------------------------------

    def _report_start(self, slot: int, joins: bool) -> None:
        replaces = slot in self._used_slots
        self._used_slots.add(slot)
        self._events.publish(events.WorkerStarted(joins, replaces, worker=slot, step=self.num_steps))

    def _report_exit(self, event: WorkerEvent, status: ExitStatus) -> None:
        row = self._pool.row(event.slot)
        reason = self._watchdog.condemned.get(event.id, status.reason)
        step = row.step if row.is_member else 0
        self._events.publish(events.WorkerExited(status.kind, status.is_killed, reason, worker=event.slot, step=step))

    # -- following the workers ---------------------------------------------------------------------------------

    def _follow(self, reached: Callable[[], object], within_s: float | None = None) -> None:
        """Follows the workers until `reached()`, an interrupt, or the end of `within_s`."""
        deadline_s = float("inf") if within_s is None else time.monotonic() + within_s
        while not reached() and not self.interrupts and (now_s := time.monotonic()) < deadline_s:
            self._learn(self._wait(min(WAKE_S, deadline_s - now_s)))

    def _wait(self, within_s: float) -> list[WorkerEvent]:
        happened = self._pool.wait(within_s)
        signals = self._signals.take()
        self._is_scale_requested |= SCALE in signals
        self.interrupts += [signum for signum in signals if signum != SCALE]
        return happened

    def _learn(self, happened: list[WorkerEvent]) -> None:
        """Decides on each event, and performs what follows from it."""
        if self._is_scale_requested:
            self._is_scale_requested = False
            self._decide(decisions.Rescaled(read_wanted(self._job.run_dir) or self._state.wanted))
        for event in sorted(happened, key=_urgency):
            if event.status is not None:
                self._report_exit(event, event.status)
            if event.status is not None and event.slot in self._pool.running:
                continue  # it was dismissed, and another worker runs in its slot
            if event.status is not None and event.status.is_clean and not self._pool.row(event.slot).is_in_run:
                self._decide(decisions.Finished(event.slot))
            else:
                self._decide(decisions.Failed(self._failure(event), ended=event.status is not None))
        if (now_s := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now_s + WAKE_S
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Runs a few times a second, however many events there are."""
        if self.ran_apart and not self._has_warned_apart and now_s - self._began_s > UNSTARTED_S:
            self._has_warned_apart = True
            self._events.publish(
                events.NobodyStarted(self._state.wanted, UNSTARTED_S, **decisions.stamp_of_run(self._state))
            )
        if not self._state.failures:
            joiners = {slot for slot, worker in self._state.workers.items() if worker.joiner}
            for slot in self._watchdog.look(now_s, joiners):
                self._decide(decisions.Condemned(slot))
        if now_s >= self._next_seen_s:
            self._next_seen_s = now_s + SEEN_S
            rows = {slot: self._pool.row(slot) for slot in self._pool.running}
            self._events.publish(events.WorkersSeen(rows, **decisions.stamp_of_run(self._state)))
        self._decide(decisions.Looked(now_s))
        for slot in decisions.empty_slots(self._state):
            self._pool.give_up(slot)
        if any(self._pool.row(slot).is_member for slot in self._state.workers):
            self._pool.keep_spares(self._job.spares)

    def _failure(self, event: WorkerEvent) -> Failure:
        """The worker's own report; a failure made from its exit status if it left none."""
        if event.report is not None:
            return event.report
        # A worker whose report was announced and then lost may still be about to exit, with code 1.
        status = event.status or ExitStatus("1")
        row = self._pool.row(event.slot)
        reason = self._watchdog.condemned.get(event.id, status.reason)
        return Failure(
            rank=event.slot,
            step=row.step if row.is_member else None,
            kind=status.kind,
            message=reason if status.kind == "SIGKILL" else "",
            frames=(),
            secondary=False,
            time_s=event.time_s,
            how=KILLED if status.is_killed else EXITED,
            worker_id=event.id,
        )

    # -- doing what was decided --------------------------------------------------------------------------------

    def _decide(self, event: decisions.Event) -> None:
        self._state, actions = decisions.decide(self._state, event, self._page_for(event))
        for action in actions:
            match action:
                case decisions.Report(reported):
                    self._events.publish(reported)
                case decisions.StartJoiner(slot, endpoints, num_workers):
                    self._join(slot, endpoints, num_workers)
                case decisions.SendSignal(slot, signum):
                    self._pool.send(slot, signum)
                case decisions.Dismiss(slot):
                    self._pool.end(slot)

    def _page_for(self, event: decisions.Event) -> dict[int, StatusRow]:
        """The rows of the event's own worker and of those that run; an empty row for every other that has ended."""
        own = event.slot if isinstance(event, (decisions.Failed, decisions.Finished)) else None
        ended = self._state.workers.keys() - self._pool.running.keys() - {own}
        known = {*self._state.workers, *([] if own is None else [own])}
        return {slot: StatusRow() if slot in ended else self._pool.row(slot) for slot in known}

    def _join(self, slot: int, endpoints: tuple[str, ...], num_workers: int) -> None:
        """Starts a joiner. The members go on without it if it cannot be started."""
        try:
            self._pool.replace(slot, endpoints, num_workers)
        except BadEnvironment as error:
            self._events.publish(events.WorkerNotStarted(str(error), worker=slot, step=self.num_steps))
            self._decide(decisions.Finished(slot))
        else:
            self._report_start(slot, joins=True)

    def _start(self, resume: str | None = None) -> None:
        """Starts the founders."""
        self._pool.start(self._state.wanted, resume)
        self._began_s = time.monotonic()  # workers may have waited for a place
        for slot in range(self._state.wanted):
            self._report_start(slot, joins=False)

    def _restart(self) -> None:
        for failure in self._state.unreported:
            self._events.publish(decisions.member_lost(failure))
        has_trained = self._state.num_steps is not None
        self._events.publish(
            events.RunRestarted(self._state.wanted, has_trained, **decisions.stamp_of_run(self._state))
        )
        self.end_others()
        self._pool.end_all()
        if not self.interrupts:
            self._state = restarted_state(self._state)
            self._watchdog.hangs.forget()
            self._start(resume="auto" if has_trained else None)

    def _interrupt(self) -> signal.Signals:
        """Passes the signal on to the workers, which save and run `finally` blocks. A second signal ends the wait."""
        signum = self.interrupts[0]
        for slot in list(self._pool.running):
            self._pool.send(slot, signum)
        is_engines = signum in self._signals.of_engine
        self._await_end(ENGINE_GRACE_S if is_engines else INTERRUPT_S, most_interrupts=1)
        return signum

    def _await_end(self, within_s: float, most_interrupts: int) -> None:
        """Waits until no worker runs, whatever their exit status."""
        deadline_s = time.monotonic() + within_s
        while self._pool.running and (left_s := deadline_s - time.monotonic()) > 0:
            if len(self.interrupts) > most_interrupts:
                break
            self._wait(left_s)


def _urgency(event: WorkerEvent) -> int:
    """Reports first, clean exits last: workers that finish have survived a failure of the same moment."""
    return 0 if event.status is None else 2 if event.status.is_clean else 1
