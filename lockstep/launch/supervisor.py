"""Follows the workers of a job to the end: lets `supervision` decide, and has the crew do it."""

import signal
import time
from collections.abc import Callable

from lockstep.errors import BadEnvironment
from lockstep.launch.crew import Crew
from lockstep.launch.failure import EXITED, KILLED, Failure
from lockstep.launch.hangs import Watch
from lockstep.launch.job import Job
from lockstep.launch.memory import MemoryKills, count_memory_kills
from lockstep.launch.messages import tell_again, tell_apart_so_far, tell_loss
from lockstep.launch.process import WorkerProcess
from lockstep.launch.scale import read_wanted
from lockstep.launch.status import StatusRow
from lockstep.launch.supervision import (
    Condemned,
    Dismiss,
    Event,
    Failed,
    Finished,
    Looked,
    Over,
    Rescaled,
    Say,
    Send,
    Start,
    decide,
    empty_slots,
    founded,
    founded_again,
    judge,
)
from lockstep.launch.watchdog import Lookout
from lockstep.settings.environments.lockstep_run import Doors

WAKE_S = 0.25
# Others that fail because of the first get this long to say so, which only makes the story better.
GRACE_S = 0.3
END_S = 1.0
UNSTARTED_S = 30.0
"""How long nobody may have called `lockstep.start` before it is told."""
INTERRUPT_S = 2.4


class Supervisor:
    """Runs a job with a crew, and says what the user should know."""

    def __init__(self, job: Job, crew: Crew, say: Callable[[str], None]) -> None:
        self._job, self._crew, self._say = job, crew, say
        self._state = founded(job.num_workers, job.fault_budget)
        self._lookout = Lookout(crew, job.run_dir, say, watch=Watch(job.hang_s))
        self._memory_kills = MemoryKills(count_memory_kills)
        self._next_look_s = 0.0
        self._began_s = time.monotonic()
        # A script that opens a process group of its own need not be a lockstep run.
        self._is_together = job.num_workers == 1 or job.torch_distributed or not job.is_run
        self._has_told_apart = False

    @property
    def num_workers(self) -> int:
        return self._state.wanted

    @property
    def turned_away(self) -> tuple[str, ...]:
        """Why new workers could not take part, in their own words."""
        return tuple(failure.sentence for failure in self._state.turned_away if failure.sentence)

    @property
    def ran_apart(self) -> bool:
        """Whether several workers have each run the whole script by themselves: none has called `lockstep.start`."""
        self._is_together = self._is_together or self._crew.has_started
        return not self._is_together

    def run(self) -> signal.Signals | Over | None:
        """What ended the job: a signal, a failure, or None when everybody came to the end of the script."""
        self._crew.found(self._state.wanted)
        while True:
            self._follow(lambda: self._state.failures or self._state.done)
            if self._state.failures:
                self._follow(lambda: not self._crew.running, GRACE_S)
            if self._crew.interrupts:
                return self._interrupt()
            if self._state.done:
                return None
            verdict = judge(self._state)
            if isinstance(verdict, Over):
                return verdict
            self._start_again()

    def num_well(self, over: Over) -> int:
        """How many workers were well when the run was over: those that only told of others are."""
        told = {over.first.rank, *(failure.rank for failure in over.others)}
        return sum(failure.secondary for failure in over.others) + len(self._crew.running.keys() - told)

    def end_others(self) -> None:
        """Asks everybody who has not failed to end, and waits a little. Workers that reported are leaving anyway."""
        reported = {failure.pid for failure in self._state.failures}
        for worker in self._crew.running.values():
            if worker.pid not in reported:
                worker.send(signal.SIGTERM)
        self._await_end(END_S, most_interrupts=0)

    def _follow(self, reached: Callable[[], object], within_s: float | None = None) -> None:
        """Follows the workers until `reached()`, an interrupt, or the end of `within_s`."""
        deadline_s = float("inf") if within_s is None else time.monotonic() + within_s
        while not reached() and not self._crew.interrupts and (now_s := time.monotonic()) < deadline_s:
            self._crew.wait(min(WAKE_S, deadline_s - now_s))
            self._learn()

    def _learn(self) -> None:
        """Takes up all that has happened, and does what follows from it."""
        if self._crew.scale_asked:
            self._crew.scale_asked = False
            self._decide(Rescaled(read_wanted(self._job.run_dir) or self._state.wanted))
        reported, self._crew.reported = self._crew.reported, []
        for worker in reported:
            self._decide(Failed(self._failure(worker), ended=worker.exit_status is not None))
        ended, self._crew.ended = self._crew.ended, []
        # Failures first: who went while the others came to the end of the script was survived by them.
        for worker in sorted(ended, key=lambda worker: not worker.exit_status):
            if worker.slot in self._crew.running:  # it had been dismissed, and its slot has been given away
                continue
            self._decide(Failed(self._failure(worker)) if worker.exit_status else Finished(worker.slot))
        if (now_s := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now_s + WAKE_S
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """What is done a few times a second, however much happens."""
        if self.ran_apart and not self._has_told_apart and now_s - self._began_s > UNSTARTED_S:
            self._has_told_apart = True
            self._say(tell_apart_so_far(self._state.wanted, UNSTARTED_S))
        self._memory_kills.recent(now_s)
        if not self._state.failures:
            joiners = {slot for slot, worker in self._state.workers.items() if worker.joiner}
            for slot in self._lookout.look(now_s, joiners):
                self._decide(Condemned(slot))
        self._decide(Looked(now_s))
        for slot in empty_slots(self._state):
            self._crew.give_up(slot)
        if any(self._crew.row(slot).is_member for slot in self._state.workers):
            self._crew.spares.fill()

    def _decide(self, event: Event) -> None:
        self._state, actions = decide(self._state, event, self._page_for(event))
        for action in actions:
            match action:
                case Say(text):
                    self._say(text)
                case Start(slot, doors, num_workers):
                    self._join(slot, doors, num_workers)
                case Send(slot, signum) if slot in self._crew.running:
                    self._crew.running[slot].send(signum)
                case Dismiss(slot):
                    self._crew.dismiss(slot)

    def _page_for(self, event: Event) -> dict[int, StatusRow]:
        """The rows of the event's own worker and of those that run: who has ended too is nobody's hope any more."""
        own = event.failure.rank if isinstance(event, Failed) else event.slot if isinstance(event, Finished) else None
        ended = self._state.workers.keys() - self._crew.running.keys() - {own}
        known = {*self._state.workers, *([] if own is None else [own])}
        return {slot: StatusRow() if slot in ended else self._crew.row(slot) for slot in known}

    def _join(self, slot: int, doors: Doors, num_workers: int) -> None:
        """Starts a joiner. The members go on if that cannot be done."""
        try:
            self._crew.join(slot, doors, num_workers)
        except BadEnvironment as error:
            self._say(f"! {error}; the others go on without it")
            self._decide(Finished(slot))

    def _failure(self, worker: WorkerProcess) -> Failure:
        """The worker's own report, or what its exit status says when it left none."""
        report = self._crew.report(worker)
        if report is not None:
            return report
        # A worker whose report was announced and then lost may still be on its way out, with code 1.
        status = 1 if worker.exit_status is None else worker.exit_status
        killed = status < 0
        kind = signal_name(-status) if killed else str(status)
        row = self._crew.row(worker.slot)
        return Failure(
            rank=worker.slot,
            step=row.step if row.is_member else None,
            kind=kind,
            message=self._reason(worker) if kind == "SIGKILL" else "",
            frames=(),
            secondary=False,
            time_s=worker.ended_s,
            how=KILLED if killed else EXITED,
            pid=worker.pid,
        )

    def _reason(self, worker: WorkerProcess) -> str:
        """Why the worker got SIGKILL, where that is known."""
        if worker.pid in self._lookout.condemned:
            return self._lookout.condemned[worker.pid]
        return "out of memory" if self._memory_kills.recent(time.monotonic()) else ""

    def _start_again(self) -> None:
        for failure in self._state.untold:
            self._say(tell_loss(failure))
        has_trained = self._state.num_steps is not None
        self._say(tell_again(self._state.wanted, has_trained))
        self.end_others()
        self._crew.clear_away()
        if not self._crew.interrupts:
            self._state = founded_again(self._state)
            self._lookout.watch.forget()
            self._crew.found(self._state.wanted, resume="auto" if has_trained else None)

    def _interrupt(self) -> signal.Signals:
        """Hands the signal on to the workers: they save, and `finally` blocks run. A second one ends the wait."""
        signum = self._crew.interrupts[0]
        self._crew.spares.close()
        for worker in self._crew.running.values():
            worker.send(signum)
        self._await_end(INTERRUPT_S, most_interrupts=1)
        return signum

    def _await_end(self, within_s: float, most_interrupts: int) -> None:
        """Waits until nobody runs any more, without a thought about how they end."""
        deadline_s = time.monotonic() + within_s
        while self._crew.running and (left_s := deadline_s - time.monotonic()) > 0:
            if len(self._crew.interrupts) > most_interrupts:
                break
            self._crew.wait(left_s)


def signal_name(number: int) -> str:
    return next((signum.name for signum in signal.Signals if signum == number), f"signal {number}")
