"""Messages and sums over TCP by torch's Gloo, in a group of our own: nothing global is touched.

# Note [Lost or refused]
# Backends raise RuntimeErrors for everything: a peer that died, and a dtype that they do not know. After a loss the
# step is done again, which would never end with an error that comes again. So a peer counts as gone if the message says
# that a connection broke, was closed or timed out, or if a new receive on its connection fails; anything else is an
# error of its own, and ends the run.

# Note [Farewells]
# When a connection breaks, Gloo fails the queued messages, but not one that is half received: nothing ends that wait
# before the timeout. So one thread watches all connections (hangups.py). From every peer a farewell message is awaited,
# which `close` sends unless it cuts off messages under way. If a connection breaks before that has come, the peer is
# gone: all waits that can be ended are, and `on_loss` is called for those that cannot.

# Note [Which interface]
# On several hosts torch takes the interfaces that GLOO_SOCKET_IFNAME lists, or else the one whose address this host's
# name resolves to. Only torch reads the variable, and only when it chooses the interface itself.
"""

import os
import queue
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment, LockstepError, PeerGone, WireError
from lockstep.wire.network import keepalive
from lockstep.wire.network.first_gone import FirstGone
from lockstep.wire.network.hangups import HangupWatch
from lockstep.wire.transport import Pending, each_alone
from lockstep.world import World

CONNECT_S = 30.0
"""How long connecting may take once all workers are there."""

RECONNECT_S = 10.0
"""The same for later generations: their workers are known to reach one another, and another attempt can follow."""

GRACE_S = 1.0
"""How much later than its limit Gloo may say that it could not connect."""

PROBE, FAREWELL = 15, 14
"""The tags of messages that are never sent, and of the last one that is. Callers have tags of their own."""

_LOST = re.compile(
    r"connection (was |has been )?(likely )?(closed|reset|refused|aborted|timed out)|closed by (remote )?peer"
    r"|broken pipe|time(d )?[ -]?out|socket closed|pair closure|not connected|connection abort|no route to host"
    r"|network (is unreachable|is down|error)|host is (down|unreachable)|remote (process exited|error)|ncclRemoteError"
    r"|communicator (was|has been) aborted",
    re.IGNORECASE,
)
"""Words in the errors of Gloo, NCCL and the system when a peer is gone. See Note [Lost or refused]."""


@dataclass(eq=False)
class GlooPending:
    """A send or receive, and the tensor it uses, which must stay alive until it is done."""

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


class GlooTransport:
    """A Transport for CPU tensors, on one host or several, which also has Gloo's own all-reduce. Collective to make.

    On one host it uses loopback only; else see Note [Which interface]. When a peer is gone, every worker names the one
    that was gone first: see Note [The first to go].
    """

    def __init__(
        self,
        world: World,
        store: Store,
        timeout_s: float,
        on_loss: Callable[[PeerGone], None] | None = None,
        *,
        lingers: bool = True,
    ) -> None:
        """Without `lingers` no worker asks the store which one was gone first: each finds out by itself."""
        others = keepalive.open_sockets()
        self.world = world
        self.hosts = each_alone(world.size)
        self._on_loss = on_loss
        self._group: Any = _connect(world, store, timeout_s)
        self._first_gone = FirstGone(world, store if lingers else None)
        self._lock = threading.Lock()
        self._posted: WeakSet[GlooPending] = WeakSet()
        self._reduces = False
        self._sockets = keepalive.open_sockets() - others
        for number, _ in self._sockets:
            keepalive.notice_silence(number)  # see Note [A link that is silent]
        keepalive.close_when_forked(self)
        self._farewells = {peer: self._group.recv([_byte()], peer, FAREWELL) for peer in world.peers}
        self._watch = HangupWatch(self._sockets, self._look_for_lost)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return self._post(target, lambda group, data: group.send([data], target, tag), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._post(source, lambda group, data: group.recv([data], source, tag), tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Collective. Afterwards `tensor` holds the sum over all workers, in Gloo's order of additions."""
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
        """In an all-reduce all the others: Gloo does not report which one is late."""
        if self._reduces:
            return list(self.world.peers)
        with self._lock:
            return sorted({pending.peer for pending in self._posted if pending.awaited})

    def close(self) -> None:
        group = self._group
        self._watch.close()
        if group is not None:
            if not self._first_gone.known and not self._is_busy():
                self._say_farewell(group)
            self._group = None  # first, so that a wait that fails because of this accuses no peer
            self._end_waits(group)
            group.abort()
            self._first_gone.linger()
        if self._on_loss is not None and self._is_busy():  # some wait may be one that cannot be ended
            self._on_loss(PeerGone(self.world.rank, "the connection was closed here"))
        keepalive.forget(self)

    def close_copies(self) -> None:
        """See Note [Left to another process]. Gloo does not expose its sockets."""
        for number, identity in self._sockets:
            with suppress(OSError):
                if os.fstat(number).st_ino == identity:
                    keepalive.close_copy(number)

    def missed(self, rank: int) -> None:
        """Worker `rank` is gone, as another part of the wire noticed; this one leaves. See Note [The first to go]."""
        self._first_gone.name(rank)

    def _post(self, peer: int, start: Callable[[Any, torch.Tensor], Work], tensor: torch.Tensor) -> GlooPending:
        data = tensor.view(torch.uint8)  # Gloo does not know every dtype, and need not
        try:
            pending = GlooPending(start(self._open_group(peer), data), data, peer, self._failure)
        except RuntimeError as error:
            raise self._failure(peer, error) from error
        with self._lock:
            self._posted.add(pending)
        return pending

    def _is_busy(self) -> bool:
        """Whether there are sends or receives that have not been waited for yet."""
        with self._lock:
            return not all(pending.done for pending in self._posted)

    def _open_group(self, peer: int) -> Any:
        if self._group is None:
            raise PeerGone(peer, "the connection was closed here")
        return self._group

    def _end_waits(self, group: Any) -> None:
        """Gloo's abort ends no wait and closes no connection that a message holds; a wait that times out does both."""
        for peer in self.world.peers:
            with suppress(RuntimeError):
                group.recv([_byte()], peer, PROBE).wait(timedelta(milliseconds=1))

    # -- lost peers -----------------------------------------------------------------------------------------

    def _look_for_lost(self) -> None:
        """A connection was closed, on the thread of the watch. See Note [Farewells]."""
        for peer in [peer for peer in self._farewells if self._is_broken(peer)]:
            try:
                self._farewells.pop(peer).wait()
            except RuntimeError as error:
                self._end_all(peer, error)

    def _end_all(self, lost: int, error: RuntimeError) -> None:
        group = self._group
        if group is not None:
            gone = self._gone(lost, error)
            self._end_waits(group)
            if self._on_loss is not None:
                self._on_loss(gone)

    def _say_farewell(self, group: Any) -> None:
        with suppress(RuntimeError):  # a peer may be gone
            sends = [group.send([_byte()], peer, FAREWELL) for peer in self.world.peers]
            for send in sends:
                send.wait(timedelta(seconds=1))

    def _failure(self, peer: int, error: RuntimeError, what: str = "a message") -> LockstepError:
        """What to raise when an exchange with `peer` has failed. See Note [Lost or refused]."""
        if self._group is None or means_lost_peer(error) or self._is_broken(peer):
            return self._gone(peer, error)
        return WireError(f"{what} between worker {self.world.rank} and {peer} by Gloo", reason(error))

    def _gone(self, peer: int, error: RuntimeError) -> PeerGone:
        """The error that names the worker that was gone first, when `peer` is gone now."""
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
        """Which worker may be gone after a failed collective, which does not name it: the first broken connection's."""
        return next((peer for peer in self.world.peers if self._is_broken(peer)), self.world.peers[0])

    def _is_broken(self, peer: int) -> bool:
        """Called only after a failure: a new receive, for which no message comes, fails at once if the peer is gone."""
        if peer == self.world.rank or self._group is None:
            return False
        try:
            self._group.recv([_byte()], peer, PROBE)
        except RuntimeError:
            return True
        return False


def _byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def _connect(world: World, store: Store, timeout_s: float) -> Any:
    """Collective. Connects all to all at once."""
    own_store = PrefixStore(f"lockstep/gloo/{world.generation}", store)
    limit_s = min(timeout_s, CONNECT_S if world.generation <= 1 else RECONNECT_S)
    try:
        group = _in_time(lambda: _make_group(world, own_store, timedelta(seconds=limit_s)), limit_s + GRACE_S)
        group._set_default_timeout(timedelta(seconds=timeout_s))
        return group
    except RuntimeError as error:
        raise BadEnvironment(_explain(world, error)) from error


def _make_group(world: World, store: Store, limit: timedelta) -> Any:
    if not world.on_one_host:
        return ProcessGroupGloo(store, world.rank, world.size, limit)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, world.rank, world.size, options)


def _in_time(make: Callable[[], Any], limit_s: float) -> Any:
    """What `make` gives. Gloo waits for minutes where a firewall or a broken link drops what it sends, whatever its
    limit says: then its thread is left behind."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            found.put(make())
        except RuntimeError as error:
            found.put(error)

    threading.Thread(target=attempt, name="lockstep-gloo-connects", daemon=True).start()
    try:
        made = found.get(timeout=limit_s)
    except queue.Empty:
        raise RuntimeError(f"not all connections were open after {limit_s:g} s") from None
    if isinstance(made, RuntimeError):
        raise made
    return made


def _explain(world: World, error: RuntimeError) -> str:
    advice = "Check that all workers run"
    if not world.on_one_host:
        advice += (
            "; if they do, set GLOO_SOCKET_IFNAME on every host to the interface that joins them, and see that no "
            "firewall drops the ports that the kernel picks"
        )
    return f"worker {world.rank} cannot reach all others by Gloo: {reason(error)}. {advice}."


def means_lost_peer(error: RuntimeError) -> bool:
    """Whether a backend's error means that a peer is gone. See Note [Lost or refused]."""
    return _LOST.search(str(error)) is not None


def reason(error: RuntimeError) -> str:
    """The backend's own message, without the C++ file name before and the general advice after it."""
    return str(error).split("\n")[0].split(". This is typically")[0].rsplit("] ", 1)[-1]
