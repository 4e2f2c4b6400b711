"""What follows when a worker finishes, fails, is lost, or is one too few or too many. Pure: events in, actions out.

# Note [Who goes on]
# Members (workers of a generation) go on by themselves when one of them is lost; the supervisor only fills the free
# slot with a joiner. When no member can go on (no generation was formed yet, the last member is gone, or a survivor
# reports that it could not recover) there is a *crisis*: nothing is started any more, the others get a moment to
# report, and then `judge` decides whether all workers start again or the run is over.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.events import Event as ReportedEvent
from lockstep.launch import events
from lockstep.launch.channels.failure import EXITED, Failure, first_failure
from lockstep.launch.channels.status import Phase, StatusRow
from lockstep.launch.supervision.messages import count
from lockstep.launch.supervision.supervisor_state import SupervisorState, Worker, refilled
from lockstep.settings.environments.place import LOOPBACK

# Workers that all leave with the script's own exit code do so within this time, and none of them is replaced.
EXIT_GRACE_S = 1.0
SAME_STEP = 5
"""How many attempts at one step may each cost workers. Workers that are lost in the same attempt count once."""
MISPLACED_TRIES = 2
"""No more joiners are started after so many have given their place up."""

Page = Mapping[int, StatusRow]


@dataclass(frozen=True)
class Finished:
    """The worker's process ended with exit code 0."""

    slot: int


@dataclass(frozen=True)
class Failed:
    """The worker failed. `ended` is False if it has reported and its process still runs."""

    failure: Failure
    ended: bool = True

    @property
    def slot(self) -> int:
        return self.failure.rank


@dataclass(frozen=True)
class Rescaled:
    """`lockstep scale` has set the number of workers."""

    wanted: int


@dataclass(frozen=True)
class Condemned:
    """The watchdog has reported the worker and killed it; the event of its end will follow."""

    slot: int


@dataclass(frozen=True)
class Looked:
    """Time has passed."""

    now_s: float


Event = Finished | Failed | Rescaled | Condemned | Looked


@dataclass(frozen=True)
class Report:
    """Hand the event to its readers."""

    event: ReportedEvent


@dataclass(frozen=True)
class StartJoiner:
    slot: int
    endpoints: tuple[str, ...]
    num_workers: int


@dataclass(frozen=True)
class SendSignal:
    slot: int
    signum: signal.Signals


@dataclass(frozen=True)
class Dismiss:
    """End a worker that was not admitted yet, silently."""

    slot: int


Action = Report | StartJoiner | SendSignal | Dismiss


@dataclass(frozen=True)
class Restart:
    """All workers are ended and started again: from the newest checkpoint, if a step was ever committed.

    Without such a step, a checkpoint in the folder belongs to another run.
    """


@dataclass(frozen=True)
class Over:
    """The run has failed; `why` is the reason where the failure itself does not give it."""

    first: Failure
    others: tuple[Failure, ...]
    why: str = ""


def decide(state: SupervisorState, event: Event, page: Page) -> tuple[SupervisorState, list[Action]]:
    """The state after the event, and the actions. `page` has the rows of all workers, the ended one's too."""
    case = _Case(refilled(state, page.values()), page)
    case.learn(event)
    if not case.state.failures:
        case.dismiss_useless()
        case.fill()
    return case.state, case.actions


def judge(state: SupervisorState) -> Restart | Over:
    """Decides how a crisis ends. Called after every worker had a moment to report."""
    lost = state.num_killed > 0
    followers = [failure for failure in state.failures if failure.secondary or (lost and failure.rank in state.waited)]
    own = [failure for failure in state.failures if failure.is_error and failure not in followers]
    if not own and not state.exhausted and lost and (followers or any(failure.is_loss for failure in state.failures)):
        return Restart()
    first = first_failure(own or state.failures)
    others = tuple(failure for failure in state.failures if failure is not first)
    return Over(first, others, "" if own else state.exhausted)


def empty_slots(state: SupervisorState) -> set[int]:
    """The slots that have lost their worker and get no other."""
    nobody_comes = state.finished or state.num_misplaced >= MISPLACED_TRIES
    return {
        slot for slot in range(state.wanted) if slot not in state.workers and (nobody_comes or slot in state.given_up)
    }


@dataclass
class _Case:
    """One event while it is decided on: the state so far, the workers' rows, and the actions until now."""

    state: SupervisorState
    page: Page
    actions: list[Action] = field(default_factory=list)

    # -- what the event changes --------------------------------------------------------------------------------

    def learn(self, event: Event) -> None:
        state = self.state
        match event:
            case Finished(slot) if slot in state.workers:
                self._finish(slot, self._remove(slot))
            case Failed(failure, ended) if event.slot in state.workers:
                self._fail(failure, ended)
            case Rescaled(wanted):
                self._report(events.RunScaled(state.wanted, wanted, **stamp_of_run(state)))
                self._set(wanted=wanted, given_up=frozenset(), num_misplaced=0)
            case Condemned(slot) if slot in state.workers:
                self._change(slot, condemned=True)
            case Looked(now_s):
                self._pass_time(now_s)

    def _finish(self, slot: int, worker: Worker) -> None:
        if worker.joiner and not self.page[slot].is_member:
            self._set(given_up=self.state.given_up | {slot})
        elif not worker.leaving:
            self._set(finished=True)

    def _fail(self, failure: Failure, ended: bool) -> None:
        slot = failure.rank
        worker, row = self.state.workers[slot], self.page[slot]
        if worker.joiner and failure.is_misplaced and set(self._members()) - {slot}:
            self._remove(slot)
            self._misplace(failure)
        elif worker.joiner and not row.is_member:
            if ended:
                self._remove(slot)
                self._lose_joiner(failure, worker)
        else:
            self._remove(slot)
            self._fail_member(failure, worker, row)

    def _fail_member(self, failure: Failure, worker: Worker, row: StatusRow) -> None:
        state = self.state
        if failure.is_error:
            waits = {failure.rank} if row.phase == Phase.AWAITING else set()
            self._set(waited=state.waited | waits)
            self._fall_in_crisis(failure)
        elif failure.how == EXITED and not failure.is_loss and not (state.finished and not self._members()):
            self._set(exits={**state.exits, failure.rank: failure})
        else:
            self._lose(failure, worker)

    def _lose_joiner(self, failure: Failure, worker: Worker) -> None:
        """No member had admitted the joiner yet. Unless the cause was its own, its slot is tried again."""
        is_retried = failure.is_loss or failure.secondary
        if not is_retried:
            turned_away = (*self.state.turned_away, failure)
            self._set(given_up=self.state.given_up | {failure.rank}, turned_away=turned_away)
        if self._is_one_too_many():
            self._fall_in_crisis(failure)
        elif not worker.condemned:
            self._report(events.JoinerLost(failure, is_retried, **_of(failure)))

    def _misplace(self, failure: Failure) -> None:
        """The members go on. It costs nothing of the fault budget: the script cannot be joined at this point."""
        self._report(events.JoinerMisplaced(failure, **_of(failure)))
        self._set(num_misplaced=self.state.num_misplaced + 1, turned_away=(*self.state.turned_away, failure))
        if self.state.num_misplaced == MISPLACED_TRIES:
            self._report(events.JoinersGivenUp(MISPLACED_TRIES, **stamp_of_run(self.state)))

    def _lose(self, failure: Failure, worker: Worker, is_survived: bool = False) -> None:
        """`is_survived`: other workers have finished the script without it, and have ended."""
        is_survived = is_survived or bool(self._members())
        if not failure.is_loss and not is_survived:  # its own exit code, which it would give again
            self._fall_in_crisis(failure)
            return
        self._charge_step(failure)
        if not is_survived or self.state.exhausted or self.state.failures:
            if not worker.condemned:
                self._set(unreported=(*self.state.unreported, failure))
            self._fall_in_crisis(failure)
        elif not worker.condemned:
            self._report(member_lost(failure))

    def _charge_step(self, failure: Failure) -> None:
        """Charges the loss to the run and to the step; `exhausted` is set if that was one too many."""
        state = self.state
        generation = self.page.get(failure.rank, StatusRow()).generation
        attempt = (state.num_starts, state.num_lost if failure.step is None else generation)
        here = state.losses.get(failure.step, frozenset()) | {attempt}
        self._set(num_killed=state.num_killed + failure.is_loss, losses={**state.losses, failure.step: here})
        if not self._is_one_too_many() and len(here) >= SAME_STEP:
            what = "the start" if failure.step is None else f"step {failure.step}"
            why = f"{what} has cost workers in {len(here)} attempts: it would cost the next one too"
            self._set(exhausted=why)

    def _is_one_too_many(self) -> bool:
        """Charges a loss to the run; `exhausted` is set if the budget does not cover it."""
        self._set(num_lost=self.state.num_lost + 1, num_faults=self.state.num_faults + 1)
        if self.state.num_faults <= self.state.fault_budget:
            return False
        lost = count(self.state.num_lost, "worker")
        too_few = "" if self.state.num_steps is None else ", and too few steps meanwhile"
        budget = f"the fault budget of {self.state.fault_budget} is used up (--fault-budget)"
        self._set(exhausted=f"{lost} lost in this run{too_few}: {budget}")
        return True

    def _pass_time(self, now_s: float) -> None:
        if self._members():
            self._set(losses={step: lost for step, lost in self.state.losses.items() if step is not None})
        for slot, failure in self.state.exits.items():
            if now_s >= failure.time_s + EXIT_GRACE_S or not self._members():
                self._set(exits={other: exit for other, exit in self.state.exits.items() if other != slot})
                self._lose(failure, Worker(), is_survived=self.state.finished)

    # -- what follows for the others ---------------------------------------------------------------------------

    def dismiss_useless(self) -> None:
        """Ends joiners that no member can admit any more, once the members have finished the script."""
        workers = self.state.workers
        has_work = any(self.page[slot].is_member or not worker.joiner for slot, worker in workers.items())
        if self.state.finished and not self.state.exits and not has_work:
            self.actions += [Dismiss(slot) for slot in workers]
            self._set(workers={})

    def fill(self) -> None:
        """Starts joiners or shrinks the run to `wanted` workers, as soon as there are members to admit or to leave."""
        state = self.state
        ports = [self.page[slot].endpoint_port for slot in self._members()]
        endpoints = tuple(f"{LOOPBACK}:{port}" for port in ports if port)
        staying = sorted(slot for slot, worker in state.workers.items() if not worker.leaving)
        missing = state.wanted - len(staying) - len(state.given_up) - len(state.exits)
        if not endpoints or state.finished:
            return
        if missing < 0:
            self._shrink(staying[missing:])
        elif state.num_misplaced < MISPLACED_TRIES:
            taken = {*state.workers, *state.given_up, *state.exits}
            free = [slot for slot in range(len(taken) + missing) if slot not in taken][:missing]
            self.actions += [StartJoiner(slot, endpoints, state.wanted) for slot in free]
            self._set(workers={**state.workers, **{slot: Worker(joiner=True) for slot in free}})

    def _shrink(self, surplus: list[int]) -> None:
        """Members leave after their step, joiners that are not members end now, founders that are not members stay."""
        leaving = [slot for slot in surplus if self.page[slot].is_member]
        for slot in leaving:
            self._change(slot, leaving=True)
            self.actions.append(SendSignal(slot, signal.SIGUSR1))
        for slot in surplus:
            if slot not in leaving and self.state.workers[slot].joiner:
                self._remove(slot)
                self.actions.append(Dismiss(slot))
        if leaving:
            self._report(events.LeavingAsked(tuple(leaving), self.state.wanted, **stamp_of_run(self.state)))

    def _members(self) -> list[int]:
        """The workers that can go on and admit others: not those that the watchdog has killed."""
        workers = self.state.workers.items()
        return sorted(slot for slot, worker in workers if self.page[slot].is_member and not worker.condemned)

    # -- changes -----------------------------------------------------------------------------------------------

    def _set(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _change(self, slot: int, **changes: bool) -> None:
        self._set(workers={**self.state.workers, slot: replace(self.state.workers[slot], **changes)})

    def _remove(self, slot: int) -> Worker:
        workers = dict(self.state.workers)
        worker = workers.pop(slot)
        self._set(workers=workers)
        return worker

    def _fall_in_crisis(self, failure: Failure) -> None:
        self._set(failures=(*self.state.failures, failure))

    def _report(self, event: ReportedEvent) -> None:
        self.actions.append(Report(event))


def member_lost(failure: Failure) -> events.MemberLost:
    return events.MemberLost(failure, **_of(failure))


def _of(failure: Failure) -> dict[str, int]:
    """What an event about this worker is stamped with."""
    return {"worker": failure.rank, "step": failure.step or 0}


def stamp_of_run(state: SupervisorState) -> dict[str, int]:
    """What an event about the whole run is stamped with."""
    return {"worker": events.LAUNCHER, "step": state.num_steps or 0}
