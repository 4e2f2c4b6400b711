"""Messages between the workers of one host, through shared memory.

# Note [Waiting threads move]
# There is no thread that moves messages. A send puts what fits into free slots; the rest moves when a thread of this
# worker waits: it moves all transfers, not only its own, so two workers that send each other more than the slots hold
# do not block each other. Of several threads that wait one leads: it sleeps on this worker's bell (Note [Who rings]).
# The others wait until the leader, or any other thread, has finished their transfer, or until it stops leading. Every
# thread moves what can be moved before it sleeps: the bell may have rung for it before, when no thread waited.
"""

import threading
import time
from collections.abc import Collection, Iterable

import torch

from lockstep.errors import SILENT, BadArgument, LockstepError, PeerGone
from lockstep.wire.shared import semaphores
from lockstep.wire.shared.channel import NUM_SLOTS, ChannelLayout, Chunk, Inbound, Outbound
from lockstep.wire.shared.memory import HostMemory
from lockstep.wire.shared.neighbours import ENDED
from lockstep.wire.shared.transfers import Line, Matching, Receiving, Sending, Transfer
from lockstep.wire.shared.turns import Turns
from lockstep.wire.transport import Hosts
from lockstep.world import World

PAGE_BYTES = 4096
_CLOSED_HERE = "the connection was closed here"


class Mailbox:
    """A Transport between the workers of one host. Any thread. The owner of the memory closes that.

    `segments` are all members' inbound segments, by rank.
    """

    def __init__(self, memory: HostMemory, world: World, segments: dict[int, torch.Tensor]) -> None:
        self.world = world
        self.hosts: Hosts = (memory.neighbours.members,)
        self._memory = memory
        self._neighbours = memory.neighbours
        self._peers = sorted(self._neighbours.sockets)
        self._segment = segments[world.rank]
        self._bell = self._segment.data_ptr()
        self._inbound, self._outbound = _ends(world.rank, segments)
        self._slot_bytes = ChannelLayout(len(self._peers)).slot_bytes
        self._spins = semaphores.SPINS if len(segments) <= semaphores.cores else 0
        self._turns = Turns()
        self._leader: int | None = None
        self._closed = False
        self._matching = Matching(world.rank)
        self._lines = {peer: Line() for peer in self._peers}
        self._open: dict[Transfer, None] = {}  # an ordered set
        self._num_receives = dict.fromkeys(self._peers, 0)
        self._silence = Silence(self._peers)
        self._look_at_s = 0.0
        self._left: set[int] = set()
        self._lost: dict[int, str] = {}

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Sending:
        """Complete at once if free slots take it all; the rest moves when a thread waits."""
        self._check((target,), tag)
        sending = Sending(self, tensor, target, tag)
        with self._turns:
            self._begin(sending)
            if target not in self._lost:
                self._lines[target].add(sending)
                self._push_out(target)
            self._fail_lost()
        return sending

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Receiving:
        return self.receive_any(tensor, tag, (source,))

    def receive_any(self, tensor: torch.Tensor, tag: int, sources: Collection[int]) -> Receiving:
        """Receives the next message with this tag from any of `sources`; `source` is known after `wait`."""
        self._check(sources, tag)
        receiving = Receiving(self, tensor, tuple(sources), tag)
        with self._turns:
            self._begin(receiving)
            if self._matching.post(receiving):
                self._end(receiving)
            else:
                for source in receiving.peers:
                    self._take_in(source)
                self._fail_lost()
        return receiving

    def finish(self, transfer: Transfer) -> None:
        """Waits until the transfer is done; raises its error if it failed. See Note [Waiting threads move]."""
        if not transfer.done:
            with self._turns:
                transfer.since = time.monotonic()
                self._finish(transfer)
        if transfer.error is not None:
            raise transfer.error

    def awaited(self) -> list[int]:
        """Takes no lock: a watchdog asks when all is stuck."""
        return sorted({peer for transfer in list(self._open) if transfer.since is not None for peer in transfer.peers})

    def accuse(self, rank: int) -> None:
        """This worker is about to leave because of worker `rank`, which may be on another host."""
        self._neighbours.accuse(rank)

    def close(self) -> None:
        """Fails the waits that are still open, on any thread. Peers can still read what is in their slots."""
        with self._turns:
            if self._closed:
                return
            self._closed = True
            for outbound in self._outbound.values():
                outbound.leave()
            for transfer in list(self._open):
                self._fail(transfer, PeerGone(transfer.peers[0], _CLOSED_HERE))
        self._memory.release(self._segment)

    # -- waiting ---------------------------------------------------------------------------------------------

    def _finish(self, transfer: Transfer) -> None:
        while self._move(transfer):
            if self._leader is None:
                self._lead(transfer)
            else:
                self._turns.wait()

    def _lead(self, transfer: Transfer) -> None:
        """Sleeps and moves transfers until this one is done; then another thread may lead."""
        self._leader = threading.get_ident()
        try:
            while not transfer.done:
                self._sleep()
                self._look_in_time()
                self._move(transfer)
        finally:
            self._leader = None
            self._turns.notify_all()

    def _sleep(self) -> None:
        """Releases the lock until the bell rings, at most LOOK_S."""
        self._turns.release()
        try:
            semaphores.wait(self._bell, self._spins)
        finally:
            self._turns.acquire()

    def _move(self, transfer: Transfer) -> bool:
        """Moves all that can be moved, at most until the transfer is done. Returns whether it is still open."""
        while not transfer.done and self._move_some():
            self._look_in_time()
            self._turns.pass_on()
        return not transfer.done

    # -- moving ----------------------------------------------------------------------------------------------

    def _move_some(self) -> bool:
        """Moves at most a ring of chunks from and to each peer. Returns whether there were any."""
        if self._leader in (None, threading.get_ident()):
            while semaphores.take(self._bell):  # before the channels are read: they hold all that rang so far
                pass
        taken = [self._take_in(source) for source, number in self._num_receives.items() if number]
        pushed = [self._push_out(target) for target, line in self._lines.items() if line]
        return any(taken) or any(pushed)

    def _take_in(self, source: int) -> bool:
        """Takes chunks while a receive waits for a message of `source`: the rest stays in the ring."""
        inbound = self._inbound[source]
        for taken in range(NUM_SLOTS):
            chunk = inbound.get() if self._num_receives[source] else None
            if chunk is None:
                return taken > 0
            ended = self._matching.take(source, chunk)
            inbound.free(chunk)
            self._silence.moved[source] += 1
            if ended is not None:
                self._end(ended)
        return True

    def _push_out(self, target: int) -> bool:
        line, outbound = self._lines[target], self._outbound[target]
        for pushed in range(NUM_SLOTS):
            if not line or not outbound.ready():
                return pushed > 0
            self._push_chunk(line, outbound)
            self._silence.moved[target] += 1
        return True

    def _push_chunk(self, line: Line, outbound: Outbound) -> None:
        sending = line.first()
        num_bytes = min(self._slot_bytes, sending.num_bytes - sending.moved)
        address = sending.address + sending.moved
        sending.moved += num_bytes
        is_last = sending.moved == sending.num_bytes
        line.advance(is_last)
        outbound.put(Chunk(sending.tag, sending.num_bytes, num_bytes, bool(line), address))
        if is_last:
            self._end(sending)

    # -- beginnings and ends ---------------------------------------------------------------------------------

    def _check(self, peers: Collection[int], tag: int) -> None:
        if not peers or not self._num_receives.keys() >= set(peers):
            raise BadArgument(f"worker {self.world.rank} can exchange messages with {self._peers}, not {sorted(peers)}")
        if not -(2**63) <= tag < 2**63:
            raise BadArgument(f"a tag must fit 64 bits, and {tag} does not")

    def _begin(self, transfer: Transfer) -> None:
        if self._closed:
            raise PeerGone(transfer.peers[0], _CLOSED_HERE)
        self._open[transfer] = None
        if isinstance(transfer, Receiving):
            for source in transfer.peers:
                self._num_receives[source] += 1

    def _end(self, transfer: Transfer, error: LockstepError | None = None) -> None:
        """Marks the transfer as done, and wakes the threads that wait for it."""
        del self._open[transfer]
        if isinstance(transfer, Receiving):
            for source in transfer.peers:
                self._num_receives[source] -= 1
        transfer.error = error or transfer.error
        transfer.done = True
        if transfer.since is not None:
            self._turns.notify_all()
            if self._leader not in (None, threading.get_ident()):
                semaphores.post(self._bell)

    def _fail(self, transfer: Transfer, error: LockstepError) -> None:
        """Fails the transfer. With a send all others to its target fail too: the stream has a gap now."""
        if isinstance(transfer, Receiving):
            self._matching.withdraw(transfer)
        else:
            self._lines[transfer.peers[0]].clear()
        self._end(transfer, error)

    # -- lost workers --------------------------------------------------------------------------------------

    def _look_in_time(self) -> None:
        """Looks every LOOK_S, however much is moving: the awaited worker may not be among those that move."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + semaphores.LOOK_S
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Fails transfers with workers that died, left or are silent, after what they had sent was received."""
        gone = self._neighbours.gone()  # first: a worker posts that it leaves before it closes its socket
        self._left.update(peer for peer in self._peers if self._inbound[peer].has_left())
        gone = sorted(self._left.union(gone))
        self._lost = dict.fromkeys(gone, ENDED) | self._lost
        for peer in gone:
            while self._take_in(peer):
                pass
        self._note_silence(now_s)
        self._fail_lost()

    def _note_silence(self, now_s: float) -> None:
        """Only an awaited worker can be silent."""
        self._silence.note(now_s)
        cause = f"{SILENT} {self._neighbours.timeout_s:g} s"
        for transfer in list(self._open):
            if transfer.since is None:
                continue
            if self._silence.lasts_s(transfer.peers, transfer.since, now_s) > self._neighbours.timeout_s:
                self._lost.setdefault(transfer.peers[0], cause)

    def _fail_lost(self) -> None:
        """Fails transfers that cannot end any more."""
        for transfer in list(self._open) if self._lost else ():
            lost = self._who_ended(transfer)
            if lost is not None:
                self._fail(transfer, self._neighbours.blame(lost, self._lost[lost]))

    def _who_ended(self, transfer: Transfer) -> int | None:
        """The lost worker because of which the transfer cannot end.

        Of several sources one may leave when it has sent all; one that died may have had more to send.
        """
        lost = [peer for peer in transfer.peers if peer in self._lost]
        missed = lost if len(lost) == len(transfer.peers) else [peer for peer in lost if peer not in self._left]
        return missed[0] if missed else None


class Silence:
    """How long peers have been silent: `moved` counts chunks from and to each; `note` records when it changes."""

    def __init__(self, peers: Iterable[int]) -> None:
        self.moved = dict.fromkeys(peers, 0)
        self._noted = dict(self.moved)
        self._moved_s = dict.fromkeys(self.moved, float("-inf"))

    def note(self, now_s: float) -> None:
        for peer, moved in self.moved.items():
            if self._noted[peer] != moved:
                self._noted[peer], self._moved_s[peer] = moved, now_s

    def lasts_s(self, peers: Iterable[int], since_s: float, now_s: float) -> float:
        """How long nothing has moved from or to these peers, as noted, counted from `since_s` at the earliest."""
        return now_s - max(since_s, *(self._moved_s[peer] for peer in peers))


def _ends(rank: int, segments: dict[int, torch.Tensor]) -> tuple[dict[int, Inbound], dict[int, Outbound]]:
    """This worker's ends of its channels from and to each peer."""
    layout = ChannelLayout(len(segments) - 1)
    peers = sorted(segments.keys() - {rank})
    inbound, outbound = {}, {}
    for place, peer in enumerate(peers):
        bell = segments[peer].data_ptr()
        own_place = sorted(segments.keys() - {peer}).index(rank)
        inbound[peer] = Inbound(layout, segments[rank], place, bell)
        outbound[peer] = Outbound(layout, segments[peer], own_place, bell)
    return inbound, outbound


def open_mailbox(memory: HostMemory, world: World) -> Mailbox:
    """Collective. A new mailbox between all members of `memory`; the lowest rank allocates the segments of all.

    When this is called, peers have viewed all that was revealed before.
    """
    members = memory.neighbours.members
    layout = ChannelLayout(len(members) - 1)
    room = -(-layout.segment_bytes // PAGE_BYTES) * PAGE_BYTES
    if world.rank == members[0]:
        whole = memory.allocate(room * len(members))
        rooms = list(whole.split(room))
        for segment in rooms:
            layout.initialize(segment)
        memory.reveal([whole])
    else:
        rooms = list(memory.next_of(members[0]).split(room))
    return Mailbox(memory, world, dict(zip(members, rooms, strict=True)))
