"""Messages over TCP by torch's Gloo: CPU tensors, on one host or several.

# Note [Farewells]
# When a connection breaks, Gloo fails the messages that wait in line for it, but not one that is half received: nothing
# wakes whoever waits for that one before the timeout. So a message is awaited from every peer, on a thread that sleeps,
# that only says farewell: `close` sends it, unless it cuts off messages under way. If the connection breaks before, the
# peer is gone: all waits that can be ended are, and `on_loss` hears of it for those that cannot.

# Note [Sockets of forked processes]
# A process that a worker forks (a DataLoader's) has copies of its sockets, and while it lives the peers would not see
# that the worker has died. It closes its copies. Gloo does not tell its sockets: they are the ones that appeared while
# it connected.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment, PeerGone
from lockstep.wire.network.keepalive import Sockets, let_go, notice_silence, open_sockets
from lockstep.wire.network.process_group import FAREWELL, PROBE, ProcessGroupTransport, reason
from lockstep.world import World

CONNECT_S = 30.0
"""How long connecting may take once all workers are there."""


class GlooTransport(ProcessGroupTransport):
    """Collective to make. Loopback when all workers are on one host; else the interface that torch finds.

    # Note [Which interface]
    # On several hosts torch takes the interfaces that GLOO_SOCKET_IFNAME lists, and else the one whose address this
    # host's name has. Only torch reads the variable, and only when it chooses the interface itself.
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
        others = open_sockets()
        self._on_loss = on_loss
        here = PrefixStore(f"lockstep/gloo/{world.generation}", store)
        connecting = timedelta(seconds=min(timeout_s, CONNECT_S))
        # The pairs are connected at once, all to all.
        try:
            connect = _on_loopback if world.on_one_host else _between_hosts
            group: Any = connect(world, here, connecting)
            group._set_default_timeout(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise BadEnvironment(_explain(world, error)) from error
        super().__init__(world, group, store, lingers=lingers)
        _sockets_of[self] = open_sockets() - others
        for number, _ in _sockets_of[self]:
            notice_silence(number)  # see Note [A link that is silent]
        self._watchers = [self._watch(group, peer) for peer in world.peers]

    def close(self) -> None:
        if self._group is not None and not self._first_gone.known and not self._is_busy():
            self._say_farewell(self._group)
        super().close()
        for watcher in self._watchers:
            watcher.join()
        if self._on_loss is not None and self._is_busy():  # somebody may wait for it who cannot be woken
            self._on_loss(PeerGone(self.world.rank, "the connection was closed here"))
        _sockets_of.pop(self, None)

    def _end(self, group: Any) -> None:
        self._end_waits(group)
        group.abort()

    def _end_waits(self, group: Any) -> None:
        """Gloo's abort ends no wait and closes no connection that a message holds; a wait that times out does both."""
        for peer in self.world.peers:
            with suppress(RuntimeError):
                group.recv([_byte()], peer, PROBE).wait(timedelta(milliseconds=1))

    # -- see Note [Farewells] -------------------------------------------------------------------------------

    def _watch(self, group: Any, peer: int) -> threading.Thread:
        farewell = group.recv([_byte()], peer, FAREWELL)
        watcher = threading.Thread(target=self._await, args=(farewell, peer), name=f"lockstep-gloo-{peer}", daemon=True)
        watcher.start()
        return watcher

    def _await(self, farewell: Work, peer: int) -> None:
        try:
            farewell.wait(timedelta(days=3650))
        except RuntimeError as error:
            group = self._group
            if group is not None:
                gone = self._gone(peer, error)
                self._end_waits(group)
                if self._on_loss is not None:
                    self._on_loss(gone)

    def _say_farewell(self, group: Any) -> None:
        with suppress(RuntimeError):  # a peer may be gone
            sends = [group.send([_byte()], peer, FAREWELL) for peer in self.world.peers]
            for send in sends:
                send.wait(timedelta(seconds=1))


def _byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


_sockets_of: "weakref.WeakKeyDictionary[GlooTransport, Sockets]" = weakref.WeakKeyDictionary()


def _close_in_forked_process() -> None:
    """See Note [Sockets of forked processes]."""
    for sockets in _sockets_of.values():
        for number, identity in sockets:
            with suppress(OSError):
                if os.fstat(number).st_ino == identity:
                    let_go(number)
    _sockets_of.clear()


os.register_at_fork(after_in_child=_close_in_forked_process)


def _on_loopback(world: World, store: Store, timeout: timedelta) -> ProcessGroupGloo:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, world.rank, world.size, options)


def _between_hosts(world: World, store: Store, timeout: timedelta) -> ProcessGroupGloo:
    """See Note [Which interface]."""
    return ProcessGroupGloo(store, world.rank, world.size, timeout)


def _explain(world: World, error: RuntimeError) -> str:
    advice = "Check that all workers run"
    if not world.on_one_host:
        advice += "; if they do, set GLOO_SOCKET_IFNAME on every host to the interface that joins them"
    return f"worker {world.rank} cannot reach all others by Gloo: {reason(error)}. {advice}."
