"""Opens the wire of a world and owns what it holds."""

from dataclasses import dataclass
from types import TracebackType

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lockstep.wire.executor import Executor
from lockstep.wire.gloo import Gloo
from lockstep.wire.inprocess import InProcess
from lockstep.wire.neighbours import connect
from lockstep.wire.reducer import Reducer
from lockstep.wire.sequence import Background, Inline, Sequence
from lockstep.wire.sharedmemory import SharedMemory
from lockstep.wire.transport import Transport
from lockstep.world import World


@dataclass
class Wire:
    """A transport for small talk, the reducer that adds buckets, and the sequence in which it does."""

    transport: Transport
    sequence: Sequence
    reducer: Reducer

    @property
    def world(self) -> World:
        return self.transport.world

    def close(self) -> None:
        self.transport.close()
        self.reducer.close()
        self.sequence.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def in_process() -> Wire:
    """The wire of a world of one worker."""
    transport = InProcess()
    return Wire(transport, Inline(), Executor(transport))


def over_gloo(world: World, store: Store, timeout_s: float) -> Wire:
    """Collective. The wire of several workers, by torch's Gloo."""
    transport = Gloo(world, store, timeout_s)
    return Wire(transport, Background(), Executor(transport))


def in_shared_memory(world: World, store: Store, timeout_s: float) -> Wire:
    """Collective. The wire of several workers on one host: small talk by Gloo, buckets in shared memory."""
    transport = Gloo(world, store, timeout_s)
    neighbours = connect(world, PrefixStore(f"lockstep/shared/{world.generation}", store), timeout_s)
    return Wire(transport, Background(), SharedMemory(neighbours, Executor(transport), world.rank))
