"""What follows when a worker finishes, fails, is lost, or is one too few or too many. Pure: events in, actions out.

# Note [Who goes on]
# Members (workers of a generation) go on by themselves when one of them is lost; the supervisor only fills the free
# slot with a joiner. When no member can go on (no generation was formed yet, the last member is gone, or a survivor
# reports that it could not recover) there is a *crisis*: nothing is started any more, the others get a moment to
# report, and then `judge` decides whether all workers start again or the run is over.

# Note [The fault budget]
# A lost worker costs one of the budget. A step that is committed for the first time gives one back, up to the whole. So
# a run that makes progress survives any number of losses, and one that only loses workers ends.
"""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lockstep.events import Event as ReportedEvent
from lockstep.launch import events
from lockstep.launch.channels.failure import EXITED, Failure, first_failure
from lockstep.launch.channels.status import Phase, StatusRow
from lockstep.launch.supervision.messages import count
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
class Worker:
    """A worker that has not failed. A joiner was started after the founders, and must be admitted."""

    joiner: bool = False
    leaving: bool = False
    condemned: bool = False


@dataclass(frozen=True)
class SupervisorState:
    """All that the supervisor knows, apart from the page."""

    wanted: int
    fault_budget: int
    workers: Mapping[int, Worker] = field(default_factory=dict)
    given_up: frozenset[int] = frozenset()
    """Slots whose joiner failed in a way that would repeat."""
    num_misplaced: int = 0
    """Joiners that did not find their place in the script."""
    turned_away: tuple[Failure, ...] = ()
    """Joiners that reported why they cannot take part."""
    exits: Mapping[int, Failure] = field(default_factory=dict)
    """Members that left with an exit code of their own just now: losses, unless the others do so too."""
    finished: bool = False
    """A worker has finished the script: no more workers are started."""
    failures: tuple[Failure, ...] = ()
    """Not empty: there is a crisis. See Note [Who goes on]."""
    waited: frozenset[int] = frozenset()
    """Slots that failed while they waited for the others in a call. If a worker was lost, that is the cause."""
    unreported: tuple[Failure, ...] = ()
    """Losses of the crisis that are reported only if all workers start again."""
    num_killed: int = 0
    """Since the workers were last started from the top."""
    num_lost: int = 0
    num_faults: int = 0
    """What is used of the budget. See Note [The fault budget]."""
    num_steps: int | None = None
    """How many steps were ever committed; None while none was."""
    losses: Mapping[int | None, frozenset[tuple[int, int]]] = field(default_factory=dict)
    """By step: the attempts (start, generation) that have cost workers. Under None: each loss before the first step."""
    num_starts: int = 1
    exhausted: str = ""
    """Why the run cannot survive this loss, if it cannot."""

    @property
    def done(self) -> bool:
        """Whether no worker has anything left to do."""
        return not self.workers and not self.exits and not self.failures


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


def initial_state(wanted: int, fault_budget: int) -> SupervisorState:
    """The state when the founders have just been started."""
    return SupervisorState(wanted, fault_budget, workers={slot: Worker() for slot in range(wanted)})


def restarted_state(state: SupervisorState) -> SupervisorState:
    """The state when all workers have been started again: only faults are kept."""
    fresh = initial_state(state.wanted, state.fault_budget)
    return replace(
        fresh,
        num_lost=state.num_lost,
        num_faults=state.num_faults,
        num_steps=state.num_steps,
        losses=state.losses,
        num_starts=state.num_starts + 1,
    )


def decide(state: SupervisorState, event: Event, page: Page) -> tuple[SupervisorState, list[Action]]:
    """The state after the event, and the actions. `page` has the rows of all workers, the ended one's too."""
    actions: list[Action] = []
    state = _learn(_refilled(state, page), event, page, actions)
    if not state.failures:
        state = _dismiss_useless(state, page, actions)
        state = _fill(state, page, actions)
    return state, actions


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


def _learn(state: SupervisorState, event: Event, page: Page, actions: list[Action]) -> SupervisorState:
    match event:
        case Finished(slot):
            return _finish(state, slot, page)
        case Failed(failure, ended):
            return _fail(state, failure, ended, page, actions)
        case Rescaled(wanted):
            actions.append(Report(events.RunScaled(state.wanted, wanted, **_of_run(state))))
            return replace(state, wanted=wanted, given_up=frozenset(), num_misplaced=0)
        case Condemned(slot) if slot in state.workers:
            return _with(state, slot, replace(state.workers[slot], condemned=True))
        case Looked(now_s):
            return _pass_time(state, now_s, page, actions)
    return state


def _refilled(state: SupervisorState, page: Page) -> SupervisorState:
    """See Note [The fault budget]. The first step that is seen need not be the first that was made."""
    committed = [row.step for row in page.values() if row.is_member and row.committed_ns]
    num_steps = max([*committed, *([] if state.num_steps is None else [state.num_steps])], default=None)
    if num_steps is None or num_steps == state.num_steps:
        return state
    gained = 1 if state.num_steps is None else num_steps - state.num_steps
    return replace(state, num_steps=num_steps, num_faults=max(0, state.num_faults - gained))


def _finish(state: SupervisorState, slot: int, page: Page) -> SupervisorState:
    worker = state.workers.get(slot)
    if worker is None:
        return state
    state = _without(state, slot)
    if worker.joiner and not page[slot].is_member:
        return replace(state, given_up=state.given_up | {slot})
    return state if worker.leaving else replace(state, finished=True)


def _fail(state: SupervisorState, failure: Failure, ended: bool, page: Page, actions: list[Action]) -> SupervisorState:
    slot = failure.rank
    worker = state.workers.get(slot)
    if worker is None:
        return state
    if worker.joiner and failure.is_misplaced and _members(_without(state, slot), page):
        return _misplaced(_without(state, slot), failure, actions)
    if worker.joiner and not page[slot].is_member:
        return _lose_joiner(state, failure, actions) if ended else state
    state = _without(state, slot)
    if failure.is_error:
        waits = page[slot].phase == Phase.AWAITING
        return _in_crisis(replace(state, waited=state.waited | ({slot} if waits else set())), failure)
    if failure.how == EXITED and not failure.is_loss and not (state.finished and not _members(state, page)):
        return replace(state, exits={**state.exits, slot: failure})
    return _lose(state, failure, worker, page, actions)


def _lose_joiner(state: SupervisorState, failure: Failure, actions: list[Action]) -> SupervisorState:
    """The joiner failed before any member had admitted it. Unless the cause was its own, its slot is tried again."""
    retried = failure.is_loss or failure.secondary
    condemned = state.workers[failure.rank].condemned
    state = _charged(_without(state, failure.rank))
    if not retried:
        given_up, turned_away = state.given_up | {failure.rank}, (*state.turned_away, failure)
        state = replace(state, given_up=given_up, turned_away=turned_away)
    if state.num_faults > state.fault_budget:
        return _in_crisis(replace(state, exhausted=_used_up(state)), failure)
    if not condemned:
        actions.append(Report(events.JoinerLost(failure, retried, **_of(failure))))
    return state


def _misplaced(state: SupervisorState, failure: Failure, actions: list[Action]) -> SupervisorState:
    """The members go on. It costs nothing of the fault budget: the script cannot be joined at this point."""
    actions.append(Report(events.JoinerMisplaced(failure, **_of(failure))))
    state = replace(state, num_misplaced=state.num_misplaced + 1, turned_away=(*state.turned_away, failure))
    if state.num_misplaced == MISPLACED_TRIES:
        actions.append(Report(events.JoinersGivenUp(MISPLACED_TRIES, **_of_run(state))))
    return state


def _lose(
    state: SupervisorState,
    failure: Failure,
    worker: Worker,
    page: Page,
    actions: list[Action],
    is_survived: bool = False,
) -> SupervisorState:
    """`is_survived`: other workers have finished the script without it, and have ended."""
    others = _members(state, page)
    if not failure.is_loss and not others and not is_survived:  # its own exit code, which it would give again
        return _in_crisis(state, failure)
    state = _counted(state, failure, page.get(failure.rank, StatusRow()).generation)
    if not (others or is_survived) or state.exhausted or state.failures:
        unreported = state.unreported if worker.condemned else (*state.unreported, failure)
        return _in_crisis(replace(state, unreported=unreported), failure)
    if not worker.condemned:
        actions.append(Report(member_lost(failure)))
    return state


def _counted(state: SupervisorState, failure: Failure, generation: int) -> SupervisorState:
    """Charges the loss to the run and to the step; `exhausted` is set if that was one too many."""
    attempt = (state.num_starts, state.num_lost if failure.step is None else generation)
    here = state.losses.get(failure.step, frozenset()) | {attempt}
    state = replace(
        _charged(state),
        num_killed=state.num_killed + failure.is_loss,
        losses={**state.losses, failure.step: here},
    )
    if state.num_faults > state.fault_budget:
        return replace(state, exhausted=_used_up(state))
    if len(here) >= SAME_STEP:
        what = "the start" if failure.step is None else f"step {failure.step}"
        why = f"{what} has cost workers in {len(here)} attempts: it would cost the next one too"
        return replace(state, exhausted=why)
    return state


def _charged(state: SupervisorState) -> SupervisorState:
    return replace(state, num_lost=state.num_lost + 1, num_faults=state.num_faults + 1)


def _used_up(state: SupervisorState) -> str:
    lost, too_few = count(state.num_lost, "worker"), "" if state.num_steps is None else ", and too few steps meanwhile"
    return f"{lost} lost in this run{too_few}: the fault budget of {state.fault_budget} is used up (--fault-budget)"


def _pass_time(state: SupervisorState, now_s: float, page: Page, actions: list[Action]) -> SupervisorState:
    if _members(state, page):
        state = replace(state, losses={step: lost for step, lost in state.losses.items() if step is not None})
    for slot, failure in state.exits.items():
        if now_s >= failure.time_s + EXIT_GRACE_S or not _members(state, page):
            state = replace(state, exits={other: exit for other, exit in state.exits.items() if other != slot})
            state = _lose(state, failure, Worker(), page, actions, is_survived=state.finished)
    return state


def _dismiss_useless(state: SupervisorState, page: Page, actions: list[Action]) -> SupervisorState:
    """Ends joiners that no member can admit any more, once the members have finished the script."""
    if not state.finished or state.exits or any(_has_work(slot, state, page) for slot in state.workers):
        return state
    actions += [Dismiss(slot) for slot in state.workers]
    return replace(state, workers={})


def _has_work(slot: int, state: SupervisorState, page: Page) -> bool:
    return page[slot].is_member or not state.workers[slot].joiner


def _fill(state: SupervisorState, page: Page, actions: list[Action]) -> SupervisorState:
    """Starts joiners or shrinks the run to `wanted` workers, as soon as there are members to admit or to leave."""
    ports = [page[slot].endpoint_port for slot in _members(state, page)]
    endpoints = tuple(f"{LOOPBACK}:{port}" for port in ports if port)
    staying = [slot for slot, worker in state.workers.items() if not worker.leaving]
    missing = state.wanted - len(staying) - len(state.given_up) - len(state.exits)
    if not endpoints or state.finished or missing == 0 or (missing > 0 and state.num_misplaced >= MISPLACED_TRIES):
        return state
    if missing > 0:
        taken = {*state.workers, *state.given_up, *state.exits}
        free = [slot for slot in range(len(taken) + missing) if slot not in taken][:missing]
        actions += [StartJoiner(slot, endpoints, state.wanted) for slot in free]
        return replace(state, workers={**state.workers, **{slot: Worker(joiner=True) for slot in free}})
    return _shrink(state, sorted(staying)[missing:], page, actions)


def _shrink(state: SupervisorState, surplus: list[int], page: Page, actions: list[Action]) -> SupervisorState:
    """Members leave after their step, joiners that are not members end now, founders that are not members stay."""
    leaving = [slot for slot in surplus if page[slot].is_member]
    dismissed = [slot for slot in surplus if not page[slot].is_member and state.workers[slot].joiner]
    for slot in leaving:
        state = _with(state, slot, replace(state.workers[slot], leaving=True))
        actions.append(SendSignal(slot, signal.SIGUSR1))
    for slot in dismissed:
        state = _without(state, slot)
        actions.append(Dismiss(slot))
    if leaving:
        actions.append(Report(events.LeavingAsked(tuple(leaving), state.wanted, **_of_run(state))))
    return state


def member_lost(failure: Failure) -> events.MemberLost:
    return events.MemberLost(failure, **_of(failure))


def _of(failure: Failure) -> dict[str, int]:
    """What an event about this worker is stamped with."""
    return {"worker": failure.rank, "step": failure.step or 0}


def _of_run(state: SupervisorState) -> dict[str, int]:
    """What an event about the whole run is stamped with."""
    return {"worker": events.LAUNCHER, "step": state.num_steps or 0}


def _members(state: SupervisorState, page: Page) -> list[int]:
    """The workers that can go on and admit others: not those that the watchdog has killed."""
    return sorted(slot for slot, worker in state.workers.items() if page[slot].is_member and not worker.condemned)


def _in_crisis(state: SupervisorState, failure: Failure) -> SupervisorState:
    return replace(state, failures=(*state.failures, failure))


def _with(state: SupervisorState, slot: int, worker: Worker) -> SupervisorState:
    return replace(state, workers={**state.workers, slot: worker})


def _without(state: SupervisorState, slot: int) -> SupervisorState:
    return replace(state, workers={other: worker for other, worker in state.workers.items() if other != slot})
