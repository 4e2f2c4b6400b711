"""A storm of faults over three hosts: workers, whole hosts, links and the founder are lost, one after the other.

Workers find one another by a roster in a folder; what ends is started again and joins. Every worker writes down each
step that it commits, with the generation in which it does, so that two trainings, or a step that is lost, would show.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hosts import INTERFACE, Network, _enter
from hosts_faults import _run, _switch, kill_host, lose_link, mend_link, silence_link
from training import Job, loader_of, make, train_step
from workers import Outcome, _collect, fork

import lockstep
from lockstep.elastic.recovery import LeftOut
from lockstep.run.run import Run

WORKERS_OF = (2, 1, 1)
JOB = Job()
PACE_S = 0.03
BEYOND = 60
"""How many steps later than the present one a training may be asked to end: all workers learn of it before."""
WAIT_S = 120.0
LIFE_S = 7200.0


# -- a worker -------------------------------------------------------------------------------------------------


def train(folder: Path, slot: int) -> list[Any]:
    """Trains to the step that `folder` says; gives the digest and the step, or why this worker has left."""
    run = lockstep.start(lanes=8, seed=3)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(JOB))
    ledger = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for _ in run.epochs(1_000_000):
            for batch in loader:
                train_step(run, JOB, model, optimizer, batch)
                _show(run, folder, slot, ledger)
                if (stop := _stop(folder)) is not None and run.step >= stop:
                    return [run.digest(), run.step]
    except SystemExit as end:
        if not isinstance(end.__cause__, LeftOut):
            raise
        return ["left", str(end.__cause__)]
    raise AssertionError("there is always a next epoch")


def _show(run: Run, folder: Path, slot: int, ledger: int) -> None:
    """Where it is, and slowly: not in a training that nothing happens to."""
    recovery = run.guard.recovery
    if recovery is None:
        return
    formed = recovery.membership.formed
    first = min(recovery.membership.view.members, key=lambda member: member.seniority)
    line = [time.monotonic(), os.getpid(), run.step, str(formed.id), formed.uids]
    os.write(ledger, (json.dumps(line) + "\n").encode())  # one call: lines of several workers do not mix
    here = folder / f"at-{slot}"
    here.with_suffix(".new").write_text(json.dumps([os.getpid(), run.step, run.size, first.slot]))
    here.with_suffix(".new").rename(here)
    time.sleep(PACE_S)


def _stop(folder: Path) -> int | None:
    path = folder / "stop"
    return int(path.read_text()) if path.exists() else None


# -- the storm ------------------------------------------------------------------------------------------------


@dataclass
class Storm:
    """The hosts, the workers on them, and what was done to them."""

    network: Network
    folder: Path
    chance: random.Random
    told: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    processes: dict[int, tuple[int, int]] = field(default_factory=dict)
    ends: dict[int, Outcome] = field(default_factory=dict)

    @property
    def slots(self) -> range:
        return range(sum(WORKERS_OF))

    def host_of(self, slot: int) -> int:
        return self.network._seat(slot)[0]

    def on(self, host: int) -> list[int]:
        return [slot for slot in self.slots if self.host_of(slot) == host]

    def start(self, slots: Collection[int]) -> None:
        for slot in slots:
            place = partial(_place, self.network, self.host_of(slot), slot, self.folder)
            self.processes[slot] = fork(place, LIFE_S, train, (self.folder, slot), {})

    def reap(self) -> None:
        """Takes away what has ended, and notes why."""
        for slot, (pid, reader) in list(self.processes.items()):
            if not _has_ended(pid):
                continue
            outcome = self.ends[slot] = _collect(pid, reader, time.monotonic() + 5.0)
            del self.processes[slot]
            (self.folder / f"at-{slot}").unlink(missing_ok=True)
            if outcome.value is not None and outcome.value[0] == "left":
                self.left.append(outcome.value[1])
            elif outcome.error is not None:
                self.left.append(f"{outcome.error}: {outcome.message}")

    def where(self, slot: int) -> tuple[int, int, int]:
        """Step, size and the longest member's slot, as the worker sees it; zeros before its first step."""
        with suppress(FileNotFoundError, KeyError):
            pid, step, size, first = json.loads((self.folder / f"at-{slot}").read_text())
            if pid == self.processes[slot][0]:
                return step, size, first
        return 0, 0, 0

    @property
    def step(self) -> int:
        return max((self.where(slot)[0] for slot in self.processes), default=0)

    def until(self, reached: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + WAIT_S
        while not reached():
            self.reap()
            if time.monotonic() > until_s or not self.processes:
                where = {slot: self.where(slot) for slot in self.processes}
                raise AssertionError(f"never {what} after {self.told[-3:]}: {where}, left {self.left[-4:]}")
            time.sleep(0.05)

    def go_on(self, beyond: int) -> None:
        """Returns when all who are there train together, past step `beyond`."""

        def together() -> bool:
            seen = [self.where(slot) for slot in self.processes]
            return bool(seen) and all(step > beyond and size == len(seen) for step, size, _ in seen)

        self.until(together, f"went on together past step {beyond}")

    def restore(self) -> None:
        """Everybody is there again."""
        self.reap()
        self.start([slot for slot in self.slots if slot not in self.processes])
        self.until(lambda: all(self.where(slot)[1] == len(self.slots) for slot in self.slots), "were all back")

    # -- faults -----------------------------------------------------------------------------------------------

    def fault(self) -> int:
        """One fault, or two in a row; gives how many."""
        kinds = [self.kill_worker, self.kill_founder, self.kill_host, self.kill_joining, self.kill_two]
        kinds += [self.cut_power, self.silence, self.lose_pair, self.lose_one_way]
        kind = self.chance.choices(kinds, [4, 3, 2, 1, 2, 1, 1, 1, 1])[0]
        step, number = self.step, kind()
        self.go_on(step + 2)
        self.mend()
        self.restore()
        return number

    def kill(self, slots: Collection[int]) -> None:
        self.told.append(f"at step {self.step} kill {sorted(slots)}")
        for slot in slots:
            os.kill(self.processes[slot][0], signal.SIGKILL)
        self.until(lambda: not set(slots) & set(self.processes), "died")

    def kill_worker(self) -> int:
        self.kill([self.chance.choice(self.slots)])
        return 1

    def kill_founder(self) -> int:
        """The longest member, who coordinates."""
        self.kill([self.where(self.chance.choice(self.slots))[2]])
        return 1

    def kill_host(self) -> int:
        self.kill(self.on(self.chance.randrange(len(WORKERS_OF))))
        return 1

    def kill_two(self) -> int:
        """The second while the others recover from the first."""
        for slot in self.chance.sample(self.slots, 2):
            self.kill([slot])
        return 2

    def kill_joining(self) -> int:
        """Also when it is started again, and may be about to join."""
        slot = self.chance.choice(self.slots)
        self.kill([slot])
        self.start([slot])
        self.kill([slot])
        return 2

    def cut_power(self) -> int:
        host = self.chance.randrange(len(WORKERS_OF))
        self.told.append(f"at step {self.step} cut the power of host {host}")
        silence_link(self.network, host)
        kill_host(self.network, host)
        self.until(lambda: not set(self.on(host)) & set(self.processes), "died")
        return 1

    def silence(self) -> int:
        host = self.chance.randrange(len(WORKERS_OF))
        self.told.append(f"at step {self.step} silence host {host}")
        silence_link(self.network, host)
        return 1

    def lose_pair(self) -> int:
        one, other = self.chance.sample(range(len(WORKERS_OF)), 2)
        self.told.append(f"at step {self.step} hosts {one} and {other} lose each other")
        lose_link(self.network, one, other)
        lose_link(self.network, other, one)
        return 1

    def lose_one_way(self) -> int:
        one, other = self.chance.sample(range(len(WORKERS_OF)), 2)
        self.told.append(f"at step {self.step} what host {one} sends to {other} is lost")
        lose_link(self.network, one, other)
        return 1

    def mend(self) -> None:
        for host in range(len(WORKERS_OF)):
            _run("ip", "-n", _switch(self.network), "link", "set", f"port{host}", "master", "switch", "up")
            for other in range(len(WORKERS_OF)):
                if other != host:
                    with suppress(Exception):  # it was not lost
                        mend_link(self.network, host, other)

    # -- the end ----------------------------------------------------------------------------------------------

    def finish(self) -> tuple[set[str], int]:
        """Ends the training; gives the digests of all, and the step."""
        last = self.step + BEYOND
        (self.folder / "stop.new").write_text(str(last))
        (self.folder / "stop.new").rename(self.folder / "stop")
        until_s = time.monotonic() + WAIT_S
        while self.processes and time.monotonic() < until_s:
            self.reap()
            time.sleep(0.05)
        found = [self.ends[slot] for slot in self.slots]
        assert all(end.value is not None and end.value[1] == last for end in found), found
        return {end.value[0] for end in found}, last

    def close(self) -> None:
        for pid, _ in self.processes.values():
            os.kill(pid, signal.SIGKILL)
        while self.processes:
            self.reap()


def _place(network: Network, host: int, slot: int, folder: Path) -> None:
    _enter(network.namespaces[host])
    os.environ |= {
        "LOCKSTEP_ROSTER": str(folder / "roster"),
        "LOCKSTEP_SLOT": str(slot),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


# -- what was written down ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """All steps that were committed: when, by which process, in which generation."""

    lines: list[tuple[float, int, int, str, list[str]]]

    @classmethod
    def read(cls, folder: Path) -> "Account":
        lines = [json.loads(line) for line in (folder / "ledger").read_text().splitlines()]
        return cls(sorted(lines))

    def generations(self) -> int:
        return len({line[3] for line in self.lines})

    def lost_steps(self) -> int:
        """How many steps that somebody had committed were gone: a generation began before them."""
        lost, furthest, begun = 0, 0, set()
        for _, _, step, generation, _ in self.lines:
            if generation not in begun:
                begun.add(generation)
                lost += max(0, furthest - step)
            furthest = max(furthest, step)
        return lost

    def two_trainings(self) -> list[str]:
        """Pairs of generations without a common member that committed steps at the same time."""
        spans: dict[str, tuple[float, float, frozenset[str]]] = {}
        for at_s, _, _, generation, uids in self.lines:
            first_s = spans[generation][0] if generation in spans else at_s
            spans[generation] = first_s, at_s, frozenset(uids)
        return [
            f"{one} and {other}"
            for one, (first_s, last_s, members) in spans.items()
            for other, (begun_s, _, others) in spans.items()
            if one != other and first_s <= begun_s < last_s and not members & others
        ]
