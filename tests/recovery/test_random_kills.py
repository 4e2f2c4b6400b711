"""Workers killed at moments that nobody chose, from outside."""

import os
import random
import signal
import time
from functools import partial

import pytest
from disturbed import Plan, disturbed
from trainings import Training, Work

NUM_WORKERS = 5
WITHIN_S = 0.02


def _arm(deaths: dict[int, tuple[int, float]], number: int, work: Work) -> None:
    """From the beginning of its step on, a worker that is to die may die at any moment."""
    step, delay_s = deaths.get(number, (-1, 0.0))
    if work.run.step == step:
        _kill_in(delay_s)


def _kill_in(delay_s: float) -> None:
    """Another process does it, so that no moment is spared. It holds none of the worker's sockets."""
    victim = os.getpid()
    if os.fork() == 0:
        os.closerange(3, 1024)
        time.sleep(delay_s)
        os.kill(victim, signal.SIGKILL)
        os._exit(0)


def _kill_some(seed: int, wire: str) -> None:
    """All but one of the workers, in random order, steps and moments; one that is done before waits for its end."""
    chance = random.Random(seed)
    victims = chance.sample(range(NUM_WORKERS), NUM_WORKERS - 1)
    deaths = {victim: (chance.randrange(7), chance.random() * WITHIN_S) for victim in victims}
    training = Training(model=chance.choice(["mlp", "conv"]), options=(("wire", wire),))
    plan = Plan(extra=partial(_arm, deaths), dying=tuple(victims))
    disturbed(training, NUM_WORKERS, plan)


@pytest.mark.parametrize("seed", range(5))
def test_twenty_workers_killed_at_random_cost_nothing(seed: int) -> None:
    _kill_some(seed, "shared")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("wire", ["shared", "gloo", "hierarchical"])
def test_two_hundred_workers_killed_at_random_cost_nothing(wire: str) -> None:
    for seed in range(50):
        _kill_some(1000 + seed, wire)
