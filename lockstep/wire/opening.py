"""Opens the wire of a world and owns what it holds."""

from dataclasses import dataclass
from types import TracebackType

from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.wire.executor import Executor
from lockstep.wire.gloo import Gloo
from lockstep.wire.inprocess import InProcess
from lockstep.wire.sequence import Background, Inline, Sequence
from lockstep.wire.transport import Transport
from lockstep.world import World


@dataclass
class Wire:
    """A transport, the executor that runs schedules over it, and the sequence its exchanges keep."""

    transport: Transport
    sequence: Sequence
    executor: Executor

    @property
    def world(self) -> World:
        return self.transport.world

    def close(self) -> None:
        self.transport.close()
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
