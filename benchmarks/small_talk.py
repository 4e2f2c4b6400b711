"""What the small talk of a step costs: the exchange of its record among all workers, and putting the records together.

    python benchmarks/small_talk.py --workers 16,64 --parameters 500

Real processes in shared memory on this host: records sent directly to all, and in rounds, in turn, in one run; both
must give the same records. Then, without processes, what the busiest worker of a large world spends on its own part:
messages, bytes and rounds of the way that records take, on hosts of so many workers (`--on-a-host`), and the time to
pack, read and merge all records. Messages are there at once.
"""

import argparse
import importlib
import json
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.elastic.rendezvous import open_store
from lockstep.gradients.record import StepRecord
from lockstep.settings.environments.place import LaunchPlace
from lockstep.wire import WireOptions, open_wire
from lockstep.wire.route import route_of
from lockstep.wire.transport import Hosts
from lockstep.world import World

exchanging = importlib.import_module("lockstep.wire.exchange")  # the room's name for it is that of a function
SIDES = {"direct": 1 << 30, "in rounds": 1}
ROUNDS, BLOCK = 9, 40


def record(rank: int, size: int, num_parameters: int) -> StepRecord:
    """Of a worker that carries one lane."""
    made = StepRecord.empty(size, num_parameters, 0)
    made.weights[rank], made.losses[rank] = 1.0, float(rank)
    made.used = [number % 3 != rank % 3 for number in range(num_parameters)]
    made.health = bytes(16)
    return made


@contextmanager
def side(name: str) -> Iterator[None]:
    before = exchanging.MOST_DIRECT
    exchanging.MOST_DIRECT = SIDES[name]
    yield
    exchanging.MOST_DIRECT = before


def worker(rank: int, size: int, port: int, listen_fd: int | None, num_parameters: int) -> dict[str, list[float]]:
    """Milliseconds of an exchange with its merge: a median of BLOCK for each round of each side."""
    torch.set_num_threads(1)
    place = LaunchPlace("bench", World(rank, size, rank, size), "127.0.0.1", port, listen_fd)
    options = WireOptions("shared", 120.0, torch.device("cpu"), True, None)
    wire = open_wire(options, place.world, open_store(place, 120.0))

    def talk() -> StepRecord:
        mine = record(rank, size, num_parameters)
        packed = mine.pack(1)
        records = exchanging.exchange_with_peers(wire.transport, lambda: packed)
        mine.merge(rank, records)
        return mine

    found = {}
    for name in SIDES:
        with side(name):
            found[name] = talk()
    assert found["direct"] == found["in rounds"], "the two sides gave different records"
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(ROUNDS):
        for name in SIDES:
            with side(name):
                took = []
                for _ in range(BLOCK):
                    began = time.perf_counter()
                    talk()
                    took.append(1e3 * (time.perf_counter() - began))
                times[name].append(statistics.median(took))
    wire.close()
    return times


def on_processes(size: int, num_parameters: int) -> dict[str, list[float]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, pipes = listener.getsockname()[1], []
    for rank in range(size):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                listen_fd = os.dup(listener.fileno()) if rank == 0 else None
                listener.close()
                times = worker(rank, size, port, listen_fd, num_parameters)
                os.write(writer, json.dumps(times).encode())
            except BaseException:  # noqa: BLE001 - a child that has nowhere to raise it
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(writer)
        pipes.append(reader)
    listener.close()
    found = [json.loads(b"".join(iter(lambda reader=reader: os.read(reader, 65536), b""))) for reader in pipes]
    for _ in range(size):
        os.wait()
    return {name: [max(one[name][number] for one in found) for number in range(ROUNDS)] for name in SIDES}


class Echo:
    """Stands in for a transport: every message is there at once, and is counted."""

    def __init__(self, rank: int, hosts: Hosts) -> None:
        self.world, self.hosts = World(rank, sum(map(len, hosts))), hosts
        self.num_messages = self.num_bytes = 0

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> "Echo":
        self.num_messages += 1
        self.num_bytes += tensor.numel()
        return self

    receive = send

    def wait(self) -> None:
        pass


def num_rounds(hosts: Hosts) -> int:
    """How many messages follow one another: up the tree of the largest host, between hosts, and down."""
    last = max((members for members in hosts), key=len)[-1]
    depth, route = 0, route_of(hosts, last)
    while route.parent is not None:
        depth, route = depth + 1, route_of(hosts, route.parent)
    return 2 * depth + len(route.hops)


def own_part(size: int, num_parameters: int, on_a_host: int) -> dict[str, float]:
    """What worker 0 of `size` does in a step: the first of its host, as busy as any."""
    hosts = tuple(tuple(range(first, min(size, first + on_a_host))) for first in range(0, size, on_a_host))
    packed = record(1, size, num_parameters).pack(1)
    mine_alone = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    times = []
    for _ in range(5):
        transport, mine = Echo(0, hosts), record(0, size, num_parameters)
        began = time.process_time()
        mine.pack(1)
        records = exchanging.RoutedExchange(transport, mine_alone, 1).wait_for_bytes()  # type: ignore[arg-type]
        times.append(1e3 * (time.process_time() - began))
        began = time.process_time()
        mine.merge(0, dict(zip(range(1, size), [packed] * (len(records) - 1), strict=True)))
        times[-1] += 1e3 * (time.process_time() - began)
    hops = route_of(hosts, 0).hops
    return {
        "hosts": len(hosts),
        "rounds": num_rounds(hosts),
        "messages": transport.num_messages,
        "KiB": transport.num_bytes / 1024,
        "of them between hosts": sum(hop.num_sent + hop.stop - hop.first for hop in hops) * len(packed) / 1024,
        "ms of its own": statistics.median(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,16", help="numbers of real processes; '' for none")
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--on-a-host", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = {}
    for size in map(int, filter(None, asked.workers.split(","))):
        times = on_processes(size, asked.parameters)
        ratios = sorted(one / other for one, other in zip(times["direct"], times["in rounds"], strict=True))
        rows[size] = {**{name: statistics.median(of) for name, of in times.items()}, "ratios": ratios}
        print(
            f"{size} processes: direct {rows[size]['direct']:.2f} ms, in rounds {rows[size]['in rounds']:.2f} ms; "
            f"direct ÷ rounds {statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})",
            file=sys.stderr,
        )
    sizes = (16, 64, 256, 1024, 4096)
    parts = {(n, size): own_part(size, asked.parameters, n) for n in (1, asked.on_a_host) for size in sizes}
    if asked.json:
        print(json.dumps({"processes": rows, "own part": [(*key, part) for key, part in parts.items()]}))
        return
    for (on_a_host, size), part in parts.items():
        print(
            f"one of {size} workers, {on_a_host} on a host: "
            + ", ".join(f"{name} {number:.4g}" for name, number in part.items())
        )


if __name__ == "__main__":
    main()
