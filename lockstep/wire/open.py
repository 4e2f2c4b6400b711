"""Opens the wire of a world and owns what it holds."""

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment, PeerGone
from lockstep.wire.choice import always, cheapest
from lockstep.wire.cuda.counters import open_counters
from lockstep.wire.cuda.gpu import Gpu, GpuWatchdog, RemotePeers
from lockstep.wire.cuda.ipc import GpuMemoryReducer
from lockstep.wire.cuda.nccl import NcclGroup, check_available
from lockstep.wire.cuda.slices import SliceReducer
from lockstep.wire.cuda.stream import StreamQueue
from lockstep.wire.link import Link, measure
from lockstep.wire.network.deadline import Deadline, do_nothing
from lockstep.wire.network.gloo import GlooTransport
from lockstep.wire.network.hierarchical import HierarchicalReducer
from lockstep.wire.network.hosts import find_hosts
from lockstep.wire.network.native import NativeAllReduce
from lockstep.wire.network.routed import RoutedTransport
from lockstep.wire.reducer import Reducer
from lockstep.wire.reduction_queue import InlineQueue, ReductionQueue, ThreadQueue
from lockstep.wire.schedules.executor import Choose, Executor
from lockstep.wire.shared.board import open_board
from lockstep.wire.shared.mailbox import Mailbox, open_mailbox
from lockstep.wire.shared.memory import HostMemory
from lockstep.wire.shared.neighbours import Neighbours, connect
from lockstep.wire.shared.reducer import SharedMemoryReducer
from lockstep.wire.transport import Hosts, InProcess, Transport
from lockstep.world import World


@dataclass(frozen=True)
class Wire:
    """A transport for small messages, the reducer that adds buckets, and the queue of its reductions.

    `how` describes what carries the buckets, `link` how fast it is; there is no link in a world of one. The `store` is
    kept open as long as the wire. `host` is the memory that this worker shares with others on its host; over Gloo alone
    there is none. `shares_gpus`: several workers may have one GPU.
    """

    transport: Transport
    sequence: ReductionQueue
    reducer: Reducer
    how: str = "in process"
    link: Link | None = None
    store: Store | None = None
    host: HostMemory | None = None
    shares_gpus: bool = True

    @property
    def world(self) -> World:
        return self.transport.world

    @property
    def host_members(self) -> tuple[int, ...]:
        """The ranks with which this worker shares memory, its own too, in order."""
        return (self.world.rank,) if self.host is None else self.host.neighbours.members

    def awaited(self) -> list[int]:
        """The workers for which this one waits now, in order. Any thread, at any time; sends no message."""
        return sorted({*self.transport.awaited(), *self.reducer.awaited()})

    def close(self) -> None:
        self.transport.close()
        self.reducer.close()
        self.sequence.close()
        if self.host is not None:  # between hosts over NCCL no reducer uses it, and closes it
            self.host.neighbours.close()
            self.host.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class WireOptions:
    """Which wire a run uses, and how. `kind` is "shared", "hierarchical" or "gloo"; on GPUs "gpu", "nccl" or "cuda".

    "cuda" is one of the other two, as the workers' GPUs are. `algorithm` is for messages between CPUs. `nccl_host` is
    what NCCL takes this host for: it takes one GPU of one host for one worker only.
    """

    kind: str
    timeout_s: float
    device: torch.device
    exact: bool = True
    algorithm: str | None = None
    nccl_host: str = field(default_factory=platform.node)


def open_wire(options: WireOptions, world: World, store: Store, watch: Callable[[], None] | None = None) -> Wire:
    """Collective. The wire of `world`, whose workers meet at `store`. See `over_gloo` for `watch`."""
    timeout_s, device, exact, host = options.timeout_s, options.device, options.exact, options.nccl_host
    if world.size == 1:
        return in_process(world)
    match options.kind:
        case "gpu":
            return in_gpu_memory(world, store, timeout_s, device, watch=watch)
        case "nccl":
            return over_nccl(world, store, timeout_s, device, exact=exact, watch=watch, host=host)
        case "cuda":
            return over_gpus(world, store, timeout_s, device, exact=exact, watch=watch, host=host)
        case "shared":
            return in_shared_memory(world, store, timeout_s, watch=watch)
        case "hierarchical":
            return over_hosts(world, store, timeout_s, algorithm=options.algorithm, watch=watch)
        case _:
            return over_gloo(world, store, timeout_s, exact=exact, algorithm=options.algorithm, watch=watch)


def in_process(world: World | None = None) -> Wire:
    transport = InProcess(world)
    return Wire(transport, InlineQueue(), Executor(transport))


def over_gloo(
    world: World,
    store: Store,
    timeout_s: float,
    *,
    exact: bool = True,
    algorithm: str | None = None,
    watch: Callable[[], None] | None = None,
) -> Wire:
    """Collective. The wire of several workers, by torch's Gloo; without `exact`, by Gloo's own all-reduce.

    Here and below, `watch` is called while this worker waits for others; it raises PeerGone if one of them is lost. A
    worker with a `watch` finds out by itself which one is gone, also later.
    """
    with ExitStack() as opened:
        sequence = ThreadQueue()
        opened.callback(sequence.close)
        transport = _gloo(world, store, timeout_s, watch, opened, sequence.fail)
        if not exact and algorithm is None:
            native = NativeAllReduce(transport)
            wire = Wire(transport, sequence, native, "Gloo's all-reduce", measure(native, transport), store)
        else:
            link = measure(Executor(transport), transport)
            reducer = Executor(transport, _choice(algorithm, link))
            wire = Wire(transport, sequence, reducer, f"Gloo, {algorithm or 'cheapest algorithm'}", link, store)
        opened.pop_all()
        return wire


def in_shared_memory(world: World, store: Store, timeout_s: float, *, watch: Callable[[], None] | None = None) -> Wire:
    """Collective. The wire of several workers on one host: messages and buckets in shared memory."""
    own_store = PrefixStore(f"lockstep/shared/{world.generation}", store)
    with ExitStack() as opened:
        _, transport, reducer = _on_host(world, own_store, timeout_s, watch, opened)
        link = measure(reducer, transport)
        opened.pop_all()
    return Wire(transport, ThreadQueue(), reducer, "shared memory", link, store, reducer.board.memory)


def in_gpu_memory(
    world: World, store: Store, timeout_s: float, device: torch.device, *, watch: Callable[[], None] | None = None
) -> Wire:
    """Collective. The wire of workers on one host with GPUs: messages in shared memory, buckets in GPU memory."""
    own_store = PrefixStore(f"lockstep/gpus/{world.generation}", store)
    with ExitStack() as opened:
        neighbours, transport, shared = _on_host(world, own_store, timeout_s, watch, opened)
        counters = open_counters(shared.board.memory, device)
        watchdog = GpuWatchdog(neighbours, counters.release, counters.behind)
        reducer = GpuMemoryReducer(Gpu(device), counters, transport, watchdog, shared)
        opened.callback(reducer.close)
        link = measure(reducer, transport, device=device)
        sequence = StreamQueue(device)
        opened.pop_all()
    return Wire(transport, sequence, reducer, "GPU memory", link, store, shared.board.memory)


def over_gpus(
    world: World,
    store: Store,
    timeout_s: float,
    device: torch.device,
    *,
    exact: bool = True,
    watch: Callable[[], None] | None = None,
    host: str | None = None,
) -> Wire:
    """Collective. NCCL if each worker has a GPU of its own; else, on one host, GPU memory: NCCL shares none.

    Here and below, `host` is what NCCL takes this host for, if not its name.
    """
    gpus = set(_gpus(world, store, Deadline(timeout_s, watch or do_nothing), device, host))
    if len(gpus) == world.size:
        return over_nccl(world, store, timeout_s, device, exact=exact, watch=watch, host=host)
    if not world.on_one_host:
        raise BadEnvironment(
            f"{world.size} workers on several hosts share {len(gpus)} GPUs, which NCCL refuses: start as many workers "
            "on each host as it has GPUs"
        )
    return in_gpu_memory(world, store, timeout_s, device, watch=watch)


def over_nccl(
    world: World,
    store: Store,
    timeout_s: float,
    device: torch.device,
    *,
    exact: bool = True,
    watch: Callable[[], None] | None = None,
    host: str | None = None,
) -> Wire:
    """Collective. The wire of workers with a GPU each: buckets by NCCL, messages in shared memory or, between hosts, by
    Gloo; without `exact`, buckets are added by NCCL's own all-reduce.
    """
    own_store = PrefixStore(f"lockstep/nccl/{world.generation}", store)
    with ExitStack() as opened:
        check_available()
        refuse_shared(_gpus(world, store, Deadline(timeout_s, watch or do_nothing), device, host))
        group = NcclGroup(world, device)
        sequence = StreamQueue(device)
        opened.callback(sequence.close)
        opened.callback(group.abort)
        transport: Transport
        cpu_reducer: Reducer
        if world.on_one_host:
            neighbours, transport, shared = _on_host(world, own_store, timeout_s, watch, opened)
            cpu_reducer, memory = shared, shared.board.memory
            watchdog = GpuWatchdog(neighbours, group.abort, list)
        else:
            peers = RemotePeers(world, timeout_s)

            def on_loss(gone: PeerGone) -> None:
                sequence.fail(gone)
                peers.report(gone)

            transport = _gloo(world, store, timeout_s, watch, opened, on_loss)
            cpu_reducer = Executor(transport)
            _, memory = _host_memory(world, own_store, timeout_s, watch, opened)
            watchdog = GpuWatchdog(peers, group.abort, list)
        opened.callback(watchdog.close)
        group.connect(transport, watchdog)
        reducer = SliceReducer(group, watchdog, cpu_reducer, exact=exact)
        opened.callback(reducer.close)
        link = measure(reducer, transport, device=device)
        opened.pop_all()
    how = "NCCL" if exact else "NCCL's all-reduce"
    return Wire(transport, sequence, reducer, how, link, store, memory, shares_gpus=False)


def refuse_shared(gpus: Sequence[str]) -> None:
    """Raises if two workers, whose GPUs are given by rank, have the same one."""
    shared = {gpu: [rank for rank, other in enumerate(gpus) if other == gpu] for gpu in gpus}
    ranks = next((ranks for ranks in shared.values() if len(ranks) > 1), None)
    if ranks is not None:
        raise BadEnvironment(
            f"NCCL needs a GPU for each worker, and workers {', '.join(map(str, ranks))} have the same one: start as "
            'many workers on each host as it has GPUs, or say wire="gpu", where workers of one host may share one'
        )


def _gpus(world: World, store: Store, deadline: Deadline, device: torch.device, host: str | None) -> list[str]:
    """Collective. The GPU of every worker, by rank, with its host: a launcher may show each of them one, as cuda:0."""
    own_store = PrefixStore(f"lockstep/whose/{world.generation}", store)
    own_store.set(str(world.rank), f"{host or platform.node()} {torch.cuda.get_device_properties(device).uuid}")
    for rank in range(world.size):
        deadline.await_key(own_store, str(rank))
    return [bytes(own_store.get(str(rank))).decode() for rank in range(world.size)]


def over_hosts(
    world: World,
    store: Store,
    timeout_s: float,
    *,
    algorithm: str | None = None,
    hosts: Hosts | None = None,
    watch: Callable[[], None] | None = None,
) -> Wire:
    """Collective. The wire of workers on several hosts: shared memory inside a host, Gloo between hosts.

    The hosts are found out, unless they are given.
    """
    own_store = PrefixStore(f"lockstep/hosts/{world.generation}", store)
    with ExitStack() as opened:
        sequence = ThreadQueue()
        opened.callback(sequence.close)
        transport = _gloo(world, store, timeout_s, watch, opened, sequence.fail)
        hosts, memory = _host_memory(world, own_store, timeout_s, watch, opened, hosts)
        network = Executor(transport)
        link = measure(network, transport)
        mailbox = open_mailbox(memory, world)
        reducer = HierarchicalReducer(open_board(memory), transport, hosts, _choice(algorithm, link), network)
        opened.pop_all()
    how = f"shared memory on {len(hosts)} hosts, Gloo between them, {algorithm or 'cheapest algorithm'}"
    return Wire(RoutedTransport(transport, mailbox, hosts), sequence, reducer, how, link, store, memory)


def _on_host(
    world: World, store: Store, timeout_s: float, watch: Callable[[], None] | None, opened: ExitStack
) -> tuple[Neighbours, Mailbox, SharedMemoryReducer]:
    """Collective. What the workers of one host share: connections, messages, and the reducer for the CPU."""
    _, memory = _host_memory(world, store, timeout_s, watch, opened, (tuple(range(world.size)),))
    transport = open_mailbox(memory, world)
    return memory.neighbours, transport, SharedMemoryReducer(open_board(memory), Executor(transport), world.rank)


def _host_memory(
    world: World,
    store: Store,
    timeout_s: float,
    watch: Callable[[], None] | None,
    opened: ExitStack,
    hosts: Hosts | None = None,
) -> tuple[Hosts, HostMemory]:
    """Collective. The workers of each host, found out unless they are given, and the memory of this one's."""
    hosts = hosts or find_hosts(world.rank, world.size, store)
    members = next(ranks for ranks in hosts if world.rank in ranks)
    neighbours = connect(world, members, store, timeout_s, watch or do_nothing)
    opened.callback(neighbours.close)
    memory = HostMemory(neighbours)
    opened.callback(memory.close)
    return hosts, memory


def _gloo(
    world: World,
    store: Store,
    timeout_s: float,
    watch: Callable[[], None] | None,
    opened: ExitStack,
    on_loss: Callable[[PeerGone], None],
) -> GlooTransport:
    """Collective. Gloo connects all to all in one call that cannot be interrupted, so all workers must arrive first."""
    arrivals = PrefixStore(f"lockstep/arrivals/{world.generation}", store)
    deadline = Deadline(timeout_s, watch or do_nothing)
    arrivals.set(str(world.rank), "")
    for rank in range(world.size):
        deadline.await_key(arrivals, str(rank))
    transport = GlooTransport(world, store, timeout_s, on_loss, lingers=watch is None)
    opened.callback(transport.close)
    return transport


def _choice(algorithm: str | None, link: Link) -> Choose:
    return cheapest(link) if algorithm is None else always(algorithm)
