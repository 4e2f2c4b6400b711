"""Many workers in one process: what the driver of the membership machine does, cut into moves.

Whatever one worker can do next without another is a move; a scheduler chooses among them (see histories.py). A worker's
actions, and each message that it sends, are moves of their own, so a kill can fall between any two. Messages of a pair
of workers arrive in order, those of different pairs in any order. Links can be lost in one direction: what was sent in
the other arrives, but no connection comes about. Claims can be delayed, lost, and arrive in another order (`delays`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from simulated import Gradient, Message, Phase, Send, Worker

from lockstep.elastic.membership import (
    Claim,
    Decision,
    Liveness,
    Member,
    MembershipStage,
    actions,
    events,
    founded,
    joining,
)
from lockstep.elastic.membership.view import NEVER, GenerationId
from lockstep.lanes import Assignment

NUM_LANES = 5
Move = tuple[str, Any]


class Violation(AssertionError):  # noqa: N818 - what it is, in one word
    """Something happened that must never happen; the history of moves is in the message."""


class Simulation:
    """The workers, the messages between them, and all that must hold whatever happens."""

    def __init__(self, num_founders: int) -> None:
        self.history: list[tuple[Any, ...]] = []  # told by story()
        self.queues: dict[tuple[str, str], deque[Message]] = defaultdict(deque)
        self.formed: dict[GenerationId, tuple[Member, ...]] = {}
        self.formed_by: dict[GenerationId, set[str]] = defaultdict(set)
        self.parents: dict[GenerationId, set[GenerationId]] = defaultdict(set)
        self.trained: set[GenerationId] = set()  # generations in which a step was committed
        self.failed_by: dict[Decision, set[str]] = defaultdict(set)
        self.met: dict[Decision, list[int] | None] = {}
        self.given: dict[Decision, set[str]] = defaultdict(set)
        self.loses: Callable[[str, str], bool] = _nothing_is_lost
        self.was_cut = False
        self.delays = False  # whether claims take their time
        self.witness: dict[GenerationId, tuple[str, ...]] | None = None
        self.reaches_witness: Callable[[str], bool] = lambda uid: True
        self.out_of_time = True  # whether opening a wire may fail although nobody is gone
        members = tuple(Member(f"w{slot}", slot, f"door {slot}") for slot in range(num_founders))
        self.workers = {member.uid: self._founder(member, members) for member in members}
        self.formed[self.workers["w0"].machine.formed.id] = members

    def _founder(self, member: Member, members: tuple[Member, ...]) -> Worker:
        state = founded(member, members)
        return Worker(state, phase=Phase.OUTSIDE, wire=state.formed.id, applied=[], published=state.formed)

    def have_witness(self) -> None:
        """All workers have a witness that decides between two halves."""
        self.witness = {}
        for worker in self.workers.values():
            worker.machine = replace(worker.machine, has_witness=True)

    # -- what the adversary may do ----------------------------------------------------------------------------

    def kill(self, uid: str) -> None:
        self._note("KILL", uid)
        self.workers[uid].alive = False
        self.workers[uid].todo.clear()

    def arrive(self, slot: int) -> str:
        uid = f"w{slot}" + "'" * sum(worker.machine.me.slot == slot for worker in self.workers.values())
        self._note("ARRIVE", uid)
        state, todo = joining(Member(uid, slot, f"door {uid}"))
        state = replace(state, has_witness=self.witness is not None)
        self.workers[uid] = Worker(state, deque(todo))
        return uid

    def ask_to_leave(self, uid: str) -> None:
        self._note("ASKED TO LEAVE", uid)
        self._tell(self.workers[uid], events.Leaving())

    def cut(self, far_side: Iterable[str]) -> None:
        """From now on nothing passes between these and the others."""
        far = frozenset(far_side)
        self._note("CUT OFF", ",".join(sorted(far)))
        self.lose(lambda source, target: (source in far) != (target in far))

    def lose_links(self, links: Iterable[tuple[str, str]]) -> None:
        """From now on nothing passes from the one to the other of these, and everything else does."""
        lost = frozenset(links)
        self._note("LOST LINKS", ", ".join(f"{source}>{target}" for source, target in sorted(lost)))
        self.lose(lambda source, target: (source, target) in lost)

    def lose(self, loses: Callable[[str, str], bool]) -> None:
        self.loses, self.was_cut = loses, True

    # -- who is there -----------------------------------------------------------------------------------------

    @property
    def present(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_there]

    @property
    def with_state(self) -> list[Worker]:
        return [worker for worker in self.present if worker.has_state]

    def severed(self, one: str, other: str) -> bool:
        """No connection comes about, and none lasts, where one direction is lost."""
        return self.loses(one, other) or self.loses(other, one)

    def gone(self, seen_from: Worker, uid: str) -> bool:
        return not self.workers[uid].is_there or self.severed(seen_from.uid, uid)

    # -- moves ------------------------------------------------------------------------------------------------

    def moves(self, worker: Worker) -> list[Move]:
        """All that this worker can do next."""
        if not worker.is_there:
            return []
        arriving: list[Move] = [("read", None)] if worker.inbox else []
        arriving += [
            ("deliver", source)
            for source in self.workers
            if self.queues[source, worker.uid] and not self.loses(source, worker.uid)
        ]
        senders = [(serial, claim.member.uid) for serial, claim in worker.post]
        arriving += [("arrive", serial) for serial, uid in senders if not self.loses(uid, worker.uid)]
        if worker.todo:
            return [*arriving[bool(worker.inbox) :], ("act", None), *self._breaks(worker)]
        match worker.machine.stage:
            case MembershipStage.MEMBER:
                return [*arriving, *self._steps(worker), *self._breaks(worker)]
            case MembershipStage.JOINING:
                return [*arriving, *self._finds(worker)]
            case MembershipStage.SEEKING:
                return [*arriving, *(("probe", uid) for uid in sorted(worker.knocks))]
            case MembershipStage.GATHERING:
                return [*arriving, *self._gathers(worker)]
            case MembershipStage.ASKING:
                return [*arriving, ("ask", None)]
            case MembershipStage.CLAIMING:
                return [*arriving, *self._awaits(worker)]
            case MembershipStage.FORMING:
                return [*arriving, *self._opens(worker)]
        return arriving

    def do(self, worker: Worker, move: Move) -> None:
        name, argument = move
        self.history.append((worker.uid, *(move if name != "act" else ("does", worker.todo[0]))))
        getattr(self, f"_do_{name}")(worker, argument)

    def _tell(self, worker: Worker, event: events.Event) -> None:
        worker.machine, more = worker.machine.on(event)
        worker.todo.extend(more)

    # -- a step -----------------------------------------------------------------------------------------------

    def _steps(self, worker: Worker) -> list[Move]:
        everyone = {member.uid for member in worker.machine.view.members}
        match worker.phase:
            case Phase.OUTSIDE:
                return [("begin", None)]
            case Phase.REDUCING if worker.lanes_of[worker.moment].keys() >= everyone:
                return [("add", None)]
            case Phase.WAITING if worker.prepared[worker.moment] >= everyone:
                return [("all_prepared", None)]
            case Phase.UPDATING:
                return [("update", None)]
        return []

    def _breaks(self, worker: Worker) -> list[Move]:
        """An exchange may fail once somebody from whom something is still needed is gone or has closed its wire."""
        sends = all(isinstance(item, Send) for item in worker.todo)  # else it performs actions: no exchange that fails
        if (
            worker.machine.stage is not MembershipStage.MEMBER
            or worker.phase not in (Phase.REDUCING, Phase.WAITING)
            or not sends
        ):
            return []
        exchanged = worker.lanes_of if worker.phase is Phase.REDUCING else worker.prepared
        needed = {member.uid for member in worker.machine.view.members} - set(exchanged[worker.moment])
        needed |= {item.to for item in worker.todo}
        closed = any(self.gone(worker, uid) or self.workers[uid].wire != worker.wire for uid in needed)
        return [("break", None)] if closed else []

    def _do_begin(self, worker: Worker, _: None) -> None:
        if worker.change_agreed:
            return self._tell(worker, events.Broken())
        self._require(worker.applied == list(range(worker.machine.step)), "a step began before the update of the last")
        while worker.machine.is_coordinator and worker.inbox:
            self._do_read(worker, None)
        view, worker.phase = worker.machine.view, Phase.REDUCING
        lanes = Assignment.even(NUM_LANES, len(view.members)).lanes_of[view.rank_of(worker.uid)]
        message = Message(*worker.moment, lanes, self._asks_for_change(worker))
        worker.lanes_of[worker.moment][worker.uid] = message
        self._send_all(worker, message)
        return None

    def _asks_for_change(self, worker: Worker) -> bool:
        return worker.machine.leaving or (
            worker.machine.is_coordinator and worker.machine.asks_for_change(_newcomers(worker.machine.claims))
        )

    def _send_all(self, worker: Worker, message: Message) -> None:
        others = (member.uid for member in worker.machine.view.members if member.uid != worker.uid)
        worker.todo.extend(Send(uid, message) for uid in others)

    def _do_deliver(self, worker: Worker, source: str) -> None:
        message = self.queues[source, worker.uid].popleft()
        moment = message.generation, message.step
        if message.lanes is None:
            worker.prepared[moment].add(source)
        else:
            worker.lanes_of[moment][source] = message

    def _do_add(self, worker: Worker, _: None) -> None:
        """Adds its slice and writes it to everyone's memory at once, as in shared memory."""
        generation, step = worker.moment
        gathered = worker.lanes_of[worker.moment].values()
        parts = tuple((lane, generation) for message in gathered for lane in message.lanes or ())
        worker.gradient, worker.phase = Gradient(step, parts), Phase.WAITING
        worker.change_agreed = any(message.asks_for_change for message in gathered)
        worker.prepared[worker.moment].add(worker.uid)
        for member in worker.machine.view.members:
            self.workers[member.uid].slices[worker.moment].add(worker.uid)
        self._tell(worker, events.Prepared())
        self._send_all(worker, Message(generation, step, None))

    def _do_all_prepared(self, worker: Worker, _: None) -> None:
        here = worker.machine.formed.id
        self.trained.add(here)
        for other in self.present:
            there = other.machine.formed.id
            alike = there not in self.trained or self._descends(here, there) or self._descends(there, here)
            self._require(alike, f"{worker.uid} trains in {here} while {other.uid} has trained in {there}")
        self._tell(worker, events.AllPrepared())

    def _descends(self, later: GenerationId, earlier: GenerationId) -> bool:
        return later == earlier or any(self._descends(parent, earlier) for parent in self.parents[later])

    def _do_update(self, worker: Worker, _: None) -> None:
        assert worker.applied is not None
        assert worker.gradient is not None
        step = worker.gradient.step
        self._require(step in worker.committed, f"{worker.uid} applies step {step}, which was not committed")
        self._require(len(worker.applied) == step, f"{worker.uid} applies step {step} after {worker.applied}")
        worker.applied.append(step)
        worker.gradient, worker.phase = None, Phase.OUTSIDE

    def _do_break(self, worker: Worker, _: None) -> None:
        worker.todo.clear()
        self._tell(worker, events.Broken())

    # -- finding each other -------------------------------------------------------------------------------------

    def _finds(self, worker: Worker) -> list[Move]:
        """Anybody with a state tells its own view, which may be an old one. Without any, the newcomer gives up."""
        known = [other.uid for other in self.with_state if not self.severed(other.uid, worker.uid)]
        gives_up: list[Move] = [("give_up", None)] if worker.misses or not known else []
        return [("find", uid) for uid in known] + gives_up

    def _do_find(self, worker: Worker, uid: str) -> None:
        self._tell(worker, events.MembersFound(self.workers[uid].machine.view.members))

    def _do_give_up(self, worker: Worker, _: None) -> None:
        worker.why_left = "nobody has the state, or some cannot be reached"

    def _gathers(self, worker: Worker) -> list[Move]:
        """Probing one that lives, or is silent, again changes nothing: once is enough."""
        known = worker.told_alive | worker.machine.silent | worker.machine.new
        worth = [uid for uid in sorted(worker.knocks) if uid not in known or self._is_news(worker, uid)]
        return [("probe", uid) for uid in worth]

    def _is_news(self, worker: Worker, uid: str) -> bool:
        if uid in worker.machine.silent:
            return not self.severed(worker.uid, uid)
        usual = Liveness.NEW if uid in worker.machine.new else Liveness.ALIVE
        return self._health(worker, uid) is not usual

    def _health(self, worker: Worker, uid: str) -> Liveness:
        if self.severed(worker.uid, uid):
            return Liveness.UNREACHABLE
        if not self.workers[uid].is_there:
            return Liveness.DEAD
        result = self.workers[uid].published
        if result is None:
            return Liveness.NEW
        is_later = result.id.generation > worker.machine.formed.id.generation
        return Liveness.ELSEWHERE if is_later and worker.uid not in result.uids else Liveness.ALIVE

    def _do_probe(self, worker: Worker, uid: str) -> None:
        worker.knocks.discard(uid)
        worker.longer.discard(uid)
        health = self._health(worker, uid)
        if health is Liveness.ALIVE:
            worker.told_alive.add(uid)
        self._tell(worker, events.Probed(uid, health))

    def _do_read(self, worker: Worker, _: None) -> None:
        self._tell(worker, events.ClaimReceived(worker.inbox.pop(0)))

    def _awaits(self, worker: Worker) -> list[Move]:
        assert worker.call is not None
        host, serial = worker.call
        found = self.workers[host].answers.get(worker.uid, (0, None))[0] == serial
        answer: list[Move] = [("fetch", None)] if found and not self.loses(host, worker.uid) else []
        back = [
            uid for uid in sorted(worker.longer) if self._health(worker, uid) in (Liveness.ALIVE, Liveness.ELSEWHERE)
        ]
        health = self._health(worker, host)
        if health is Liveness.NEW or (health is Liveness.ELSEWHERE and worker.has_state):
            back.append(host)
        lost: list[Move] = [("lose_host", None)] if worker.failed or self.gone(worker, host) else []
        return [*answer, *(("probe", uid) for uid in back), *lost]

    def _do_arrive(self, worker: Worker, serial: int) -> None:
        claim = next(claim for number, claim in worker.post if number == serial)
        worker.post = [item for item in worker.post if item[0] != serial]
        self._put_in(worker, serial, claim)

    def _do_ask(self, worker: Worker, _: None) -> None:
        assert self.witness is not None
        assert worker.machine.verdict is not None
        if not self.reaches_witness(worker.uid):
            return self._tell(worker, events.WitnessAnswered(False, "the witness cannot be asked"))
        won = all(self.witness.setdefault(tie.id, tie.here) == tie.here for tie in worker.machine.verdict.ties)
        return self._tell(worker, events.WitnessAnswered(won, "" if won else "the others have asked the witness first"))

    def _do_fetch(self, worker: Worker, _: None) -> None:
        assert worker.call is not None
        self._tell(worker, events.DecisionReceived(self.workers[worker.call[0]].answers[worker.uid][1]))

    def _do_lose_host(self, worker: Worker, _: None) -> None:
        assert worker.call is not None
        self._tell(worker, events.CoordinatorLost(self.severed(worker.uid, worker.call[0])))

    # -- opening the wire -----------------------------------------------------------------------------------------

    def _opens(self, worker: Worker) -> list[Move]:
        """All must meet; then newcomers get the state; then each is through, or fails, at its own time."""
        decision = worker.opening
        assert decision is not None
        uids = [member.uid for member in decision.view.members]
        if decision not in self.met and self._all_connect(uids) and self._all_open(worker, uids, decision):
            self.met[decision] = self._state_to_give(decision)
            before = {self.workers[uid].machine.formed.id for uid in uids}
            self.parents[decision.attempt.id] |= before - {NEVER.id}
        if decision not in self.met:
            hopeless = not self._all_connect(uids) or not all(self._may_come(worker, uid, decision) for uid in uids)
            return [("unform", None)] if hopeless or self.out_of_time else []
        broken = any(self.gone(worker, uid) or self.workers[uid].wire != worker.wire for uid in uids)
        return self._goes_through(worker, decision) + ([("unform", None)] if broken else [])

    def _goes_through(self, worker: Worker, decision: Decision) -> list[Move]:
        if worker.uid in decision.newcomers and worker.uid not in self.given[decision]:
            return [("take_state", None)]
        own = {worker.uid} if worker.uid in decision.newcomers else set(decision.newcomers)
        return [("form", None)] if self.given[decision] >= own else []

    def _all_open(self, seen_from: Worker, uids: Sequence[str], decision: Decision) -> bool:
        return all(not self.gone(seen_from, uid) and self.workers[uid].opening == decision for uid in uids)

    def _all_connect(self, uids: Sequence[str]) -> bool:
        return not any(self.severed(one, other) for one in uids for other in uids)

    def _may_come(self, seen_from: Worker, uid: str, decision: Decision) -> bool:
        """Whether it has the decision, or is about to."""
        other = self.workers[uid]
        if self.gone(seen_from, uid):
            return False
        host, serial = other.call or ("", 0)
        awaits = other.machine.stage is MembershipStage.CLAIMING and not other.todo
        answered = awaits and self.workers[host].answers.get(uid) == (serial, decision)
        about_to_be = awaits and actions.SendDecision(uid, decision) in self.workers[host].todo
        return other.opening == decision or actions.Open(decision) in other.todo or answered or about_to_be

    def _state_to_give(self, decision: Decision) -> list[int] | None:
        if not decision.newcomers:
            return None
        state = self.workers[decision.host.uid].applied
        self._require(state == list(range(decision.step)), f"the state given is {state}, not that before {decision}")
        return state

    def _do_take_state(self, worker: Worker, _: None) -> None:
        assert worker.opening is not None
        state = self.met[worker.opening]
        assert state is not None
        worker.applied = list(state)
        self.given[worker.opening].add(worker.uid)

    def _do_form(self, worker: Worker, _: None) -> None:
        assert worker.opening is not None
        view, number = worker.opening.view, worker.opening.attempt.id
        first = self.formed.setdefault(number, view.members)
        self._require(first == view.members, f"generation {number} was formed twice: {first}, {view.members}")
        self.formed_by[number].add(worker.uid)
        worker.published = worker.opening.attempt
        worker.opening, worker.change_agreed = None, False
        self._tell(worker, events.Formed())

    def _do_unform(self, worker: Worker, _: None) -> None:
        assert worker.opening is not None
        self.failed_by[worker.opening].add(worker.uid)
        worker.opening = None
        if not worker.has_state:
            worker.applied = None
        self._tell(worker, events.Unformed())

    # -- actions ------------------------------------------------------------------------------------------------

    def _do_act(self, worker: Worker, _: None) -> None:
        action = worker.todo.popleft()
        match action:
            case Send(to, message):
                self.queues[worker.uid, to].append(message)
            case actions.CloseWire():
                worker.wire, worker.phase, worker.change_agreed = None, Phase.RECOVERING, False
            case actions.Commit(step):
                self._commit(worker, step)
            case actions.Redo(step):
                self._require(worker.applied == list(range(step)), f"{worker.uid} computes {step} on {worker.applied}")
                worker.gradient, worker.phase = None, Phase.OUTSIDE
            case actions.Probe(members):
                worker.knocks, worker.told_alive = {member.uid for member in members}, set()
            case actions.GatherClaims(missing, silent):
                worker.knocks = {member.uid for member in (*missing, *silent)}
            case actions.SendClaim(host, claim, silent):
                worker.longer = {member.uid for member in silent}
                self._bring(worker, host.uid, claim)
            case actions.AskWitness():
                pass  # a move of its own: see _do_ask
            case actions.SendDecision(uid, decision):
                worker.answers[uid] = (worker.serials[uid], decision)
            case actions.Open(decision):
                worker.opening, worker.wire = decision, decision.attempt.id
            case actions.Leave(reason):
                self._leave(worker, reason)
            case actions.FindMembers(silent, taken):
                worker.knocks, worker.misses = set(), bool(silent or taken)

    def _commit(self, worker: Worker, step: int) -> None:
        held = worker.gradient
        self._require(held is not None and held.step == step, f"{worker.uid} commits {step} but holds {held}")
        assert held is not None
        self._require(held.lanes == list(range(NUM_LANES)), f"step {step} was added up from {held.parts}")
        self._require(len({generation for _, generation in held.parts}) == 1, f"{held} mixes generations")
        generation = held.parts[0][1]
        missing = self._members(generation) - worker.slices[generation, step]
        self._require(not missing, f"{worker.uid} commits {step} without the slices of {sorted(missing)}")
        self._require(step not in worker.committed, f"{worker.uid} commits {step} twice")
        worker.committed[step], worker.phase = held, Phase.UPDATING

    def _members(self, generation: GenerationId) -> set[str]:
        return {member.uid for member in self.formed[generation]}

    def _bring(self, worker: Worker, host: str, claim: Claim) -> None:
        keeper, serial = self.workers[host], len(self.history)
        worker.call = (host, serial)
        worker.failed = self.gone(worker, host)
        if worker.failed:
            return
        if self.delays:
            keeper.post.append((serial, claim))
        else:
            self._put_in(keeper, serial, claim)

    def _put_in(self, keeper: Worker, serial: int, claim: Claim) -> None:
        """Of two claims of one worker the later counts, whichever arrives first, as endpoints number them."""
        if serial < keeper.serials.get(claim.member.uid, 0):
            return
        keeper.inbox = [*(call for call in keeper.inbox if call.member.uid != claim.member.uid), claim]
        keeper.serials[claim.member.uid] = serial

    def _leave(self, worker: Worker, reason: str) -> None:
        allowed = worker.machine.leaving or self.was_cut
        self._require(allowed, f"{worker.uid}, alive and well, was left out: {reason}")
        worker.why_left = reason
        worker.todo.clear()

    # -- telling ------------------------------------------------------------------------------------------------

    def _note(self, *words: object) -> None:
        self.history.append(words)

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(f"{otherwise}\n{self.story()}")

    def story(self, last: int = 400) -> str:
        """The moves up to here, without the delivery of messages."""
        result = [
            f"{index:4} " + " ".join(str(word) for word in words if word is not None)
            for index, words in enumerate(self.history)
            if "deliver" not in words
        ]
        stages = [
            f"{worker.uid}: {worker.machine.stage.name}, {worker.phase.name}, step {worker.machine.step}, "
            f"in {worker.machine.formed.id}, known {[member.uid for member in worker.machine.known]}, "
            f"silent {sorted(worker.machine.silent)}, does {list(worker.todo)[:2]}"
            for worker in self.present
        ]
        return "\n".join([*result[-last:], *stages])


def settled(simulation: Simulation, step: int) -> bool:
    """Whether all who live are in one generation, without anybody else, and have come to `step`."""
    present = simulation.present
    uids = sorted(worker.uid for worker in present)
    return all(
        worker.machine.stage is MembershipStage.MEMBER
        and worker.machine.step >= step
        and not worker.machine.leaving
        and sorted(member.uid for member in worker.machine.view.members) == uids
        for worker in present
    )


def furthest(workers: Sequence[Worker]) -> int:
    return max((worker.machine.step for worker in workers), default=0)


def _nothing_is_lost(source: str, target: str) -> bool:
    return False


def _newcomers(claims: Sequence[Claim]) -> list[Claim]:
    return [claim for claim in claims if claim.is_newcomer]
