"""A worker killed at any moment of an all-reduce: every survivor names it at once, and nothing stays behind."""

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_wires import open_wire
from workers import Outcome, outcomes

from lockstep.errors import PeerGone
from lockstep.lanes import Assignment, reduction

NEVER_S = 600.0
"""Survivors that only noticed a timeout would be ended by the test first."""


def _lose_one(kind: str, victim: int, size: int, delay_s: float) -> Any:
    before = _held()
    found = _reduce_until_one_dies(kind, victim, size, delay_s)
    gc.collect()
    # A thread that waits for a message which Gloo has received by half cannot be woken: it holds what it works on.
    asleep = any(thread.name == "lockstep-wire" for thread in threading.enumerate())
    return found | {"left": 0 if asleep and kind == "hierarchical" else _held() - before}


def _held() -> int:
    """How many Unix sockets and pieces of shared memory this process has."""
    sockets = psutil.Process().net_connections(kind="unix")
    return len(sockets) + Path("/proc/self/maps").read_text().count("memfd:lockstep")


def _reduce_until_one_dies(kind: str, victim: int, size: int, delay_s: float) -> dict[str, Any]:
    with open_wire(kind, NEVER_S) as wire:
        world = wire.world
        whole = reduction(Assignment.even(world.size, world.size), tuple(range(world.size)))
        value = wire.reducer.allocate(size, torch.float32, torch.device("cpu")).zero_()
        wire.reducer.reduce(whole, [value], value)
        if world.rank == victim:
            _die_in(delay_s)
        with pytest.raises(PeerGone) as gone:
            while True:
                wire.sequence.submit(lambda: wire.reducer.reduce(whole, [value], value)).result()
    return {"named": gone.value.rank}


def _die_in(delay_s: float) -> None:
    """Another process kills this one, so that no moment is spared."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _check(found: list[Outcome], victim: int) -> None:
    assert found[victim].killed_by == signal.SIGKILL
    for survivor in (outcome for rank, outcome in enumerate(found) if rank != victim):
        assert survivor.error is None, survivor.message
        assert survivor.value["named"] == victim
        assert survivor.value["left"] == 0


def _kill_one(kind: str, chance: random.Random) -> None:
    num_workers = chance.choice([2, 3, 4])
    victim = chance.randrange(num_workers)  # worker 0 too, with whom the store dies
    size = chance.choice([16, 50_000, 2_000_000])
    found = outcomes(num_workers, _lose_one, kind, victim, size, chance.uniform(0, 0.03))
    _check(found, victim)


@pytest.mark.parametrize(
    "kind", ["shared", *(pytest.param(k, marks=pytest.mark.soak) for k in ("hierarchical", "gloo"))]
)
def test_a_worker_killed_at_a_random_moment_is_named_by_every_survivor(kind: str) -> None:
    chance = random.Random(kind)
    for _ in range(6):
        _kill_one(kind, chance)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["shared", "hierarchical", "gloo"])
def test_a_hundred_workers_killed_at_random_moments_are_all_named(kind: str) -> None:
    chance = random.Random(f"a hundred, {kind}")
    for _ in range(100):
        _kill_one(kind, chance)
