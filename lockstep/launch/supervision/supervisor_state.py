"""What the supervisor knows of a run, as one value.

# Note [The fault budget]
# A lost worker costs one of the budget. A step that is committed for the first time gives one back, up to the whole. So
# a run that makes progress survives any number of losses, and one that only loses workers ends.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lockstep.launch.channels.failure import Failure
from lockstep.launch.channels.status import StatusRow


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
    """Not empty: there is a crisis. See Note [Who goes on] in decisions.py."""
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


def refilled(state: SupervisorState, rows: Iterable[StatusRow]) -> SupervisorState:
    """The state with the steps that the workers' rows show. See Note [The fault budget].

    The first step that is seen need not be the first that was made.
    """
    committed = [row.step for row in rows if row.is_member and row.committed_ns]
    num_steps = max([*committed, *([] if state.num_steps is None else [state.num_steps])], default=None)
    if num_steps is None or num_steps == state.num_steps:
        return state
    gained = 1 if state.num_steps is None else num_steps - state.num_steps
    return replace(state, num_steps=num_steps, num_faults=max(0, state.num_faults - gained))
