"""Opens the wire of a world and owns what it holds."""

from dataclasses import dataclass
from types import TracebackType

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lockstep.wire.choice import always, cheapest
from lockstep.wire.executor import Choose, Executor
from lockstep.wire.gloo import Gloo
from lockstep.wire.handover import Handover
from lockstep.wire.hierarchy import Hierarchical
from lockstep.wire.hosts import Hosts, find_hosts
from lockstep.wire.inprocess import InProcess
from lockstep.wire.link import Link, measure
from lockstep.wire.reducer import Reducer
from lockstep.wire.sequence import Background, Inline, Sequence
from lockstep.wire.shared.board import open_board
from lockstep.wire.shared.mailbox import open_mailbox
from lockstep.wire.shared.memory import Memory
from lockstep.wire.shared.neighbours import connect
from lockstep.wire.shared.reducer import SharedMemory
from lockstep.wire.transport import Transport
from lockstep.world import World


@dataclass
class Wire:
    """A transport for small talk, the reducer that adds buckets, and the sequence in which it does.

    `how` says in words what carries the buckets, `link` how fast; there is no link in a world of one. The `store` is
    kept open as long as the wire.
    """

    transport: Transport
    sequence: Sequence
    reducer: Reducer
    how: str = "in process"
    link: Link | None = None
    store: Store | None = None

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


def over_gloo(
    world: World, store: Store, timeout_s: float, *, exact: bool = True, algorithm: str | None = None
) -> Wire:
    """Collective. The wire of several workers, by torch's Gloo; without `exact`, by Gloo's own all-reduce."""
    sequence = Background()
    transport = Gloo(world, store, timeout_s, sequence.fail)
    if not exact and algorithm is None:
        handover = Handover(transport)
        return Wire(transport, sequence, handover, "Gloo's all-reduce", measure(handover, transport), store)
    link = measure(Executor(transport), transport)
    reducer = Executor(transport, _choice(algorithm, link))
    return Wire(transport, sequence, reducer, f"Gloo, {algorithm or 'cheapest algorithm'}", link, store)


def in_shared_memory(world: World, store: Store, timeout_s: float) -> Wire:
    """Collective. The wire of several workers on one host: messages and buckets in shared memory."""
    own_store = PrefixStore(f"lockstep/shared/{world.generation}", store)
    memory = Memory(connect(world, range(world.size), own_store, timeout_s))
    transport = open_mailbox(memory, world)
    reducer = SharedMemory(open_board(memory), Executor(transport), world.rank)
    return Wire(transport, Background(), reducer, "shared memory", measure(reducer, transport), store)


def over_hosts(
    world: World, store: Store, timeout_s: float, *, algorithm: str | None = None, hosts: Hosts | None = None
) -> Wire:
    """Collective. The wire of workers on several hosts: shared memory inside a host, Gloo between hosts.

    The hosts are found out; whoever knows better gives them.
    """
    sequence = Background()
    transport = Gloo(world, store, timeout_s, sequence.fail)
    own_store = PrefixStore(f"lockstep/hosts/{world.generation}", store)
    hosts = hosts or find_hosts(world.rank, world.size, own_store)
    members = next(ranks for ranks in hosts if world.rank in ranks)
    memory = Memory(connect(world, members, own_store, timeout_s))
    network = Executor(transport)
    link = measure(network, transport)
    reducer = Hierarchical(open_board(memory), transport, hosts, _choice(algorithm, link), network)
    how = f"shared memory on {len(hosts)} hosts, Gloo between them, {algorithm or 'cheapest algorithm'}"
    return Wire(transport, sequence, reducer, how, link, store)


def _choice(algorithm: str | None, link: Link) -> Choose:
    return cheapest(link) if algorithm is None else always(algorithm)
