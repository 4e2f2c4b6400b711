"""Messages and sums by a process group of torch.distributed, in a group of our own: nothing global is touched.

One class for every backend; a file per backend (`gloo`, `nccl`, `mpi`) makes the group.

# Note [Lost or refused]
# Backends raise RuntimeErrors for everything: a peer that died, and a dtype that they do not know. After a loss the
# step is done again, which would go on for ever with an error that comes again. So a peer is gone if the words say that
# a connection broke, was closed or timed out, or if its connection shows to be broken when it is tried; anything else
# is an error of its own, and ends the run.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import Store, Work  # type: ignore[attr-defined]

from lockstep.errors import LockstepError, PeerGone, WireError
from lockstep.wire.network.first_gone import FirstGone
from lockstep.wire.transport import Pending
from lockstep.world import World

PROBE, FAREWELL = 15, 14
"""The tags of messages that are never sent, and of the last one that is. Callers have tags of their own."""

_LOST = re.compile(
    r"connection (was |has been )?(likely )?(closed|reset|refused|aborted|timed out)|closed by (remote )?peer"
    r"|broken pipe|time(d )?[ -]?out|socket closed|pair closure|not connected|connection abort|no route to host"
    r"|network (is unreachable|is down|error)|host is (down|unreachable)|remote (process exited|error)|ncclRemoteError"
    r"|communicator (was|has been) aborted",
    re.IGNORECASE,
)
"""What Gloo, NCCL and the system say of a peer that is gone. See Note [Lost or refused]."""


@dataclass(eq=False)
class GroupPending:
    """A send or receive of a process group, and the tensor it uses, which must stay alive until it is done."""

    work: Work
    tensor: torch.Tensor
    peer: int
    failure: Callable[[int, RuntimeError], LockstepError]
    done: bool = False
    awaited: bool = False

    def wait(self) -> None:
        if self.done:  # Gloo would wait for one more message
            return
        self.awaited = True
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.failure(self.peer, error) from error
        finally:
            self.awaited = False
        self.done = True


class ProcessGroupTransport:
    """A Transport over any c10d backend, which also knows the backend's own all-reduce.

    When a peer is gone, every worker names the one that was gone first. See Note [The first to go].
    """

    def __init__(self, world: World, group: Any, store: Store, *, lingers: bool = True) -> None:
        """Without `lingers` nobody asks the store who was gone first: all find out by themselves."""
        self.world = world
        self._group: Any = group
        self._first_gone = FirstGone(world, store if lingers else None)
        self._lock = threading.Lock()
        self._posted: WeakSet[GroupPending] = WeakSet()
        self._reduces = False

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return self._post(target, lambda group, data: group.send([data], target, tag), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._post(source, lambda group, data: group.recv([data], source, tag), tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Collective. Afterwards `tensor` holds the sum over all workers, in the backend's order of additions."""
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        self._reduces = True
        try:
            self._open_group(self.world.rank).allreduce([numbers]).wait()
        except RuntimeError as error:
            what = f"the all-reduce of {numbers.numel()} elements of {str(numbers.dtype).removeprefix('torch.')}"
            raise self._failure(self._suspect(), error, what) from error
        finally:
            self._reduces = False

    def awaited(self) -> list[int]:
        """Those of an all-reduce are all the others: the backend does not say who is late."""
        if self._reduces:
            return list(self.world.peers)
        with self._lock:
            return sorted({pending.peer for pending in self._posted if pending.awaited})

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None  # first, so that a wait that fails by this accuses nobody
            self._end(group)
            self._first_gone.linger()

    def missed(self, rank: int) -> None:
        """Worker `rank` was found gone by other means; this one gives up because of it. See Note [The first to go]."""
        self._first_gone.name(rank)

    def _end(self, group: Any) -> None:
        """Ends all waits and connections of the group."""
        group.abort()

    def _post(self, peer: int, start: Callable[[Any, torch.Tensor], Work], tensor: torch.Tensor) -> GroupPending:
        data = tensor.view(torch.uint8)  # backends do not know every dtype, and need not
        try:
            pending = GroupPending(start(self._open_group(peer), data), data, peer, self._failure)
        except RuntimeError as error:
            raise self._failure(peer, error) from error
        with self._lock:
            self._posted.add(pending)
        return pending

    def _is_busy(self) -> bool:
        """Whether there are messages, to send or to receive, that nobody has waited for yet."""
        with self._lock:
            return not all(pending.done for pending in self._posted)

    def _open_group(self, peer: int) -> Any:
        if self._group is None:
            raise PeerGone(peer, "the connection was closed here")
        return self._group

    # -- who is gone ----------------------------------------------------------------------------------------

    def _failure(self, peer: int, error: RuntimeError, what: str = "a message") -> LockstepError:
        """What to raise when an exchange with `peer` has failed. See Note [Lost or refused]."""
        if self._group is None or tells_of_loss(error) or self._is_broken(peer):
            return self._gone(peer, error)
        return WireError(f"{what} between worker {self.world.rank} and {peer} by {type(self).__name__}", reason(error))

    def _gone(self, peer: int, error: RuntimeError) -> PeerGone:
        """The error that names whoever was gone first, when `peer` is gone now."""
        cause = reason(error)
        if self._group is None:
            return PeerGone(peer, cause)
        first = self._first_gone.name(peer)
        if first is None:  # the store is gone too: it lived with worker 0, or near it
            first = 0 if self._is_broken(0) else peer
        if first in (peer, self.world.rank):
            return PeerGone(peer, cause)
        return PeerGone(first, f"it was missed first; worker {peer} has left since ({cause})")

    def _suspect(self) -> int:
        """Who may be gone after a collective failed, which does not say it: the first with a broken connection."""
        return next((peer for peer in self.world.peers if self._is_broken(peer)), self.world.peers[0])

    def _is_broken(self, peer: int) -> bool:
        """Only after a failure: what is received here never comes, but cannot even be begun if the peer is gone."""
        if peer == self.world.rank or self._group is None:
            return False
        try:
            self._group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, PROBE)
        except RuntimeError:
            return True
        return False


def tells_of_loss(error: RuntimeError) -> bool:
    """Whether a backend's error says that a peer is gone. See Note [Lost or refused]."""
    return _LOST.search(str(error)) is not None


def reason(error: RuntimeError) -> str:
    """The backend's own words, without the C++ file name in front and the general advice behind."""
    return str(error).split("\n")[0].split(". This is typically")[0].rsplit("] ", 1)[-1]
