"""The guard around a step: workers come and go, and the step is committed once, with the same bits, or not at all.

# Note [When workers come and go]
# A lost worker is replaced at once by those who are left: they take its lanes. Every request (to join, to leave, to
# end) waits for the end of a step: a worker puts it into the step's record, so all learn of it in the same step, and
# act together before the next one begins. Workers join where a turn of the script begins.

# Note [Newcomers]
# A worker that is started later runs the user's script from the beginning, alone, up to where training begins. There
# it asks the members to be admitted, and is given all that the next step depends on: parameters, buffers, optimizers,
# tracked objects, gradients under way, generators, the positions of loaders and epochs, and where the script is. So it
# goes on in the middle of an epoch as though it had been there. See Note [Probation] in probation.py.
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
from lockstep.elastic.membership.events import AllPrepared, Prepared
from lockstep.elastic.newcomer import Handoff
from lockstep.elastic.opener import FORM_S
from lockstep.elastic.pace import LanePace
from lockstep.elastic.probation import Probation, misfits
from lockstep.elastic.recovery import LeftOut, MemberHangs, Recovery
from lockstep.elastic.requests import Requests, Signals
from lockstep.elastic.roster import RunIsOver
from lockstep.elastic.shown_waits import shown
from lockstep.errors import Disagreement, Misuse, WorkerLost, naming_lost_worker
from lockstep.events import Copied, Events, GenerationFormed, JoinBegan, RecoveryBegan, Wait
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.record import StepRecord, StepRequest
from lockstep.lanes import Assignment, present_lanes
from lockstep.launch.control import Control
from lockstep.launch.exits import LEFT_OUT, OutOfPlace
from lockstep.launch.status import NoStatus, StatusWriter, Trait
from lockstep.script.place import Places
from lockstep.state.run_state import RunState, load_models
from lockstep.state.transfer import receive_snapshot, send_snapshot
from lockstep.strategies.protocol import StepEngine
from lockstep.wire import Agreement, Proposal, Wire
from lockstep.wire.exchange import exchange_bytes
from lockstep.wire.generation import Generation

LOOK_S = 0.25
"""How often the coordinator looks whether somebody asks to join."""

COMPANY_S = 600.0
"""How long to wait for a replacement where the lanes of a step cannot be computed by fewer workers."""

MOST_IN_VAIN = 3
"""How often a step is computed again in a row without anybody having been lost: then its failure is no loss."""


@dataclass(frozen=True)
class Elasticity:
    """What lets workers come and go. `joins`: this worker is a newcomer, and no member yet.

    `control` is the launcher's way to ask for a copy of this worker; `store_port` that of the store where all met.
    """

    recovery: Recovery
    joins: bool = False
    control: Control | None = None
    store_port: int = 0


class Guard:
    """One worker's part in a run that goes on. Without `elasticity`, nothing can be recovered: a loss ends the run.

    `end` is called when all have agreed to end because of a signal; it does not return. `by_hand` are the lanes of each
    slot, if somebody has given them out. `rebalances`: lanes follow the workers' pace, see pace.py.
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
        end: Callable[[StepRequest], None],
        by_hand: tuple[tuple[int, ...], ...] | None = None,
        rebalances: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generation = generation
        """The present one: another value after every change of members or lanes."""
        self.signals = Signals()
        self.pid = os.getpid()
        """The process that takes part: no other one that it forks does."""
        self.is_stopped = False
        """Whether a signal has ended the run, or this worker's part in it."""
        self.is_member = elasticity is None or not elasticity.joins
        self.admits = True
        self.recovery = None if elasticity is None else elasticity.recovery
        self.first = FirstWorker(status, clock)
        self.looks_closely = False
        """Whether batch and state are compared as a whole in this step: somebody is new, or was until now."""
        self._state, self._places, self._engine, self._events, self._status = state, places, engine, events, status
        self._end, self._by_hand, self._clock = end, by_hand, clock
        self._rebalances, self._pace = rebalances and by_hand is None, LanePace()
        self.copier = self._copier(elasticity)
        self._requests = Requests()
        self._batch: GlobalBatch | None = None
        self._handoff = Handoff(state)
        self._probation = Probation()
        self._num_in_vain = 0
        self._looked_s = 0.0
        self._had_company = False

    def _copier(self, elasticity: Elasticity | None) -> Copier | None:
        """See Note [Replacement by a copy] in launch/control.py."""
        if elasticity is None or elasticity.control is None:
            return None
        recovery, port = elasticity.recovery, elasticity.store_port
        self._status.add_trait(Trait.MAY_BE_COPIED)
        return Copier(
            elasticity.control, os.getppid(), lambda: {port, *recovery.ports}, self._state.progress.loader_pids
        )

    @property
    def _step(self) -> int:
        return self._state.steps.step

    @property
    def rank(self) -> int:
        """This worker's number as its script sees it. See Note [Worker 0] in first_worker.py."""
        if not self.is_member:
            return self._own_slot
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
    def _own_slot(self) -> int:
        return 0 if self.recovery is None else self.recovery.endpoint.member.slot

    @property
    def _first_is_awaited(self) -> bool:
        return self.recovery is not None and self.first.is_awaited(self.generation.slots)

    @property
    def is_ending(self) -> bool:
        """Whether all have agreed to end before the next step because of a signal."""
        return self._requests.ends

    @property
    def requests(self) -> list[bool]:
        """What this worker asks of all in the step under way."""
        return list(self._requests.mine)

    def look_for_newcomers(self) -> None:
        """The next step looks whether somebody asks to join, however short ago it was looked."""
        self._looked_s = float("-inf")

    def is_given_up(self, slot: int) -> bool:
        """Whether nobody will come in this slot any more."""
        return self._status.is_given_up(slot)

    # -- around a step --------------------------------------------------------------------------------------

    def begin(self, batch: GlobalBatch) -> GlobalBatch:
        """Before a step: workers may come and go now. Gives the batch, for the lanes that this worker carries now.

        See Note [When workers come and go]. Collective if anything was agreed upon.
        """
        self._batch = batch
        self.admit()
        self._handoff.arrive()
        begins_turn = self._places.begins_turn
        for request in (StepRequest.INTERRUPT, StepRequest.TERMINATE):
            if request in self._requests and begins_turn:  # in the middle of one there was no moment to save at
                self.is_stopped = True
                self._end(request)
        if StepRequest.CHANGE in self._requests or (StepRequest.JOIN in self._requests and begins_turn):
            self._reform(admit=begins_turn)
        self._prove()
        self._rebalance()
        self._await_company()
        self._ask()
        return self._carried(batch)

    def _carried(self, batch: GlobalBatch) -> GlobalBatch:
        """The batch with the shares of the lanes that are carried here now, by whichever worker when it was loaded."""
        present = present_lanes(batch.num_samples, self.generation.assignment.num_lanes, batch.least)
        lanes = [lane for lane in self.generation.lanes if lane in present]
        return batch if lanes == sorted(batch.shares) else batch.for_lanes(lanes)

    def prepared(self) -> None:
        """This worker has done its part of the step, and is about to signal it."""
        if self.recovery is not None:
            self.recovery.record(Prepared())

    def committed(self, record: StepRecord) -> None:
        """All workers have prepared: the step counts."""
        if self.recovery is not None:
            self.recovery.record(AllPrepared())
        self._pace.take(record.times_s, self.generation.assignment)
        self._requests.agree(record.requests)
        self.first.is_needed |= record.requests[StepRequest.FIRST]
        self._committed()

    def refuse(self, text: str) -> NoReturn:
        """The script of this worker, which was put in the middle of a run, is not where it should be: raises."""
        if self._is_on_probation:
            raise OutOfPlace(f"this worker cannot join at step {self._step}: {text}")
        raise Misuse(text)

    def note(self, text: str) -> None:
        """The same, where it may be meant so."""
        self._events.note(text, one_worker=self._is_on_probation)

    def heal(self, drift: Drift) -> None:
        """Collective. Workers that have drifted are given the state of the first that has not; without a majority
        none can be."""
        told = drift.sentence(self._step, self.generation.slots).removeprefix("! ")
        if drift.healthy is None:
            raise Misuse(told)
        wire = self.generation.wire
        with naming_lost_worker(self._step, "healing a worker that has drifted"):
            if wire.world.rank == drift.healthy:
                send_snapshot(wire.transport, self._state.capture(), drift.guilty)
            elif wire.world.rank in drift.guilty:
                load_models(self._state.models, receive_snapshot(wire.transport, drift.healthy))
        self._events.note(told)

    def recover(self, failure: WorkerLost | Disagreement) -> bool:
        """Collective. Goes on with those who are left, or raises; whether the step is committed all the same."""
        if self.recovery is None:
            raise failure
        if isinstance(failure, Disagreement):
            self._send_misfits_away(failure)
        self.generation.wire.close()  # first: its thread may still write to buffers
        if not self.recovery.membership.prepared:
            self._engine.abandon()
        return self._reform(failure)

    def regroup(self, failure: WorkerLost | None = None) -> bool:
        """Collective, outside of steps. Goes on with those who are left, if it can be; whether it could.

        With a `failure` it raises that where it cannot be.
        """
        if self.recovery is None:
            if failure is not None:
                raise failure
            return False
        self.generation.wire.close()
        self._reform(failure, in_step=False)
        return True

    def exchange(self, content: bytes, operation: str) -> list[bytes]:
        """Collective, outside of steps. Every worker's bytes, by rank. After a WorkerLost this generation is over."""
        wire = shown(self.generation.wire, self._events, Wait.EXCHANGE)
        with naming_lost_worker(self._step, operation):
            Agreement(wire.transport, Proposal({"operation": operation, "step": self._step})).check()
            return exchange_bytes(wire.transport, content)

    def exclude(self, failure: Disagreement, during: str) -> WorkerLost:
        """Outside of steps: the first of the newcomers that disagree, as lost; raises if it is not for them to leave.

        On such a newcomer itself it ends the process.
        """
        if self.recovery is None:
            raise failure
        gone = self._send_misfits_away(failure)
        return WorkerLost(gone[0], self._step, during, str(failure))

    def batch_is_due(self) -> None:
        """A loader of the run is about to hand out a batch."""
        may_be_joined = StepRequest.JOIN in self._requests or self._engine.statistics is not None  # see _await_company
        self._handoff.body_begins(may_be_joined)

    def end(self) -> None:
        """All members have come to the end of the script, unless a signal has ended them: then the run may go on."""
        if self.recovery is not None and not self.is_ending:
            self.recovery.end()

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
            self.recovery.join(self._hand_state_over)
        except RunIsOver as over:
            self._events.note(str(over), one_worker=True)
            raise SystemExit(0) from over
        except LeftOut as left:
            self._leave(left)
        self.is_member = True
        self._had_company = True  # the run has: where it never had, no step was ever made
        self._enter_generation()
        self._report(None, False, None, self._clock() - began_s)

    @property
    def _is_on_probation(self) -> bool:
        return self.recovery is not None and self.recovery.endpoint.member.uid in self._probation.uids

    def _prove(self) -> None:
        """Newcomers that have agreed on a whole turn carry lanes from now on. See Note [Probation] in probation.py."""
        places = self._places
        if not self._probation.uids or not places.begins_turn:
            return
        if self._probation.is_over(places.turn.number, sum(places.updates.values())):
            self._probation = Probation()
            self.looks_closely = True
            self.deal()

    def _put_on_probation(self, newcomers: tuple[str, ...]) -> None:
        """Those of the new generation who have to show that they are at the same place, now and before."""
        assert self.recovery is not None
        members = self.recovery.membership.view.members
        spares = self._lane_deal.spares_newcomers
        new = {member.uid for member in members if member.uid in newcomers and member.fresh and spares}
        before = {member.uid for member in members if member.uid in self._probation.uids}
        places = self._places
        if new:
            self._probation = Probation(frozenset(before | new), places.turn.number, sum(places.updates.values()))
        else:
            self._probation = replace(self._probation, uids=frozenset(before))
        self.looks_closely = bool(newcomers)

    def _send_misfits_away(self, failure: Disagreement) -> list[int]:
        """Raises, unless the others can go on without those who disagree: gives the ranks of these.

        See Note [Misfits] in probation.py.
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

    # -- generations ----------------------------------------------------------------------------------------

    def _reform(self, failure: Exception | None = None, *, admit: bool = False, in_step: bool = True) -> bool:
        """Collective. Forms the next generation; whether the step under way is committed."""
        assert self.recovery is not None
        began_s, before = self._clock(), self.generation
        self._events.emit(RecoveryBegan, step=self._step)
        try:
            if self._becomes_copy():
                committed = isinstance(self.recovery.join(self._hand_state_over), Commit)
            else:
                self.recovery.deal_by(self._lane_deal, is_proving=self._is_on_probation)
                limit_s = self._patience_s(failure)
                outcome = self.recovery.reform(self._hand_state_over, admit=admit, limit_s=limit_s)
                committed = isinstance(outcome, Commit)
        except LeftOut as left:
            self._leave(left)
        except MemberHangs as hang:
            raise self._hung(hang, failure) from hang
        self._enter_generation()
        if self.copier is not None:
            self.copier.settle(self.generation.slots)
        self._report(failure, committed, before, self._clock() - began_s, in_update=failure is not None and not in_step)
        if self.is_first and (note := self.first.succession(self.generation.slots, self._own_slot)) is not None:
            self._events.note(note)
        if committed:
            self._committed()
        elif failure is not None:
            self._refuse_vain_attempts(failure)
            if in_step:  # elsewhere nobody can be admitted
                self._await_company()
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

    def _refuse_vain_attempts(self, failure: Exception) -> None:
        """A failure that comes again although nobody is missing is no loss: it would come for ever."""
        assert self.recovery is not None
        assert self.recovery.decision is not None
        decision = self.recovery.decision
        self._num_in_vain = 0 if decision.lost or decision.left else self._num_in_vain + 1
        if self._num_in_vain >= MOST_IN_VAIN:
            raise failure

    def _await_company(self) -> None:
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
            self.recovery.deal_by(self._lane_deal, is_proving=self._is_on_probation)
            try:
                self.recovery.reform(self._hand_state_over, admit=True)
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

    def _hand_state_over(self, decision: Decision, wire: Wire) -> None:
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
        elif me == decision.host.uid and given:
            state = self._handoff.state(self._batch, self._places.turn.number)
            state.state["on_probation"] = sorted(self._probation.uids)
            send_snapshot(wire.transport, state, [decision.view.rank_of(uid) for uid in given])

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
        self._requests.clear()
        slots = tuple(member.slot for member in self.recovery.membership.view.members)
        assert self.recovery.decision.assignment is not None
        self.generation = Generation(self.recovery.wire, slots, self.recovery.decision.assignment)
        self.publish()

    def deal(self) -> None:
        """Outside of a change of members: lanes are dealt out anew to those who are here and not on probation.

        Every member does so at the same step: a probation is over, or a checkpoint has another number of lanes.
        """
        if not self.is_member:  # a newcomer has no part in any deal before it is admitted, and no terms to publish
            return
        if self.recovery is None:
            assignment = Assignment.dealt(self._state.steps.num_lanes, self.generation.slots, (), self._by_hand)
        else:
            assignment = self._lane_deal.assignment(self.recovery.membership.view.members, self._probation.uids)
        self._take_up(assignment)
        self._pace.forget()

    def _take_up(self, assignment: Assignment) -> None:
        self.generation = replace(self.generation, assignment=assignment)
        self.publish()

    def _rebalance(self) -> None:
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
        may_be_idle = self._engine.statistics is None  # batch norm over all lanes needs a worker for each
        return LaneDeal(self._state.steps.num_lanes, self._by_hand, spares_newcomers=may_be_idle)

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

    def _committed(self) -> None:
        self.looks_closely = False
        self._num_in_vain = 0

    def _ask(self) -> None:
        """What this worker wants of all, for the record of the step that begins."""
        if news := self.signals.take_news():
            self._events.note(news, one_worker=self.signals.leave)
        if self.signals.leave and self.recovery is None:
            self.signals.leave, self.signals.terminate = False, True
        if self.signals.leave and self.recovery is not None:
            self.recovery.leave()
        is_to_be_copied = self.copier is not None and self.copier.is_asked()
        self._requests.ask(
            self.signals, change=is_to_be_copied, join=self._somebody_asks_to_join(), first=self.first.is_needed
        )

    def _somebody_asks_to_join(self) -> bool:
        now_s = self._clock()
        hosts = self.recovery is not None and self.recovery.is_coordinator and self.admits
        if self.recovery is None or not hosts or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        self.recovery.refuse_superseded()
        return self.recovery.has_claims()

    def _report(
        self,
        failure: Exception | None,
        committed: bool,
        before: Generation | None,
        took_s: float,
        *,
        in_update: bool = False,
    ) -> None:
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


def _cause(failure: Exception | None, slots: tuple[int, ...], lost: list[int]) -> str:
    """What a worker noticed. It may have noticed one that left because of the loss: that one is not named."""
    if not isinstance(failure, WorkerLost):
        return "" if failure is None else str(failure)
    is_guilty = failure.rank < len(slots) and slots[failure.rank] in lost
    return f"during {failure.during}" + (f": {failure.cause}" if is_guilty else "")
