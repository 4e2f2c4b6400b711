"""Waits for other workers, as they show on the status page: whoever keeps others waiting is then found and named."""

from dataclasses import dataclass, replace

import torch

from lockstep.launch.status import Collective, NoStatus, StatusWriter
from lockstep.wire import Wire
from lockstep.wire.transport import Pending, Transport
from lockstep.world import World


@dataclass(frozen=True)
class Waits:
    """A wire, and the page on which waits of its transport are shown."""

    wire: Wire
    status: StatusWriter | NoStatus

    def at(self, call: Collective) -> Wire:
        """The wire as it is now, for a call outside of reductions. What a worker does between two waits is its own."""
        return replace(self.wire, transport=_Shown(self.wire.transport, self.status, call))


class _Shown:
    """A transport whose waits are shown."""

    def __init__(self, transport: Transport, status: StatusWriter | NoStatus, call: Collective) -> None:
        self._transport, self._status, self._call = transport, status, call
        self.world: World = transport.world

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return _ShownPending(self._transport.send(tensor, target, tag), self._status, self._call)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return _ShownPending(self._transport.receive(tensor, source, tag), self._status, self._call)

    def awaited(self) -> list[int]:
        return self._transport.awaited()

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True)
class _ShownPending:
    pending: Pending
    status: StatusWriter | NoStatus
    call: Collective

    def wait(self) -> None:
        with self.status.awaiting(self.call):
            self.pending.wait()
