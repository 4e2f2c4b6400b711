"""The interface by which the wire moves bytes. One file per variant; one conformance suite for all."""

from typing import Protocol

import torch

from lockstep.world import World

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of the workers on each host; hosts in the order of their lowest rank."""


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Waits until the tensor may be reused (send) or read (receive). Raises PeerGone if the peer died."""


class Transport(Protocol):
    """Point-to-point messages between the workers of one world.

    Messages from one worker to another with the same tag arrive in the order they were sent. A tensor is one
    flat, contiguous piece of memory; both sides know its size. `send` and `receive` return at once and may be
    called from any thread; a tensor must not be touched until its `Pending` was waited for.
    """

    world: World
    hosts: Hosts
    """Which workers have cheap messages to each other; the same on all of them, and the same object always."""

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending: ...

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending: ...

    def awaited(self) -> list[int]:
        """The workers for which any thread of this one waits now: in order, each once. Any thread; sends no message."""

    def close(self) -> None:
        """Frees sockets and threads; fails the waits that are still open, on any thread. May be called twice."""


def each_alone(size: int) -> Hosts:
    """The hosts of workers none of which shares memory with another."""
    return tuple((rank,) for rank in range(size))


class InProcess:
    """The Transport of a world of one: there is no peer to send to, and every collective is already finished."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()
        self.hosts = each_alone(self.world.size)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        raise ValueError(f"a world of one worker has no worker {target}")

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        raise ValueError(f"a world of one worker has no worker {source}")

    def awaited(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


# Note [Tags]
# Each stream of messages has its own tag, so that streams cannot be taken for one another: small messages run
# ahead of the data and beside it, and synchronised batch norm communicates in the middle of a backward pass.
CONTROL, DATA, STATISTICS, SNAPSHOT, COMMIT = 1, 2, 3, 4, 5
