"""Messages between workers of several hosts: through shared memory inside a host, over the network between hosts."""

from dataclasses import dataclass

import torch

from lockstep.errors import PeerGone
from lockstep.wire.network.gloo import GlooTransport
from lockstep.wire.shared.mailbox import Mailbox
from lockstep.wire.transport import Hosts, Pending


@dataclass(frozen=True)
class ReportedPending:
    """A message under way; that its peer is gone is reported to the workers of this host, and to the others."""

    pending: Pending
    transport: "RoutedTransport"

    def wait(self) -> None:
        try:
            self.pending.wait()
        except PeerGone as gone:
            self.transport.report(gone)
            raise


class RoutedTransport:
    """A Transport over both; it owns them, and the owner of the shared memory closes that."""

    def __init__(self, network: GlooTransport, mailbox: Mailbox, hosts: Hosts) -> None:
        self.world, self.hosts = network.world, hosts
        self._network, self._mailbox = network, mailbox
        self._near = frozenset(next(members for members in hosts if self.world.rank in members))

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return ReportedPending(self._to(target).send(tensor, target, tag), self)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return ReportedPending(self._to(source).receive(tensor, source, tag), self)

    def awaited(self) -> list[int]:
        return sorted({*self._network.awaited(), *self._mailbox.awaited()})

    def close(self) -> None:
        self._network.close()
        self._mailbox.close()

    def report(self, gone: PeerGone) -> None:
        """This worker leaves because of that one: see Note [Who has died] in shared/neighbours.py."""
        self._mailbox.accuse(gone.rank)
        self._network.missed(gone.rank)

    def _to(self, peer: int) -> GlooTransport | Mailbox:
        return self._mailbox if peer in self._near else self._network
