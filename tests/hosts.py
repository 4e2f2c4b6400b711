"""Real hosts on one machine: network namespaces, each with an interface of its own, joined by a switch.

`with hosts([2, 2]) as network: network.on_workers(job)` runs `job` on two workers on each of two hosts, which find each
other as under torchrun. Nothing outside the namespaces is touched, and they are gone afterwards.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from workers import Outcome, all_values, fork, gather

INTERFACE = "lan0"
PORT = 29500  # free, since the namespace is new
CLONE_NEWNET = 0x40000000
PREFIX = "lockstep"
NAMESPACES = Path("/run/netns")

_numbers = count()


@dataclass(frozen=True)
class Network:
    """Hosts that reach each other. `delays` says whether the latency that was asked for could be had."""

    namespaces: tuple[str, ...]
    workers_of: tuple[int, ...]
    delays: bool

    @property
    def addresses(self) -> list[str]:
        return [address(host) for host in range(len(self.namespaces))]

    def outcomes(
        self, job: Callable[..., Any], *args: Any, limit_s: float = 60.0, interface: str = INTERFACE, **options: Any
    ) -> list[Outcome]:
        """Runs `job` on all workers of all hosts; gives every worker's outcome, by rank."""
        places = [partial(self._place, rank, interface) for rank in range(sum(self.workers_of))]
        return gather([fork(place, limit_s, job, args, options) for place in places], limit_s)

    def on_workers(self, job: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """What `job` returned on each worker; fails if one raised or died."""
        return all_values(self.outcomes(job, *args, **options))

    def traffic(self, host: int) -> dict[str, Any]:
        """What the kernel counted at the host's interface: `bytes`, `packets`, `overlimits` and more."""
        shown = _run("tc", "-s", "-j", "-n", self.namespaces[host], "qdisc", "show", "dev", INTERFACE)
        counted: dict[str, Any] = json.loads(shown)[0]
        return counted

    def enter(self, rank: int) -> None:
        """Moves this process to the host of the worker."""
        host, _ = self._seat(rank)
        _enter(self.namespaces[host])

    def variables(self, rank: int, interface: str = INTERFACE) -> dict[str, str]:
        """What torchrun would tell the worker."""
        host, local_rank = self._seat(rank)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(sum(self.workers_of)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.workers_of[host]),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": interface,
        }

    def _place(self, rank: int, interface: str) -> None:
        self.enter(rank)
        os.environ |= self.variables(rank, interface)

    def _seat(self, rank: int) -> tuple[int, int]:
        seats = [(host, local) for host, workers in enumerate(self.workers_of) for local in range(workers)]
        return seats[rank]


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


@contextmanager
def hosts(workers_of: Sequence[int], mbit_per_s: int | None = None, delay_ms: float | None = None) -> Iterator[Network]:
    """As many hosts as numbers are given, with so many workers on each. Skips the test where it is not allowed.

    What each host sends is limited to `mbit_per_s`, and delayed by `delay_ms` where the kernel can (`Network.delays`).
    """
    _skip_unless_allowed()
    remove_leftovers()
    name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
    namespaces = tuple(f"{name}-host{host}" for host in range(len(workers_of)))
    try:
        _make_switch(f"{name}-switch")
        for host, namespace in enumerate(namespaces):
            _make_host(host, namespace, f"{name}-switch")
        delays = [_shape(namespace, mbit_per_s, delay_ms) for namespace in namespaces]
        yield Network(namespaces, tuple(workers_of), all(delays))
    finally:
        _remove(existing(f"{name}-"))


def existing(prefix: str = f"{PREFIX}-") -> list[str]:
    """The namespaces that are there now."""
    return sorted(path.name for path in NAMESPACES.glob(f"{prefix}*"))


def remove_leftovers() -> None:
    """Removes namespaces of test runs that were killed: the process in their name is gone."""
    _remove([name for name in existing() if (owner := _owner(name)) is not None and not psutil.pid_exists(owner)])


def _owner(namespace: str) -> int | None:
    number = namespace.split("-")[1]
    return int(number) if number.isdigit() else None


def _remove(namespaces: Sequence[str]) -> None:
    """Devices go with their namespace, and a veth with its other end."""
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _skip_unless_allowed() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            pytest.skip(f"network namespaces need the command {command} (package iproute2)")
    probe = f"{PREFIX}-{os.getpid()}-probe{next(_numbers)}"
    tried = subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True, text=True)
    _remove([probe])
    if tried.returncode != 0:
        pytest.skip(f"network namespaces are not allowed here: {tried.stderr.strip()}")


def _make_switch(namespace: str) -> None:
    _run("ip", "netns", "add", namespace)
    _run("ip", "-n", namespace, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", namespace, "link", "set", "switch", "up")


def _make_host(host: int, namespace: str, switch: str) -> None:
    """A namespace with loopback and one interface, whose other end is a port of the switch."""
    port = f"port{host}"
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", INTERFACE, "netns", namespace, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
    _run("ip", "-n", namespace, "address", "add", f"{address(host)}/24", "dev", INTERFACE)
    _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _shape(namespace: str, mbit_per_s: int | None, delay_ms: float | None) -> bool:
    """Limits and delays what the host sends; whether it could be delayed as asked."""
    queue = ["tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE]
    if mbit_per_s is not None:
        limit = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "50ms"]
        _run(*queue, "root", "handle", "1:", *limit)
    if delay_ms is None:
        return True
    above = ["root"] if mbit_per_s is None else ["parent", "1:"]
    delay = [*queue, *above, "netem", "delay", f"{delay_ms}ms"]
    return subprocess.run(delay, check=False, capture_output=True).returncode == 0


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def _enter(namespace: str) -> None:
    """This thread, and those it starts, are in the namespace from here on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
