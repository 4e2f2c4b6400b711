"""The forming of generations: who takes part, with which lanes, and how the state reaches those who come.

# Note [Newcomers]
# A worker that is started later runs the user's script from the beginning, alone, up to where training begins. There
# it asks the members to be admitted, and is given all that the next step depends on: parameters, buffers, optimizers,
# tracked objects, gradients under way, generators, the positions of loaders and epochs, and where the script is. So it
# goes on in the middle of an epoch as though it had been there. See Note [Probation] in newcomer.py.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from lockstep.data import GlobalBatch
from lockstep.elastic.copies.copier import Copier
from lockstep.elastic.first_worker import FirstWorker
from lockstep.elastic.membership import Decision, LaneDeal
from lockstep.elastic.membership.actions import Commit
from lockstep.elastic.membership.decision import completes
from lockstep.elastic.newcomer import Handoff, Probation, misfits
from lockstep.elastic.opener import FORM_S
from lockstep.elastic.pace import LanePace
from lockstep.elastic.recovery import LeftOut, MemberHangs, Recovery
from lockstep.elastic.requests import Requests, Signals
from lockstep.elastic.roster import RunIsOver
from lockstep.errors import Disagreement, WorkerLost
from lockstep.events import Copied, Events, GenerationFormed, JoinBegan, RecoveryBegan
from lockstep.gradients.record import StepRecord, StepRequest
from lockstep.lanes import Assignment
from lockstep.launch.channels.control import Control
from lockstep.launch.channels.exits import LEFT_OUT, OutOfPlace
from lockstep.launch.channels.status import NoStatus, StatusWriter, Trait
from lockstep.script.places import Places
from lockstep.state.run_state import RunState
from lockstep.state.transfer import help_to_send, helpers_of, receive_snapshot, send_snapshot
from lockstep.strategies.protocol import StepEngine
from lockstep.wire import Wire
from lockstep.wire.generation import Generation

COMPANY_S = 600.0
"""How long to wait for a replacement where the lanes of a step cannot be computed by fewer workers."""


@dataclass(frozen=True)
class Elasticity:
    """What lets workers come and go. `joins`: this worker is a newcomer, and no member yet.

    `control` is the launcher's way to ask for a copy of this worker; `store_port` that of the store where all met.
    """

    recovery: Recovery
    joins: bool = False
    control: Control | None = None
    store_port: int = 0


class Formation:
    """One worker's part in the generations of a run. Without `elasticity` there is one generation: a loss ends the run.

    `by_hand` are the lanes of each slot, if somebody has given them out. `rebalances`: lanes follow the workers' pace,
    see pace.py. Methods are called on the thread of the user's script; what communicates is called by all members.
    """

    def __init__(
        self,
        state: RunState,
        places: Places,
        engine: StepEngine,
        generation: Generation,
        elasticity: Elasticity | None,
        events: Events,
        status: StatusWriter | NoStatus,
        by_hand: tuple[tuple[int, ...], ...] | None = None,
        rebalances: bool = False,
        is_exact: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generation = generation
        """The present one: another value after every change of members or lanes."""
        self.signals, self.requests = Signals(), Requests()
        self.pid = os.getpid()
        """The process that takes part: no other one that it forks does."""
        self.is_member = elasticity is None or not elasticity.joins
        self.is_stopped = False
        """Whether a signal has ended the run, or this worker's part in it."""
        self.recovery = None if elasticity is None else elasticity.recovery
        self.first = FirstWorker(status, clock)
        self.looks_closely = False
        """Whether batch and state are compared as a whole in this step: somebody is new, or was until now."""
        self._state, self._places, self._engine, self._events, self._status = state, places, engine, events, status
        self._by_hand, self._clock = by_hand, clock
        self._rebalances, self._pace = rebalances and by_hand is None, LanePace()
        self._is_exact = is_exact
        self.copier = self._copier(elasticity)
        self._batch: GlobalBatch | None = None
        self._handoff = Handoff(state)
        self._probation = Probation()
        self._had_company = False

    @property
    def newcomers(self) -> list[int]:
        """The ranks of those on probation, as long as the others can compute their lanes too."""
        if not self._is_exact or not self._probation.uids or self._engine.statistics is not None:
            return []
        assert self.recovery is not None
        members = self.recovery.membership.view.members
        found = [rank for rank, member in enumerate(members) if member.uid in self._probation.uids]
        return found if len(found) < len(members) else []

    def _copier(self, elasticity: Elasticity | None) -> Copier | None:
        """See Note [Replacement by a copy] in launch/channels/control.py."""
        if elasticity is None or elasticity.control is None:
            return None
        recovery, port = elasticity.recovery, elasticity.store_port
        self._status.add_trait(Trait.MAY_BE_COPIED)
        return Copier(elasticity.control, lambda: {port, *recovery.ports}, self._state.progress.loader_pids)

    @property
    def _step(self) -> int:
        return self._state.steps.step

    @property
    def number(self) -> int:
        """That of the present generation; 0 as long as this worker is no member."""
        return self.generation.world.generation if self.is_member else 0

    @property
    def rank(self) -> int:
        """This worker's number as its script sees it. See Note [Worker 0] in first_worker.py."""
        if not self.is_member:
            return self.own_slot
        return self.generation.world.rank + self._first_is_awaited

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those present; no newcomer is before it has come to its first step."""
        return self.is_present and self.generation.world.rank == 0

    @property
    def is_present(self) -> bool:
        """Whether this worker's script stands where the others' do: a newcomer's does from its first batch on."""
        return self.is_member and not self._handoff.is_on_its_way

    @property
    def own_slot(self) -> int:
        """Which of the run's workers this is: a replacement has the slot of the one before it."""
        return 0 if self.recovery is None else self.recovery.endpoint.member.slot

    @property
    def _first_is_awaited(self) -> bool:
        return self.recovery is not None and self.first.is_awaited(self.generation.slots)

    @property
    def is_on_probation(self) -> bool:
        """See Note [Probation] in newcomer.py."""
        return self.recovery is not None and self.recovery.endpoint.member.uid in self._probation.uids

    # -- around a step --------------------------------------------------------------------------------------

    def begin(self, batch: GlobalBatch) -> None:
        """The step of this batch is next: a newcomer becomes a member, and is where the others are."""
        self._batch = batch
        self.admit()
        self._handoff.arrive()

    def committed(self, record: StepRecord | None) -> None:
        """A step counts; its record, where this worker has it, says how fast the workers are, and what they need."""
        if record is not None:
            self._pace.take(record.times_s, self.generation.assignment)
            self.first.is_needed |= record.requests[StepRequest.FIRST]
        self.looks_closely = bool(self._probation.uids)

    def batch_is_due(self) -> None:
        """A loader of the run is about to hand out a batch."""
        self._handoff.arrive()

    def close(self) -> None:
        """Closes the wire, and the endpoint at which others would look for this worker. The run has ended."""
        self.generation.wire.close()
        if self.recovery is not None:
            self.recovery.close()
        if self.copier is not None:
            self.copier.close()

    # -- newcomers ------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """A newcomer becomes a member, if it is none yet. See Note [Newcomers]."""
        if self.is_member:
            return
        assert self.recovery is not None
        self._events.emit(JoinBegan, step=self._step)
        began_s = self._clock()
        try:
            self.recovery.join(self.hand_state_over)
        except RunIsOver as over:
            self._events.note(str(over), one_worker=True, in_log=True)
            raise SystemExit(0) from over
        except LeftOut as left:
            self._leave(left)
        self.is_member = True
        self._had_company = True  # the run has: where it never had, no step was ever made
        self._enter_generation()
        self._report(None, False, None, self._clock() - began_s)

    def prove(self) -> None:
        """Newcomers that have agreed on a whole turn, and do in this step, are like others. See Note [Probation] in
        newcomer.py."""
        places = self._places
        if places.begins_turn and self._probation.is_over(places.turn.number, sum(places.updates.values())):
            self._probation = Probation()

    def _put_on_probation(self, newcomers: tuple[str, ...]) -> None:
        """Those of the new generation who have to show that they are at the same place, now and before."""
        assert self.recovery is not None
        members = self.recovery.membership.view.members
        new = {member.uid for member in members if member.uid in newcomers and member.fresh}
        before = {member.uid for member in members if member.uid in self._probation.uids}
        places = self._places
        if new:
            self._probation = Probation(frozenset(before | new), places.turn.number, sum(places.updates.values()))
        else:
            self._probation = replace(self._probation, uids=frozenset(before))
        self.looks_closely = bool(newcomers) or bool(before)

    def send_misfits_away(self, failure: Disagreement) -> list[int]:
        """Raises, unless the others can go on without those who disagree: gives the ranks of these.

        See Note [Misfits] in newcomer.py.
        """
        assert self.recovery is not None
        members = self.recovery.membership.view.members
        leaving = misfits(failure.sides, members)
        if leaving is None:
            raise failure
        if self.generation.world.rank in leaving:
            self.generation.wire.close()
            raise OutOfPlace(f"this worker leaves at step {self._step}: {failure}") from failure
        workers = ", ".join(str(members[rank].slot) for rank in leaving)
        self._events.note(f"worker {workers} cannot take part: {failure} The others go on without it.")
        return leaving

    # -- the next generation --------------------------------------------------------------------------------

    def reform(self, failure: Exception | None = None, *, admit: bool = False, in_step: bool = True) -> bool:
        """Collective. Forms the next generation; whether the step under way is committed."""
        assert self.recovery is not None
        began_s, before = self._clock(), self.generation
        self._events.emit(RecoveryBegan, step=self._step)
        try:
            if self._becomes_copy():
                committed = isinstance(self.recovery.join(self.hand_state_over), Commit)
            else:
                self.recovery.deal_by(self._lane_deal)
                limit_s = self._patience_s(failure)
                outcome = self.recovery.reform(self.hand_state_over, admit=admit, limit_s=limit_s)
                committed = isinstance(outcome, Commit)
        except LeftOut as left:
            self._leave(left)
        except MemberHangs as hang:
            raise self._hung(hang, failure) from hang
        self._enter_generation()
        if self.copier is not None:
            self.copier.settle(self.generation.slots)
        self._report(failure, committed, before, self._clock() - began_s, in_update=failure is not None and not in_step)
        if self.is_first and (note := self.first.succession(self.generation.slots, self.own_slot)) is not None:
            self._events.note(note)
        return committed

    def _hung(self, hang: MemberHangs, failure: Exception | None) -> WorkerLost:
        """Who keeps all waiting: the coordinator knows, the others know of whom nothing has come."""
        if isinstance(failure, WorkerLost) and not hang.slots:
            return failure
        rank = self.generation.slots.index(hang.slots[0]) if hang.slots else 0
        return WorkerLost(rank, self._step, "the forming of the next generation", str(hang))

    def _patience_s(self, failure: Exception | None) -> float:
        """How long one that lives is waited for: for as long as in an exchange, unless that was in vain already."""
        assert self.recovery is not None
        timeout_s = self.recovery.opener.options.timeout_s
        was_waited_for = isinstance(failure, WorkerLost) and failure.is_silent
        return min(timeout_s, FORM_S) if was_waited_for else timeout_s

    def _becomes_copy(self) -> bool:
        """Makes a copy of this worker if that is asked for; whether this process is the copy.

        Where this worker has done its part of a step, the others may count that step: nobody is copied then.
        """
        assert self.recovery is not None
        if self.copier is None or not self.copier.is_asked() or self.recovery.membership.prepared:
            return False
        self.generation.wire.close()
        slot = self.copier.copy()
        if slot is None:
            return False
        self._engine.keep_gradients()
        self.signals.leave = False
        self._status.move_to(slot)
        self.pid = os.getpid()
        self._state.progress.is_copied()
        self._events.worker = slot
        self._events.emit(Copied, slot, step=self._step)
        self._events.emit(JoinBegan, step=self._step)
        self.recovery.restart_as(slot, self.copier.has_called)
        return True

    def await_company(self) -> None:
        """Waits until there are enough workers again, if any can come. See Note [Worker 0] in first_worker.py.

        Batch norm over all lanes needs a worker for each.
        """
        until_s = self._clock() + COMPANY_S
        while self.recovery is not None and self._is_missed():
            if isinstance(self._status, NoStatus) or self._clock() > until_s:
                self.first.give_up()
                return
            if self.recovery.is_coordinator:
                self.recovery.endpoint.await_claim(1.0)
                self.recovery.has_claims()  # one that is alone decides at once, and admits only those it has heard of
            self.recovery.deal_by(self._lane_deal)
            try:
                self.recovery.reform(self.hand_state_over, admit=True)
            except LeftOut as left:
                self._leave(left)
            self._enter_generation()

    def _is_missed(self) -> bool:
        """Whether a worker is missing without whom no step can be made now."""
        if self._engine.statistics is not None:
            enough = self.generation.world.size >= self._state.steps.num_lanes
            self._had_company = self._had_company or enough
            return not enough and self._had_company
        return self._first_is_awaited and self._places.begins_turn

    def hand_state_over(self, decision: Decision, wire: Wire) -> None:
        """Collective. The wire of a new generation is open: newcomers are given the state as it is before its step."""
        assert self.recovery is not None
        me = self.recovery.endpoint.member.uid
        if not completes(self.recovery.membership.claim, decision.step) or me in decision.newcomers:
            self._engine.abandon()
        self._engine.settle(wire)
        source = decision.view.rank_of(decision.host.uid)
        given = [member.uid for member in decision.view.members if member.uid in decision.newcomers and member.fresh]
        if me in decision.newcomers and me not in given:
            self._refuse_old_state(decision)
        elif me in given:
            snapshot = receive_snapshot(wire.transport, source)
            self._handoff.take(snapshot, wire.world.rank)
            self._probation = Probation(frozenset(snapshot.state["on_probation"]))
        elif given:
            self._give_state(decision, wire, source, [decision.view.rank_of(uid) for uid in given])

    def _give_state(self, decision: Decision, wire: Wire, source: int, targets: list[int]) -> None:
        """See Note [Several senders] in state/transfer.py."""
        members = [decision.view.rank_of(one.uid) for one in decision.view.members if one.uid not in decision.newcomers]
        helpers = helpers_of(source, members)
        if wire.world.rank not in (source, *helpers):
            return
        state = self._handoff.state(self._batch, self._places.turn.number)
        if wire.world.rank == source:
            state.state["on_probation"] = sorted(self._probation.uids)
            send_snapshot(wire.transport, state, targets, helpers=helpers)
        else:
            help_to_send(wire.transport, state, source)

    def _refuse_old_state(self, decision: Decision) -> None:
        """A copy has the state of the worker that it was made from, as it was then."""
        if decision.step != self._step:
            raise LeftOut(f"a copy made before step {self._step} comes too late for step {decision.step}")

    def _enter_generation(self) -> None:
        """The generation that was decided and opened takes the place of the one before."""
        assert self.recovery is not None
        assert self.recovery.decision is not None
        self._put_on_probation(self.recovery.decision.newcomers)
        self._pace.forget()
        self.requests.clear()
        slots = tuple(member.slot for member in self.recovery.membership.view.members)
        assert self.recovery.decision.assignment is not None
        self.generation = Generation(self.recovery.wire, slots, self.recovery.decision.assignment)
        self.publish()

    def publish(self) -> None:
        """The launcher, and newcomers that ask, learn where this worker stands."""
        world, port = self.generation.world, 0
        if self.recovery is not None:
            port = self.recovery.endpoint.port
            self.recovery.publish()
        self._status.place(world.generation, world.rank, world.size, port, len(self.generation.lanes))

    def _leave(self, left: LeftOut) -> NoReturn:
        """Asked to, it is a good end; else this worker is lost to the others, and its launcher replaces it."""
        self.is_stopped = True
        self._events.note(str(left))
        raise SystemExit(self.signals.leave_code if self.signals.leave else LEFT_OUT) from left

    def _report(
        self,
        failure: Exception | None,
        committed: bool,
        before: Generation | None,
        took_s: float,
        *,
        in_update: bool = False,
    ) -> None:
        """Emits what is new: who was lost, who left, who came, and where lanes went."""
        assert self.recovery is not None
        assert self.recovery.decision is not None
        decision, now = self.recovery.decision, self.generation
        lost = [member.slot for member in decision.lost]
        carried = () if before is None else zip(before.slots, before.assignment.lanes_of, strict=True)
        moved = [lane for slot, lanes in carried if slot in lost for lane in lanes]
        carriers = now.assignment.carriers()
        self._events.emit(
            GenerationFormed,
            generation=decision.view.generation,
            slots=now.slots,
            lost=tuple(lost),
            left=tuple(member.slot for member in decision.left),
            joined=tuple(member.slot for member in decision.view.members if member.uid in decision.newcomers),
            moved_lanes=tuple(moved),
            moved_to=tuple(sorted({now.slots[carriers[lane]] for lane in moved})),
            committed=committed,
            cause=_cause(failure, () if before is None else before.slots, lost),
            took_s=took_s,
            in_update=in_update,
            step=self._step,
        )

    # -- lanes ----------------------------------------------------------------------------------------------

    def deal(self) -> None:
        """Lanes are dealt out anew, outside of a change of members: a checkpoint has another number of them."""
        if not self.is_member:  # a newcomer has no part in any deal before it is admitted, and no terms to publish
            return
        self._take_up(Assignment.dealt(self._state.steps.num_lanes, self.generation.slots, self._by_hand))
        self._pace.forget()

    def _take_up(self, assignment: Assignment) -> None:
        """The same members go on with other lanes."""
        self.generation = replace(self.generation, assignment=assignment)
        self.publish()

    def rebalance(self) -> None:
        """Lanes move away from a slow worker, or back, at the same step on all. See Note [Lanes follow the pace] in
        pace.py."""
        needs_all = self._engine.statistics is not None  # batch norm over all lanes needs a worker for each
        if not self._rebalances or needs_all or self._probation.uids or not self._places.begins_turn:
            return
        move = self._pace.move(self.generation.assignment)
        if move is not None:
            self._take_up(move.assignment)
            self._events.note(move.sentence(self.generation.slots, self._step))

    @property
    def _lane_deal(self) -> LaneDeal:
        return LaneDeal(self._state.steps.num_lanes, self._by_hand)


def _cause(failure: Exception | None, slots: tuple[int, ...], lost: list[int]) -> str:
    """What a worker noticed. It may have noticed one that left because of the loss: that one is not named."""
    if not isinstance(failure, WorkerLost):
        return "" if failure is None else str(failure)
    is_guilty = failure.rank < len(slots) and slots[failure.rank] in lost
    return f"during {failure.during}" + (f": {failure.cause}" if is_guilty else "")
