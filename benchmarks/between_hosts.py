"""What the sum of one large bucket costs between hosts of a limited bandwidth, against the least that it can cost.

    sudo python benchmarks/between_hosts.py --hosts 2 --workers 1,2 --mbit 1000,10000 --mib 100

Hosts are network namespaces of this machine, each limited in what it sends. In every round all sides are timed in turn:
lockstep's wire between hosts, in float32 and, as with `reduce_dtype="bfloat16"`, in half the bytes; Gloo's all-reduce
over the workers of all hosts, whole, and in pieces that are under way at once on sockets of their own (the best of
these is its number); and plain TCP, where every host sends and receives as much at once as an all-reduce must. The
limit is what a host must send, 2·(H-1)/H·P bytes of float32, at the bandwidth. Every sum is checked. Needs root.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import MSG_WAITALL, create_connection, create_server
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from lockstep.elastic.rendezvous import open_store
from lockstep.lanes import Assignment, reduction
from lockstep.settings.environment import find_place
from lockstep.wire.exchange import exchange
from lockstep.wire.open import Wire, over_hosts

MiB = 1024 * 1024
PORT, TCP_PORT, INTERFACE = 29500, 29600, "lan0"
PIECES = (1, 2, 4, 8)
TIMEOUT_S = 300.0
Operation = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """Hosts with as many workers each, what each may send, and how large the bucket is."""

    hosts: int
    workers: int
    mbit: int
    mib: int
    rounds: int

    @property
    def limit_ms(self) -> float:
        return 2 * (self.hosts - 1) / self.hosts * self.mib * MiB * 8 / self.mbit / 1000


# -- in a worker ------------------------------------------------------------------------------------------------------


def work(setting: Setting) -> None:
    """Collective. Prints, on worker 0, the milliseconds of every side in every round."""
    torch.set_num_threads(1)
    place = find_place(os.environ)
    store = open_store(place, TIMEOUT_S)
    with over_hosts(place.world, store, TIMEOUT_S) as wire:
        sides = {
            "lockstep": _lockstep(wire, setting, torch.float32),
            "lockstep bf16": _lockstep(wire, setting, torch.bfloat16),
            **_gloo(wire, PrefixStore("bench", store), setting),
        }
        if setting.workers == 1:
            sides["tcp"] = _tcp(wire.world.rank, setting)
        found: dict[str, list[float]] = {}
        for round_number in range(setting.rounds + 1):
            for name, side in sides.items():
                taken_ms = _timed(wire, side)
                if round_number > 0:  # the first one connects and maps
                    found.setdefault(name, []).append(taken_ms)
        if wire.world.rank == 0:
            print(json.dumps(found), flush=True)


def _timed(wire: Wire, side: Operation) -> float:
    """Milliseconds of the slowest worker; all begin together."""
    exchange(wire.transport, torch.zeros(1, dtype=torch.uint8))
    began_s = time.perf_counter()
    side()
    mine = torch.tensor([1000 * (time.perf_counter() - began_s)], dtype=torch.float64).view(torch.uint8)
    return max(float(taken.view(torch.float64)) for taken in exchange(wire.transport, mine))


def _lockstep(wire: Wire, setting: Setting, dtype: torch.dtype) -> Operation:
    """As many gradients in any dtype: in bfloat16 they have half the bytes."""
    size, rank = wire.world.size, wire.world.rank
    whole = reduction(Assignment.even(size, size), tuple(range(size)))
    bucket = wire.reducer.allocate(setting.mib * MiB // 4, dtype, torch.device("cpu"))

    def operate() -> None:
        bucket[::4096] = rank + 1.0
        wire.reducer.reduce(whole, [bucket], bucket)
        assert bool((bucket[::4096] == size * (size + 1) / 2).all()), "the sum is wrong"

    bucket.fill_(rank + 1.0)
    return operate


def _gloo(wire: Wire, store: Any, setting: Setting) -> dict[str, Operation]:
    """Gloo takes its contexts, each with its own sockets, one after the other: one for each piece under way."""
    world = wire.world
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = timedelta(seconds=TIMEOUT_S), max(PIECES)
    options._devices = [ProcessGroupGloo.create_device(interface=INTERFACE) for _ in range(max(PIECES))]
    group: Any = ProcessGroupGloo(store, world.rank, world.size, options)
    tensor = torch.full((setting.mib * MiB // 4,), 1.0)

    def operate(num_pieces: int) -> None:
        tensor[::4096] = world.rank + 1.0
        for piece in [group.allreduce([part]) for part in tensor.chunk(num_pieces)]:
            piece.wait()
        assert bool((tensor[::4096] == world.size * (world.size + 1) / 2).all()), "the sum is wrong"

    return {f"gloo {pieces}": lambda pieces=pieces: operate(pieces) for pieces in PIECES}


def _tcp(host: int, setting: Setting) -> Operation:
    """Every host sends its part to the next one."""
    num_bytes = int(2 * (setting.hosts - 1) / setting.hosts * setting.mib * MiB)
    sent, received = bytearray(num_bytes), bytearray(num_bytes)
    with create_server((_address(host), TCP_PORT)) as door, ExitStack() as stack:
        target = stack.enter_context(_connected(_address((host + 1) % setting.hosts)))
        source = door.accept()[0]
        stack.pop_all()

    def operate() -> None:
        sending = threading.Thread(target=target.sendall, args=(sent,))
        sending.start()
        assert source.recv_into(received, num_bytes, MSG_WAITALL) == num_bytes
        sending.join()

    return operate


def _connected(address: str) -> Any:
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return create_connection((address, TCP_PORT))
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise


# -- hosts ------------------------------------------------------------------------------------------------------------


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _ip(*words: str) -> None:
    subprocess.run(words, check=True)


@contextmanager
def made_hosts(setting: Setting) -> Iterator[list[str]]:
    """Namespaces that reach each other through a switch; they are gone afterwards."""
    name = f"lockstep-{os.getpid()}-bench"
    switch, hosts = f"{name}-switch", [f"{name}-host{host}" for host in range(setting.hosts)]
    burst = max(256 * 1024, setting.mbit * 125)  # bytes: a millisecond's
    try:
        _ip("ip", "netns", "add", switch)
        _ip("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("ip", "-n", switch, "link", "set", "switch", "up")
        for host, netns in enumerate(hosts):
            port = f"port{host}"
            _ip("ip", "netns", "add", netns)
            veth = ["type", "veth", "peer", "name", port, "netns", switch]
            _ip("ip", "link", "add", INTERFACE, "netns", netns, *veth)
            _ip("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("ip", "-n", netns, "address", "add", f"{_address(host)}/24", "dev", INTERFACE)
            _ip("ip", "-n", netns, "link", "set", INTERFACE, "up")
            _ip("ip", "-n", netns, "link", "set", "lo", "up")
            limit = ["tbf", "rate", f"{setting.mbit}mbit", "burst", str(burst), "latency", "50ms"]
            _ip("tc", "-n", netns, "qdisc", "add", "dev", INTERFACE, "root", *limit)
        yield hosts
    finally:
        for netns in (switch, *hosts):
            subprocess.run(["ip", "netns", "delete", netns], check=False, capture_output=True)


def measured(setting: Setting) -> dict[str, list[float]]:
    with made_hosts(setting) as hosts, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        out = stack.enter_context((Path(folder) / "out").open("w+"))
        started = [
            stack.enter_context(_worker(setting, netns, host, local, out))
            for host, netns in enumerate(hosts)
            for local in range(setting.workers)
        ]
        try:
            codes = [worker.wait(TIMEOUT_S) for worker in started]
        finally:
            for worker in started:
                worker.kill()
        assert set(codes) == {0}, codes
        out.seek(0)
        found: dict[str, list[float]] = json.loads(out.read())
        return found


def _worker(setting: Setting, netns: str, host: int, local: int, out: Any) -> "subprocess.Popen[bytes]":
    place = {
        "RANK": host * setting.workers + local,
        "WORLD_SIZE": setting.hosts * setting.workers,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": setting.workers,
        "MASTER_PORT": PORT,
    }
    names = {name: str(value) for name, value in place.items()}
    names |= {"MASTER_ADDR": _address(0), "GLOO_SOCKET_IFNAME": INTERFACE}
    words = [sys.executable, __file__, "--worker", json.dumps(vars(setting))]
    return subprocess.Popen(["ip", "netns", "exec", netns, *words], env={**os.environ, **names}, stdout=out)


# -- the report -------------------------------------------------------------------------------------------------------


def row(setting: Setting, found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians and quartiles of the ratio to the limit; Gloo's best pieces count."""
    best = min((name for name in found if name.startswith("gloo")), key=lambda name: statistics.median(found[name]))
    sides = {"lockstep": found["lockstep"], "gloo": found[best]} | {
        name: times for name, times in found.items() if name != "lockstep" and not name.startswith("gloo")
    }
    ratios = {name: _quartiles([ms / setting.limit_ms for ms in times]) for name, times in sides.items()}
    return {**vars(setting), "limit_ms": setting.limit_ms, "gloo_pieces": best, "ratios": ratios, "ms": found}


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def shown(row: dict[str, Any]) -> str:
    about = f"{row['hosts']} hosts × {row['workers']}, {row['mbit']} Mbit/s, {row['mib']} MiB: {row['limit_ms']:.0f} ms"
    sides = (f"{name} {middle:.3f} ({low:.3f}–{high:.3f})" for name, (low, middle, high) in row["ratios"].items())
    return f"{about}; {'; '.join(sides)}; {row['gloo_pieces']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2")
    parser.add_argument("--workers", default="1,2", help="on each host")
    parser.add_argument("--mbit", default="1000,10000")
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(Setting(**json.loads(asked.worker)))
        return
    rows = []
    for hosts, workers, mbit in (
        (int(hosts), int(workers), int(mbit))
        for mbit in asked.mbit.split(",")
        for hosts in asked.hosts.split(",")
        for workers in asked.workers.split(",")
    ):
        setting = Setting(hosts, workers, mbit, asked.mib, asked.rounds)
        rows.append(row(setting, measured(setting)))
        print(shown(rows[-1]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
