"""Random histories: workers die, come and leave at any moment, and the run goes on as if nothing had happened.

What must hold at every move stands in simulation.py: every committed gradient has every lane once and of one
generation, updates are applied in order and only of committed steps, no generation is formed twice, nobody is left out.
"""

import random
from collections.abc import Iterator

import pytest
from histories import disturbed, move_anyone, parted_amid_faults, settle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from simulated import Worker
from simulation import Simulation


@pytest.mark.parametrize("block", range(4))
def test_survivors_and_newcomers_of_any_history_go_on_together(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        disturbed(seed)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", range(20))
def test_survivors_and_newcomers_of_thousands_of_histories_go_on_together(block: int) -> None:
    for seed in range(10_000 + block * 1000, 11_000 + block * 1000):
        disturbed(seed)


def test_never_do_both_sides_of_a_cut_go_on() -> None:
    for seed in range(150):
        parted_amid_faults(seed)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_never_do_both_sides_of_a_cut_go_on_in_thousands_of_histories() -> None:
    for seed in range(10_000, 20_000):
        parted_amid_faults(seed)


def test_random_histories_reach_the_rare_moments() -> None:
    seen = {moment for seed in range(200) for moment in _rare_moments(disturbed(seed))}
    assert seen == {"decided, and heard by some", "formed by some", "formed by a newcomer and not by a member"}


def _rare_moments(simulation: Simulation) -> Iterator[str]:
    for decision, failed in simulation.failed_by.items():
        formed = simulation.formed_by[decision.attempt.id]
        if decision not in simulation.met:
            yield "decided, and heard by some"
        if formed:
            yield "formed by some"
        if formed & set(decision.newcomers) and failed - set(decision.newcomers):
            yield "formed by a newcomer and not by a member"


class AnyHistory(RuleBasedStateMachine):
    """The same, with the choices made, and made smaller, by hypothesis."""

    def __init__(self) -> None:
        super().__init__()
        self.simulation = Simulation(3)

    @rule(who=st.integers(0, 6), which=st.integers(0, 6))
    def move(self, who: int, which: int) -> None:
        worker = self._one(who)
        if moves := self.simulation.moves(worker):
            self.simulation.do(worker, moves[which % len(moves)])

    @rule(seed=st.integers(0, 99), num_moves=st.integers(5, 40))
    def everyone_moves(self, seed: int, num_moves: int) -> None:
        chance = random.Random(seed)
        for _ in range(num_moves):
            move_anyone(self.simulation, chance)

    @rule(who=st.integers(0, 6))
    def kill(self, who: int) -> None:
        victim = self._one(who)
        if any(worker is not victim and not worker.machine.leaving for worker in self.simulation.with_state):
            self.simulation.kill(victim.uid)

    @rule(slot=st.integers(0, 4))
    def arrive(self, slot: int) -> None:
        if slot not in {worker.machine.me.slot for worker in self.simulation.present}:
            self.simulation.arrive(slot)

    @rule(who=st.integers(0, 6))
    def ask_to_leave(self, who: int) -> None:
        worker = self._one(who)
        staying = [other for other in self.simulation.with_state if not other.machine.leaving]
        if worker in staying and len(staying) > 1:
            self.simulation.ask_to_leave(worker.uid)

    def teardown(self) -> None:
        settle(self.simulation, random.Random(0))

    def _one(self, who: int) -> Worker:
        return self.simulation.present[who % len(self.simulation.present)]


AnyHistory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_history_that_hypothesis_finds_settles = AnyHistory.TestCase
