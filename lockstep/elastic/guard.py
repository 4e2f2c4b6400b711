"""The guard around a step: workers come and go, and the step is committed once, with the same bits, or not at all.

# Note [When workers come and go]
# A lost worker is replaced at once by those who are left: they take its lanes. Every request (to join, to leave, to
# end) waits for the end of a step: a worker puts it into the step's record, so all learn of it in the same step, and
# act together before the next one begins. Workers join where a turn of the script begins.
"""

import math
import time
from collections.abc import Callable
from typing import NoReturn

from lockstep.data import GlobalBatch
from lockstep.elastic.formation import Formation
from lockstep.elastic.membership.events import AllPrepared, Prepared
from lockstep.elastic.pace import longest_s
from lockstep.elastic.recovery import Recovery
from lockstep.elastic.requests import Signals
from lockstep.elastic.shown_waits import shown
from lockstep.errors import Disagreement, LockstepError, Misuse, WorkerLost, naming_lost_worker
from lockstep.events import Events, Wait
from lockstep.gradients.fingerprint import Drift
from lockstep.gradients.record import StepRecord, StepRequest
from lockstep.lanes import present_lanes
from lockstep.launch.channels.exits import TERMINATED, OutOfPlace
from lockstep.script.places import Places
from lockstep.state.run_state import RunState, load_models
from lockstep.state.transfer import receive_snapshot, send_snapshot
from lockstep.strategies.protocol import StepEngine
from lockstep.wire import Agreement, Proposal
from lockstep.wire.exchange import exchange_bytes
from lockstep.wire.generation import Generation

LOOK_S = 0.25
"""How often the coordinator looks whether somebody asks to join."""

SHORT_S = 0.5
"""A run that is ended by a signal computes one more step if the last one took no longer."""

MOST_IN_VAIN = 3
"""How often a step is computed again in a row without anybody having been lost: then its failure is no loss."""


class Guard:
    """One worker's part in the steps of a run that goes on while workers come and go; `formation` brings them together.

    `close` closes the run: it is called when all have agreed to end because of a signal.
    """

    def __init__(
        self,
        formation: Formation,
        state: RunState,
        places: Places,
        engine: StepEngine,
        events: Events,
        close: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.formation = formation
        self._state, self._places, self._engine, self._events = state, places, engine, events
        self._close, self._clock = close, clock
        self.admits = True
        self._num_in_vain = 0
        self._looked_s = 0.0
        self._step_s = math.inf
        self._last_step: int | None = None
        """The number of the step with whose update the run ends."""

    @property
    def _step(self) -> int:
        return self._state.steps.step

    @property
    def generation(self) -> Generation:
        """The present one: another value after every change of members or lanes."""
        return self.formation.generation

    @property
    def recovery(self) -> Recovery | None:
        """None where nothing can be recovered: a loss ends the run."""
        return self.formation.recovery

    @property
    def is_member(self) -> bool:
        """Whether this worker takes part: a newcomer does not yet."""
        return self.formation.is_member

    @property
    def looks_closely(self) -> bool:
        """Whether batch and state are compared as a whole in this step: somebody is new, or was until now."""
        return self.formation.looks_closely

    @property
    def newcomers(self) -> list[int]:
        """The ranks of those who must show in this step that they compute what the others compute."""
        return self.formation.newcomers

    @property
    def signals(self) -> Signals:
        """What was asked of this worker from outside."""
        return self.formation.signals

    @property
    def is_ending(self) -> bool:
        """Whether all have agreed to end before the next step because of a signal."""
        return self.formation.requests.ends

    @property
    def has_computed_last(self) -> bool:
        """Whether a run that ends has computed its last step: it was saved before that, and is not saved again."""
        return self._last_step is not None and self._step > self._last_step

    def compute_one_more(self) -> None:
        """The run is being saved, and ends: with the update of the next step, if steps are short.

        Called at one place on all workers. See Note [Trail] in state/checkpoints/trail.py.
        """
        self._last_step = self._step if self._step_s <= SHORT_S else None

    @property
    def requests(self) -> list[bool]:
        """What this worker asks of all in the step under way."""
        return list(self.formation.requests.mine)

    def look_for_newcomers(self) -> None:
        """The next step looks whether somebody asks to join, however short ago it was looked."""
        self._looked_s = float("-inf")

    # -- around a step --------------------------------------------------------------------------------------

    def begin(self, batch: GlobalBatch) -> GlobalBatch:
        """Before a step: workers may come and go now. Gives the batch, for the lanes that this worker carries now.

        See Note [When workers come and go]. Collective if anything was agreed upon.
        """
        self.formation.begin(batch)
        agreed, begins_turn = self.formation.requests, self._places.begins_turn
        if agreed.ends and begins_turn and self._step != self._last_step:
            self._end()  # in the middle of a turn there was no moment to save at
        if StepRequest.CHANGE in agreed or (StepRequest.JOIN in agreed and begins_turn):
            self._reform(admit=begins_turn)
        self.formation.prove()
        self.formation.rebalance()
        self.formation.await_company()
        self._ask()
        return self.for_own_lanes(batch)

    def end_after_update(self) -> None:
        """An update is made. Ends the process if it was the one with which the run ends."""
        if self.is_ending and self.has_computed_last:
            self._end()

    def _end(self) -> NoReturn:
        """All workers have agreed to end here because of a signal."""
        self.formation.is_stopped = True
        self._close()
        if StepRequest.INTERRUPT in self.formation.requests:
            raise KeyboardInterrupt
        raise SystemExit(TERMINATED)

    def for_own_lanes(self, batch: GlobalBatch) -> GlobalBatch:
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
        self.formation.requests.agree(record.requests)
        self._step_s = longest_s(record.times_s, self.generation.assignment)
        self._count(record)

    def refuse(self, text: str) -> NoReturn:
        """The script of this worker, which was put in the middle of a run, is not where it should be: raises."""
        if self.formation.is_on_probation:
            raise OutOfPlace(f"this worker cannot join at step {self._step}: {text}")
        raise Misuse(text)

    def note(self, text: str, *, may_join: bool = True) -> None:
        """The same, where it may be meant so. With `may_join=False`, a worker that joins is refused all the same."""
        if not may_join and self.formation.is_on_probation:
            self.refuse(text)
        self._events.note(text, one_worker=self.formation.is_on_probation)

    def heal(self, drift: Drift) -> None:
        """Collective. Workers that have drifted are given the state of the first that has not; without a majority
        none can be."""
        sentence = drift.sentence(self._step, self.generation.slots).removeprefix("! ")
        if drift.healthy is None:
            raise Misuse(sentence)
        wire = self.generation.wire
        with naming_lost_worker(self._step, "healing a worker that has drifted"):
            if wire.world.rank == drift.healthy:
                send_snapshot(wire.transport, self._state.capture(), drift.guilty)
            elif wire.world.rank in drift.guilty:
                load_models(self._state.models, receive_snapshot(wire.transport, drift.healthy))
        self._events.note(sentence)

    # -- after a failure ------------------------------------------------------------------------------------

    def recover(self, failure: WorkerLost | Disagreement) -> bool:
        """Collective. Goes on with those who are left, or raises; whether the step is committed all the same."""
        if self.recovery is None:
            raise failure
        if isinstance(failure, Disagreement):
            self.formation.send_misfits_away(failure)
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
        gone = self.formation.send_misfits_away(failure)
        return WorkerLost(gone[0], self._step, during, str(failure))

    def _reform(self, failure: Exception | None = None, *, admit: bool = False, in_step: bool = True) -> bool:
        """Collective. Forms the next generation; whether the step under way is committed."""
        self._last_step = None
        committed = self.formation.reform(failure, admit=admit, in_step=in_step)
        if committed:
            self._count(None)
        elif failure is not None:
            self._refuse_vain_attempts(failure)
            if in_step:  # elsewhere nobody can be admitted
                self.formation.await_company()
        return committed

    def _refuse_vain_attempts(self, failure: Exception) -> None:
        """A failure that comes again although nobody is missing is no loss: it would come for ever."""
        assert self.recovery is not None
        assert self.recovery.decision is not None
        decision = self.recovery.decision
        self._num_in_vain = 0 if decision.lost or decision.left else self._num_in_vain + 1
        if self._num_in_vain >= MOST_IN_VAIN:
            raise failure

    def _count(self, record: StepRecord | None) -> None:
        """A step is committed; without its record where the others have committed it."""
        self.formation.committed(record)
        self._num_in_vain = 0

    # -- requests -------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """What this worker wants of all, for the record of the step that begins."""
        if news := self.signals.take_news():
            self._events.note(news, one_worker=self.signals.leave)
        if self.signals.leave and self.recovery is None:
            self.signals.leave, self.signals.terminate = False, True
        if self.signals.leave and self.recovery is not None:
            self.recovery.leave()
        formation, copier = self.formation, self.formation.copier
        is_to_be_copied = copier is not None and copier.is_asked()
        formation.requests.ask(
            self.signals, change=is_to_be_copied, join=self._somebody_asks_to_join(), first=formation.first.is_needed
        )

    def _somebody_asks_to_join(self) -> bool:
        now_s = self._clock()
        hosts = self.recovery is not None and self.recovery.is_coordinator and self.admits
        if self.recovery is None or not hosts or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        self.recovery.refuse_superseded()
        return self.recovery.has_claims()

    # -- the end --------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Collective. All members have come to the end of the script, unless a signal has ended them: then the run may
        go on."""
        if self._all_end() and self.recovery is not None and not self.is_ending:
            self.recovery.end()

    def _all_end(self) -> bool:
        """All workers should end at the same step; one that ends early is named to those that go on. Whether all do."""
        facts = {"operation": "end of the run", "step": self._step}
        try:
            with self._events.waiting(Wait.END):
                Agreement(self.generation.wire.transport, Proposal(facts)).check()
        except LockstepError:
            return False
        return True
