"""Keeps a run going while workers come and go: what `Stepping` asks of its surroundings, answered by the membership.

# Note [When workers come and go]
# A lost worker is replaced at once by those who are left: they take its lanes. Everything that is requested (to
# join, to leave, to end) waits for the end of a step: a worker tells its requests in the step's record, so all learn of
# them in the same step, and do it together before the next one begins. Workers join where a turn of the script begins.

# Note [Newcomers]
# A worker that is started later runs the user's script from the beginning, alone, up to where training begins. There
# it asks the members to be admitted, and is given all that the next step depends on: parameters, buffers, optimizers,
# tracked objects, gradients under way, generators, the positions of loaders and epochs, and where the script is. So it
# goes on in the middle of an epoch as though it had been there. See Note [Probation] in probation.py.

# Note [Worker 0]
# Many scripts give rank 0 something to hold when they begin (`writer = SummaryWriter() if run.rank == 0 else None`) and
# use it later under the same condition. A worker that became rank 0 in the middle would have none. So where a script
# asks for its rank before it trains, and worker 0 is lost, nobody is rank 0 until its replacement is there, which has
# run the script from the top as rank 0; the others wait for it where the next turn begins. Where nobody can come
# in its place, the first of those who are left is rank 0, and says what it may lack.
"""

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from lockstep.data import GlobalBatch
from lockstep.elastic.copies.copier import Copier
from lockstep.elastic.membership import Decision
from lockstep.elastic.membership.decision import completes
from lockstep.elastic.membership.machine import AllPrepared, Commit, Prepared
from lockstep.elastic.newcomer import Arrival
from lockstep.elastic.opener import FORM_S
from lockstep.elastic.pace import Pace
from lockstep.elastic.probation import Probation, misfits
from lockstep.elastic.recovery import Hangs, LeftOut, Recovery
from lockstep.elastic.waits import Waits
from lockstep.errors import Disagreement, Misuse, WorkerLost, told_as_lost
from lockstep.events import Copied, Events, GenerationFormed, Said
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.record import StepRecord, StepRequest
from lockstep.lanes import Assignment, present_lanes
from lockstep.launch.control import Control
from lockstep.launch.exits import LEFT_OUT, OutOfPlace
from lockstep.launch.status import Call, NoStatus, Phase, StatusWriter, Trait
from lockstep.state.run_state import Parts, load_models
from lockstep.state.transfer import receive_snapshot, send_snapshot
from lockstep.strategies.replicated import Engine
from lockstep.wire import Wire

LOOK_S = 0.25
"""How often the worker with the lowest slot looks whether somebody is at its door."""

COMPANY_S = 600.0
"""How long to wait for a replacement where the lanes of a step cannot be computed by fewer workers."""

MOST_IN_VAIN = 3
"""How often a step is computed again in a row without anybody having been lost: then its failure is no loss."""


@dataclass
class Signals:
    """What was asked of this worker from outside; set by signal handlers."""

    interrupt: bool = False
    terminate: bool = False
    leave: bool = False


class Continuity:
    """One worker's part in a run that goes on. `recovery` is None where nothing can be recovered.

    `end` is called when all have agreed to end because of a signal; it does not return. `by_hand` are the lanes of each
    slot, if somebody has given them out.
    """

    def __init__(
        self,
        parts: Parts,
        wire: Wire,
        events: Events,
        signals: Signals,
        status: StatusWriter | NoStatus,
        end: Callable[[StepRequest], None],
        by_hand: tuple[tuple[int, ...], ...] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recovery: Recovery | None = None
        self.copier: Copier | None = None
        self.pid = os.getpid()
        """The process that takes part: no other one that it forks does."""
        self.engine: Engine | None = None
        self.is_member = True
        self.admits = True
        self.needs_first = False
        """Whether the script may have given worker 0 things that no other has. See Note [Worker 0]."""
        self.charter: dict[str, Any] = {}
        """What newcomers must know before they can ask to be admitted; set by whoever starts the run."""
        self._parts, self._wire, self._events, self._signals, self._status = parts, wire, events, signals, status
        self._end, self._by_hand, self._clock = end, by_hand, clock
        self._pace = Pace()
        self._agreed = [False] * len(StepRequest)
        self._batch: GlobalBatch | None = None
        self._arrival = Arrival(parts)
        self._probation: Probation | None = None
        self._looks_closely = False
        self._num_in_vain = 0
        self._looked_s = 0.0
        self._had_company = False
        self._awaits_until_s = float("inf")
        self._told_of_rank_0 = False

    def may_be_copied(self, control: Control, ports: Callable[[], Collection[int]]) -> Copier:
        """The launcher may ask for copies of this worker by `control`. `ports` are those of lockstep's own sockets."""
        self.copier = Copier(control, os.getppid(), ports, self._parts.progress.loader_pids)
        self._status.is_known_as(Trait.MAY_BE_COPIED)
        return self.copier

    @property
    def _step(self) -> int:
        step: int = self._parts.stepping.step
        return step

    @property
    def slots(self) -> list[int]:
        """The slot of each rank."""
        if self.recovery is None or not self.is_member:
            return list(range(self._wire.world.size))
        return [member.slot for member in self.recovery.membership.view.members]

    @property
    def rank(self) -> int:
        """This worker's number as its script sees it. See Note [Worker 0]."""
        if not self.is_member:
            return self._own_slot
        return self._wire.world.rank + self._first_is_awaited

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those present; no newcomer is before it has come to its first step."""
        return self.is_member and self._wire.world.rank == 0 and not self._arrival.is_on_its_way

    @property
    def _own_slot(self) -> int:
        return 0 if self.recovery is None else self.recovery.door.member.slot

    @property
    def _first_is_awaited(self) -> bool:
        """Whether worker 0 is missing, and somebody may come in its place that the script needs."""
        may_come = self.recovery is not None and self.needs_first and not self._status.is_given_up(0)
        return may_come and 0 not in self.slots and self._clock() < self._awaits_until_s

    def _tell_of_rank_0(self) -> None:
        """See Note [Worker 0]."""
        is_new = self.needs_first and 0 not in self.slots and not self._first_is_awaited and self.is_first
        if is_new and not self._told_of_rank_0:
            self._told_of_rank_0 = True
            self._events.emit(
                Said(
                    f"worker {self._own_slot} is rank 0 from now on: worker 0 is lost, and nobody takes its place. "
                    "What the script made on rank 0 before it trained (a writer, a file) is not here: make such things "
                    "where they are used."
                )
            )

    def look_at_door(self) -> None:
        """The next step looks whether somebody is at the door, however short ago it was looked."""
        self._looked_s = float("-inf")

    def is_given_up(self, slot: int) -> bool:
        """Whether nobody will come in this slot any more."""
        return self._status.is_given_up(slot)

    @property
    def is_ending(self) -> bool:
        """Whether all have agreed to end before the next step because of a signal."""
        return self._agreed[StepRequest.INTERRUPT] or self._agreed[StepRequest.TERMINATE]

    # -- as a step's surroundings ---------------------------------------------------------------------------

    def begins(self, batch: GlobalBatch) -> GlobalBatch:
        """See Note [When workers come and go]. Collective if anything was agreed upon."""
        self._batch = batch
        self.admit()
        self._arrival.arrive()
        begins_turn = self._parts.stepping.places.begins_turn
        for request in (StepRequest.INTERRUPT, StepRequest.TERMINATE):
            if self._agreed[request] and begins_turn:  # in the middle of one there was no moment to save at
                self._end(request)
        if self._agreed[StepRequest.CHANGE] or (self._agreed[StepRequest.JOIN] and begins_turn):
            self._reform(admit=begins_turn)
        self._prove()
        self._await_company()
        self._request()
        self._pace.begins(self._clock())
        return self._carried(batch)

    def _carried(self, batch: GlobalBatch) -> GlobalBatch:
        """The batch with the shares of the lanes that are carried here now, whoever carried them when it was loaded."""
        stepping = self._parts.stepping
        present = present_lanes(batch.num_samples, stepping.assignment.num_lanes, batch.least)
        lanes = [lane for lane in stepping.lanes if lane in present]
        return batch if lanes == sorted(batch.shares) else batch.for_lanes(lanes)

    @property
    def looks_closely(self) -> bool:
        """Whether batch and state must be compared as a whole in this step: somebody is new, or was until now."""
        return self._looks_closely

    def computes(self) -> None:
        self._status.enter(Phase.COMPUTING, self._step)

    def waits(self) -> None:
        self._status.enter(Phase.REDUCING, self._step)

    def awaits(self, bucket: int, num_buckets: int) -> None:
        """A bucket's sum is awaited."""
        self._status.enter(Phase.REDUCING, self._step, bucket, num_buckets)

    def prepares(self) -> None:
        if self.recovery is not None:
            self.recovery.tell(Prepared())

    def commits(self, record: StepRecord) -> None:
        if self.recovery is not None:
            self.recovery.tell(AllPrepared())
        waiting = self._agreed[StepRequest.JOIN]
        self._agreed = list(record.requests)
        self._agreed[StepRequest.JOIN] |= waiting  # until a turn begins
        self.needs_first |= record.requests[StepRequest.FIRST]
        self._committed()

    def refuses(self, text: str) -> NoReturn:
        if self._is_on_probation:
            raise OutOfPlace(f"this worker cannot join at step {self._step}: {text}")
        raise Misuse(text)

    def notes(self, text: str) -> None:
        self._events.emit(Said(text, of_one=self._is_on_probation))

    def exchanges(self, exchange: Callable[[Wire], None], during: str) -> None:
        with told_as_lost(self._step, during):
            exchange(self._wire)

    def heals(self, drift: Drift) -> None:
        """Those who have drifted are given the state of the first that has not; without a majority nobody can be."""
        told = drift.sentence(self._step, self.slots)
        if drift.healthy is None:
            raise Misuse(told.removeprefix("! "))
        rank = self._wire.world.rank
        with told_as_lost(self._step, "healing a worker that has drifted"):
            if rank == drift.healthy:
                send_snapshot(self._wire.transport, self._parts.capture(), drift.guilty)
            elif rank in drift.guilty:
                load_models(self._parts.models, receive_snapshot(self._wire.transport, drift.healthy))
        self._events.emit(Said(told.removeprefix("! ")))

    def recovers(self, failure: WorkerLost | Disagreement) -> bool:
        if self.recovery is None:
            raise failure
        if isinstance(failure, Disagreement):
            self._send_misfits_away(failure)
        self._wire.close()  # first: its thread may still write to buffers
        if not self.recovery.membership.prepared:
            self._abandon()
        return self._reform(failure)

    def regroups(self) -> bool:
        """Collective, outside of steps. Goes on with those who are left, if it can be; whether it could."""
        if self.recovery is None:
            return False
        self._wire.close()
        self._reform()
        return True

    def parts(self, failure: Disagreement, during: str) -> WorkerLost:
        """Outside of steps: the first of the newcomers that disagree, as lost; raises if it is not for them to leave.

        On such a newcomer itself it ends the process.
        """
        if self.recovery is None:
            raise failure
        gone = self._send_misfits_away(failure)
        return WorkerLost(gone[0], self._step, during, str(failure))

    # -- newcomers ------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """A newcomer becomes a member, if it is none yet. See Note [Newcomers]."""
        if self.is_member:
            return
        assert self.recovery is not None
        self._status.enter(Phase.JOINING, self._step)
        began_s = self._clock()
        self.recovery.join()
        self.is_member = True
        self._had_company = True  # the run has: where it never had, no step was ever made
        self._settle()
        self._tell(None, False, (), self._clock() - began_s)

    @property
    def _is_on_probation(self) -> bool:
        me = None if self.recovery is None else self.recovery.door.member.uid
        return self._probation is not None and me in self._probation.uids

    def _prove(self) -> None:
        """Newcomers that have agreed on a whole turn carry lanes from now on. See Note [Probation] in probation.py."""
        places = self._parts.stepping.places
        if self._probation is None or not places.begins_turn:
            return
        if self._probation.is_over(places.turn.number, sum(places.updates.values())):
            self._probation = None
            self._looks_closely = True
            self._deal()
            self.place()

    def _put_on_probation(self, newcomers: tuple[str, ...]) -> None:
        """Those of the new generation who have to show that they are at the same place, now and before."""
        assert self.recovery is not None
        members = self.recovery.membership.view.members
        may_be_idle = self._parts.stepping.statistics is None  # batch norm over all lanes needs a worker for each
        new = {member.uid for member in members if member.uid in newcomers and member.fresh and may_be_idle}
        before = set() if self._probation is None else {m.uid for m in members if m.uid in self._probation.uids}
        places = self._parts.stepping.places
        if new:
            self._probation = Probation(frozenset(before | new), places.turn.number, sum(places.updates.values()))
        elif self._probation is not None:
            self._probation = Probation(frozenset(before), self._probation.turn, self._probation.updates)
        self._looks_closely = bool(newcomers)

    def _send_misfits_away(self, failure: Disagreement) -> list[int]:
        """Raises, unless the others can go on without those who disagree: gives the ranks of these.

        See Note [Misfits] in probation.py.
        """
        assert self.recovery is not None
        members = self.recovery.membership.view.members
        leaving = misfits(failure.sides, members)
        if leaving is None:
            raise failure
        if self._wire.world.rank in leaving:
            self._wire.close()
            raise OutOfPlace(f"this worker leaves at step {self._step}: {failure}") from failure
        workers = ", ".join(str(members[rank].slot) for rank in leaving)
        self._events.emit(Said(f"worker {workers} cannot take part: {failure} The others go on without it."))
        return leaving

    # -- generations ----------------------------------------------------------------------------------------

    def _reform(self, failure: Exception | None = None, *, admit: bool = False) -> bool:
        """Collective. Forms the next generation; whether the step under way is committed."""
        assert self.recovery is not None
        began_s, carried = self._clock(), tuple(zip(self.slots, self._parts.stepping.assignment.lanes_of, strict=True))
        self._status.enter(Phase.RECOVERING, self._step)
        try:
            is_copy = self._becomes_copy()
            limit_s = self._patience_s(failure)
            outcome = self.recovery.join() if is_copy else self.recovery.reform(admit=admit, limit_s=limit_s)
        except LeftOut as left:
            self._leave(left)
        except Hangs as hang:
            raise self._hung(hang, failure) from hang
        committed = isinstance(outcome, Commit)
        self._settle()
        if self.copier is not None:
            self.copier.settle(self.slots)
        self._tell(failure, committed, carried, self._clock() - began_s)
        self._tell_of_rank_0()
        if committed:
            self._committed()
        elif failure is not None:
            self._refuse_vain_attempts(failure)
            self._await_company()
        return committed

    def _hung(self, hang: Hangs, failure: Exception | None) -> WorkerLost:
        """Who keeps all waiting: whoever gathers them knows, the others know of whom they have heard nothing."""
        if isinstance(failure, WorkerLost) and not hang.slots:
            return failure
        rank = self.slots.index(hang.slots[0]) if hang.slots else 0
        return WorkerLost(rank, self._step, "the forming of the next generation", str(hang))

    def _patience_s(self, failure: Exception | None) -> float:
        """How long one that lives is waited for: for as long as in an exchange, unless that was in vain already."""
        assert self.recovery is not None
        timeout_s = self.recovery.opener.settings.timeout_s
        was_waited_for = isinstance(failure, WorkerLost) and failure.is_silent
        return min(timeout_s, FORM_S) if was_waited_for else timeout_s

    def _becomes_copy(self) -> bool:
        """Makes a copy of this worker if that is asked for; whether this process is the copy.

        Where this worker has done its part of a step, the others may count that step: nobody is copied then.
        """
        assert self.recovery is not None
        if self.copier is None or not self.copier.is_asked() or self.recovery.membership.prepared:
            return False
        self._wire.close()
        slot = self.copier.copy()
        if slot is None:
            return False
        if self.engine is not None:
            self.engine.keep_gradients()
        self._signals.leave = False
        self._status.move_to(slot)
        self._status.enter(Phase.JOINING, self._step)
        self.pid = os.getpid()
        self._parts.progress.is_copied()
        self._events.emit(Copied(slot))
        self.recovery.begin_anew(slot, self.copier.has_called)
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
        """Waits until there are enough workers again, if any can come. See Note [Worker 0].

        Batch norm over all lanes needs a worker for each.
        """
        until_s = self._clock() + COMPANY_S
        while self.recovery is not None and self._is_missed():
            if isinstance(self._status, NoStatus) or self._clock() > until_s:
                self._awaits_until_s = self._clock()
                return
            if self.recovery.hosts:
                self.recovery.door.await_call(1.0)
                self.recovery.hears()  # one that is alone decides at once, and admits only those it has heard of
            self.recovery.reform(admit=True)
            self._settle()

    def _is_missed(self) -> bool:
        """Whether a worker is missing without whom no step can be made now."""
        stepping = self._parts.stepping
        if stepping.statistics is not None:
            enough = self._wire.world.size >= stepping.assignment.num_lanes
            self._had_company = self._had_company or enough
            return not enough and self._had_company
        return self._first_is_awaited and stepping.places.begins_turn

    def hand_over(self, decision: Decision, wire: Wire) -> None:
        """Collective. The wire of a new generation is open: newcomers are given the state as it is before its step."""
        assert self.recovery is not None
        me = self.recovery.door.member.uid
        if not completes(self.recovery.membership.claim, decision.step) or me in decision.newcomers:
            self._abandon()
        source = decision.view.rank_of(decision.host.uid)
        given = [member.uid for member in decision.view.members if member.uid in decision.newcomers and member.fresh]
        if me in decision.newcomers and me not in given:
            self._refuse_old_state(decision)
        elif me in given:
            snapshot = receive_snapshot(wire.transport, source)
            self._arrival.take(snapshot, self._wire.world.size)
            on_probation = frozenset(snapshot.state["on_probation"])
            self._probation = Probation(on_probation, 0, 0) if on_probation else None
        elif me == decision.host.uid and given:
            state = self._arrival.state(self._batch)
            state.state["on_probation"] = sorted(self._probation.uids) if self._probation is not None else []
            send_snapshot(wire.transport, state, [decision.view.rank_of(uid) for uid in given])

    def _refuse_old_state(self, decision: Decision) -> None:
        """A copy has the state of the worker that it was made from, as it was then."""
        if decision.step != self._step:
            raise LeftOut(f"a copy made before step {self._step} comes too late for step {decision.step}")

    def _settle(self) -> None:
        """Everything that knows of the other workers knows of the new ones."""
        assert self.recovery is not None
        assert self.recovery.decision is not None
        self._put_on_probation(self.recovery.decision.newcomers)
        self._agreed = [False] * len(StepRequest)
        stepping = self._parts.stepping
        stepping.rank = self._wire.world.rank
        self._deal()
        if stepping.statistics is not None:
            stepping.statistics.transport = Waits(self._wire, self._status).at(Call.STATISTICS).transport
        if self.engine is not None:
            self.engine.rewire()
        self.place()

    def _deal(self) -> None:
        """The lanes are dealt out to those who are here and not on probation."""
        assert self.recovery is not None
        members = self.recovery.membership.view.members
        waiting = frozenset() if self._probation is None else self._probation.uids
        idle = {member.slot for member in members if member.uid in waiting}
        num_lanes = self._parts.stepping.assignment.num_lanes
        self._parts.stepping.assignment = Assignment.dealt(num_lanes, self.slots, idle, self._by_hand)

    def place(self) -> None:
        """Tells the launcher, and newcomers at the door, where this worker stands."""
        world, door = self._wire.world, 0
        if self.recovery is not None:
            door = self.recovery.door.port
            view = self.recovery.membership.view
            self.recovery.door.tell(self.charter | {"members": [vars(member) for member in view.members]})
        num_lanes = len(self._parts.stepping.lanes)
        self._status.place(world.generation, world.rank, world.size, door, num_lanes)

    def _leave(self, left: LeftOut) -> None:
        """Asked to, it is a good end; else this worker is lost to the others, and its launcher replaces it."""
        self._events.emit(Said(str(left)))
        raise SystemExit(0 if self._signals.leave else LEFT_OUT) from left

    def loader_asks(self) -> None:
        """A loader of the run is about to hand out a batch."""
        may_be_joined = (
            self._agreed[StepRequest.JOIN] or self._parts.stepping.statistics is not None
        )  # see _await_company
        self._arrival.body_begins(may_be_joined)

    # -- small things ---------------------------------------------------------------------------------------

    def _abandon(self) -> None:
        if self.engine is not None:
            self.engine.abandon()

    def _committed(self) -> None:
        self._looks_closely = False
        self._num_in_vain = 0
        self._pace.ends(self._clock())
        data_ns = sum(loader.waited_ns for loader in self._parts.progress.loaders.values())
        self._status.committed(self._step, self._pace.usual_ns, data_ns)
        self._status.enter(Phase.OUTSIDE, self._step + 1)

    def _request(self) -> None:
        """What this worker wants of all, for the record of the step that begins."""
        assert self.engine is not None
        if self._signals.leave and self.recovery is not None:
            self.recovery.leave()
        requests = [False] * len(StepRequest)
        is_to_be_copied = self.copier is not None and self.copier.is_asked()
        requests[StepRequest.CHANGE], requests[StepRequest.JOIN] = (
            self._signals.leave or is_to_be_copied,
            self._is_called(),
        )
        requests[StepRequest.INTERRUPT], requests[StepRequest.TERMINATE] = (
            self._signals.interrupt,
            self._signals.terminate,
        )
        requests[StepRequest.FIRST] = self.needs_first
        self.engine.requests = requests

    def _is_called(self) -> bool:
        now_s = self._clock()
        hosts = self.recovery is not None and self.recovery.hosts and self.admits
        if self.recovery is None or not hosts or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return self.recovery.hears()

    def _tell(
        self,
        failure: Exception | None,
        committed: bool,
        carried: tuple[tuple[int, tuple[int, ...]], ...],
        took_s: float,
    ) -> None:
        """`carried` are the lanes of each slot before."""
        assert self.recovery is not None
        assert self.recovery.decision is not None
        decision = self.recovery.decision
        lost = [member.slot for member in decision.lost]
        moved = [lane for slot, lanes in carried if slot in lost for lane in lanes]
        carriers = self._parts.stepping.assignment.carriers()
        self._events.emit(
            GenerationFormed(
                step=self._step,
                generation=decision.view.generation,
                slots=tuple(self.slots),
                lost=tuple(lost),
                left=tuple(member.slot for member in decision.left),
                joined=tuple(member.slot for member in decision.view.members if member.uid in decision.newcomers),
                moved_lanes=tuple(moved),
                moved_to=tuple(sorted({self.slots[carriers[lane]] for lane in moved})),
                committed=committed,
                cause=_cause(failure, [slot for slot, _ in carried], lost),
                took_s=took_s,
            )
        )


def _cause(failure: Exception | None, slots: list[int], lost: list[int]) -> str:
    """What a worker noticed. It may have noticed one that left because of the loss: that one is not named."""
    if not isinstance(failure, WorkerLost):
        return "" if failure is None else str(failure)
    is_guilty = failure.rank < len(slots) and slots[failure.rank] in lost
    return f"during {failure.during}" + (f": {failure.cause}" if is_guilty else "")
