"""Messages that must be started together, on transports that need it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from lockstep.wire.transport import Transport


@runtime_checkable
class Batching(Protocol):
    """A transport whose messages block each other unless those of one round are started as one.

    `together()` starts, when left, what was posted inside. A `Pending` may be waited for only after that.
    """

    def together(self) -> AbstractContextManager[None]: ...


def batches(transport: Transport) -> Callable[[], AbstractContextManager[None]]:
    """Gives blocks in which the messages of one round are posted; they have started when the block ends."""
    return transport.together if isinstance(transport, Batching) else nullcontext
