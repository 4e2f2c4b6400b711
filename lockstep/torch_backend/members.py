"""What the members of one group share, and its end."""

import atexit
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.torch_backend.messages import Messages, hand_over_all
from lockstep.torch_backend.rounds import Rounds, open_rounds
from lockstep.torch_backend.work import OperationQueue, with_global_ranks
from lockstep.wire.shared.mailbox import open_mailbox
from lockstep.wire.shared.memory import HostMemory
from lockstep.wire.shared.neighbours import Neighbours, connect
from lockstep.world import World


class Members:
    """Connections, shared memory and threads of one group. Its owner calls `close`."""

    def __init__(self, memory: HostMemory, rounds: Rounds, messages: Messages) -> None:
        self.rank = rounds.rank
        self.size = len(rounds.members)
        self.rounds = rounds
        self.messages = messages
        self._memory = memory
        self._owner = os.getpid()  # a process that it forks has no part in the group, and must not end it
        # Not a method of this: in a cycle, the garbage collector would free the memory, not `close`.
        self._queue = OperationQueue(partial(_fail, memory.neighbours, rounds.global_ranks))
        _open.add(self)

    def submit(self, job: Callable[[], None], *, now: bool) -> "Future[None]":
        """See ThreadQueue. Messages that no thread waits for move meanwhile."""
        hand_over_all()
        return self._queue.submit(job, now=now)

    def relieve(self) -> None:
        """Lets another thread run operations if this one is about to wait for one."""
        self._queue.relieve()

    def close(self) -> None:
        """Ends the threads and closes the sockets; memory is freed with the last tensor on it. May be called twice."""
        if os.getpid() != self._owner:
            return
        _open.discard(self)
        self._memory.neighbours.close()
        self.messages.close()
        self._queue.close()
        self._memory.close()


def _fail(neighbours: Neighbours, global_ranks: Sequence[int], error: BaseException) -> BaseException:
    """Ends the group after an error that not all members share, so that no peer waits for this one."""
    neighbours.close()
    return with_global_ranks(error, global_ranks)


def open_members(rank: int, size: int, global_ranks: Sequence[int], store: Store, timeout_s: float) -> Members:
    """Collective. All members are on one host."""
    world = World(rank, size, rank, size)
    neighbours = connect(world, range(size), store, timeout_s)
    memory = HostMemory(neighbours)
    try:
        rounds = open_rounds(memory, global_ranks)
        return Members(memory, rounds, Messages(open_mailbox(memory, world), global_ranks))
    except BaseException:
        neighbours.close()
        memory.close()
        raise


# A process that ends without destroying its groups: a thread that wakes up in a half-ended interpreter would crash it.
_open: "weakref.WeakSet[Members]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for members in list(_open):
        members.close()
