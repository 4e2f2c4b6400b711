"""A wire whose waits for other workers are events: who keeps the others waiting is then found and named."""

from dataclasses import dataclass, replace

import torch

from lockstep.events import Events, Wait
from lockstep.wire import Wire
from lockstep.wire.transport import Pending, Transport
from lockstep.world import World


def shown(wire: Wire, events: Events, wait: Wait) -> Wire:
    """The same wire, for a call outside of reductions. What a worker does between two waits is its own."""
    return replace(wire, transport=_Shown(wire.transport, events, wait))


class _Shown:
    """A transport whose waits are shown."""

    def __init__(self, transport: Transport, events: Events, wait: Wait) -> None:
        self._transport, self._events, self._wait = transport, events, wait
        self.world: World = transport.world
        self.hosts = transport.hosts

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return _ShownPending(self._transport.send(tensor, target, tag), self._events, self._wait)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return _ShownPending(self._transport.receive(tensor, source, tag), self._events, self._wait)

    def awaited(self) -> list[int]:
        return self._transport.awaited()

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True)
class _ShownPending:
    pending: Pending
    events: Events
    at: Wait

    def wait(self) -> None:
        with self.events.waiting(self.at):
            self.pending.wait()
