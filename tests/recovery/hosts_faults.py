"""What can happen to hosts while they train, scripted in steps: a worker or a host dies, a link falls silent."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from hosts import INTERFACE, Network, address, hosts
from torch import nn
from training import MODELS, Job, loader_of, make, train_step
from workers import Outcome, fork, gather

import lockstep
from lockstep.elastic.recovery import LeftOut
from lockstep.strategies import Strategy
from lockstep.strategies.sharded.optimizer import ShardedOptimizer

MODELS["wide"] = lambda: nn.Sequential(nn.Linear(12, 40_000), nn.ReLU(), nn.Linear(40_000, 5))
JOB = Job(epochs=3)
WIDE = Job("wide", optimizer="sgd", epochs=2)
"""Each worker sends more than a megabyte in one message."""
NARROW_MBIT_PER_S = 40
PART_BYTES = 300_000
STEP = 5
NOBODYS_CARD = "02:00:00:00:00:99"
LIMIT_S = 60.0
"""A tenth of the `timeout_s` that holds in these trainings: whoever waits that long has noticed nothing."""

Deed = Callable[[Network, int], None]


@dataclass(frozen=True)
class Fault:
    """Before `step`, worker `rank` does the `deed` to a host."""

    deed: Deed
    rank: int
    host: int
    step: int = STEP


@dataclass(frozen=True)
class Scene:
    """Workers on hosts, and the fault they meet."""

    workers_of: tuple[int, ...]
    wire: str
    fault: Fault
    job: Job = JOB
    mbit_per_s: int | None = None
    roster: str = ""
    strategy: str | Strategy = "replicated"


@dataclass(frozen=True)
class End:
    """How training ended for one worker that lived: done, or left for a reason. `waited_s` is its longest step."""

    digest: str
    step: int
    size: int
    left: str
    waited_s: float


def kill_worker(network: Network, host: int) -> None:
    """This worker dies."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker_in_update(network: Network, host: int) -> None:
    """This worker dies when the others of its host wait for its part of the next update."""
    ShardedOptimizer._enter = lambda sharded, batch: kill_worker(network, host)  # type: ignore[method-assign]


def kill_host(network: Network, host: int) -> None:
    """All processes on the host die, this one last if it is there."""
    listed = _run("ip", "netns", "pids", network.namespaces[host])
    for pid in sorted(map(int, listed.split()), key=lambda pid: pid == os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def silence_link(network: Network, host: int) -> None:
    """What the host sends goes nowhere, and nothing comes; nobody is told. As when a cable behind a switch breaks."""
    _run("ip", "-n", _switch(network), "link", "set", f"port{host}", "nomaster")


def silence_link_later(network: Network, host: int) -> None:
    """The same when the host has sent PART_BYTES more: a message is on its way, and will not arrive."""
    until = network.traffic(host)["bytes"] + PART_BYTES

    def wait() -> None:
        while network.traffic(host)["bytes"] < until:
            pass
        silence_link(network, host)

    threading.Thread(target=wait, daemon=True).start()


def pull_cable(network: Network, host: int) -> None:
    """The same as a silent link, but the host's own interface sees it."""
    _run("ip", "-n", _switch(network), "link", "set", f"port{host}", "down")


def cut_power(network: Network, host: int) -> None:
    """The host is gone, and there is no kernel left to say so."""
    silence_link(network, host)
    kill_host(network, host)


def lose_links(*links: tuple[int, int]) -> Deed:
    """What the first of each pair of hosts sends to the second is lost from now on, and nobody is told."""

    def lose(network: Network, host: int) -> None:
        for source, target in links:
            lose_link(network, source, target)

    return lose


def lose_link(network: Network, source: int, target: int) -> None:
    """The host sends to a card that nobody has."""
    at = ["ip", "-n", network.namespaces[source], "neighbour"]
    _run(*at, "replace", address(target), "lladdr", NOBODYS_CARD, "nud", "permanent", "dev", INTERFACE)


def mend_link(network: Network, source: int, target: int) -> None:
    """The host looks for the other one's card anew."""
    _run("ip", "-n", network.namespaces[source], "neighbour", "delete", address(target), "dev", INTERFACE)


def played(scenes: Sequence[Scene]) -> list[list[Outcome]]:
    """The outcomes of each scene, by rank. They play at the same time, since most of it is waiting for silence."""
    with ExitStack() as opened:
        networks = [opened.enter_context(hosts(scene.workers_of, scene.mbit_per_s)) for scene in scenes]
        forked = [
            [_start(network, rank, scene) for rank in range(sum(scene.workers_of))]
            for network, scene in zip(networks, scenes, strict=True)
        ]
        found = iter(gather([process for processes in forked for process in processes], LIMIT_S))
        return [[next(found) for _ in processes] for processes in forked]


def ends(outcomes: Sequence[Outcome]) -> dict[int, End]:
    """How it ended for those who lived, by rank; fails if one ended by an error."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"worker {rank}: {outcome.error}: {outcome.message}"
    return {rank: End(*outcome.value) for rank, outcome in enumerate(outcomes) if outcome.killed_by is None}


def train(network: Network, scene: Scene) -> list[Any]:
    """The fields of an End."""
    run = lockstep.start(lanes=8, seed=3, wire=scene.wire, strategy=scene.strategy)
    rank, job, fault = run.rank, scene.job, scene.fault
    model, optimizer = make(job)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(job))
    began_s = [time.monotonic()]
    left = ""
    try:
        for _ in run.epochs(job.epochs):
            for batch in loader:
                began_s.append(time.monotonic())
                if rank == fault.rank and run.step == fault.step:
                    fault.deed(network, fault.host)
                train_step(run, job, model, optimizer, batch)
    except SystemExit as end:
        if not isinstance(end.__cause__, LeftOut):
            raise
        left = str(end.__cause__)
    waited_s = max(later - earlier for earlier, later in pairwise([*began_s, time.monotonic()]))
    return [run.digest(), run.step, run.size, left, waited_s]


def _start(network: Network, rank: int, scene: Scene) -> tuple[int, int]:
    return fork(partial(_place, network, rank, scene), LIMIT_S, train, (network, scene), {})


def _place(network: Network, rank: int, scene: Scene) -> None:
    network._place(rank, INTERFACE)
    os.environ |= {"LOCKSTEP_ROSTER": scene.roster} if scene.roster else {}


def _switch(network: Network) -> str:
    return network.namespaces[0].removesuffix("host0") + "switch"


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
