"""What the small talk of a step costs: the exchange of its record among all workers, and putting the records together.

    python benchmarks/small_talk.py --workers 16,64 --parameters 500

Real processes in shared memory on this host: records sent directly to all, and in rounds, in turn, in one run; both
must give the same records. Then, without processes, what one worker of a large world spends on its own part: messages,
rounds, and the time to pack, read and merge all records.
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
from lockstep.wire.transport import each_alone
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

    def __init__(self, size: int) -> None:
        self.world, self.hosts, self.num_messages = World(0, size, 0, size), each_alone(size), 0

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> "Echo":
        self.num_messages += 1
        return self

    receive = send

    def wait(self) -> None:
        pass


def own_part(size: int, num_parameters: int) -> dict[str, float]:
    """What one worker of `size` does in a step."""
    packed = record(1, size, num_parameters).pack(1)
    whole = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    found: dict[str, float] = {"bytes": len(packed)}
    for name in SIDES:
        with side(name):
            times = []
            for _ in range(5):
                transport, mine = Echo(size), record(0, size, num_parameters)
                began = time.perf_counter()
                mine.pack(1)
                exchanging.exchange(transport, whole)  # type: ignore[arg-type]
                mine.merge(0, dict.fromkeys(range(1, size), packed))
                times.append(1e3 * (time.perf_counter() - began))
            found |= {f"{name}, ms": statistics.median(times), f"{name}, messages": transport.num_messages}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,16")
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = {}
    for size in map(int, asked.workers.split(",")):
        times = on_processes(size, asked.parameters)
        ratios = sorted(one / other for one, other in zip(times["direct"], times["in rounds"], strict=True))
        rows[size] = {**{name: statistics.median(of) for name, of in times.items()}, "ratios": ratios}
        print(
            f"{size} processes: direct {rows[size]['direct']:.2f} ms, in rounds {rows[size]['in rounds']:.2f} ms; "
            f"direct ÷ rounds {statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})",
            file=sys.stderr,
        )
    parts = {size: own_part(size, asked.parameters) for size in (16, 64, 256, 1024, 4096)}
    if asked.json:
        print(json.dumps({"processes": rows, "own part": parts}))
        return
    for size, part in parts.items():
        print(f"one of {size} workers: " + ", ".join(f"{name} {number:.4g}" for name, number in part.items()))


if __name__ == "__main__":
    main()
