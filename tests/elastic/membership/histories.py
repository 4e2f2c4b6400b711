"""Who moves next: seeded schedulers that disturb a simulation, and a fair one that lets it settle."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from simulated import Worker
from simulation import Simulation, Violation, furthest, settled

MAX_MOVES = 8_000  # far more than any history here needs to settle: it would go round in circles


def settle(simulation: Simulation, chance: random.Random, more_steps: int = 3) -> None:
    """Nothing is disturbed any more: all who live must come together and commit more steps."""
    simulation.out_of_time = False
    goal = furthest(simulation.with_state) + more_steps
    for number in range(MAX_MOVES):
        if number % 8 == 0 and settled(simulation, goal):
            return
        if not move_anyone(simulation, chance):
            break
    if not settled(simulation, goal):
        raise Violation(f"not settled at step {goal} after {number} moves\n{simulation.story()}")


def move_anyone(simulation: Simulation, chance: random.Random, pace: dict[str, float] | None = None) -> bool:
    """One move of one worker, the faster ones (by `pace`) more often; False when nobody can move."""
    present = simulation.present
    while present:
        weights = [(pace or {}).get(worker.uid, 1.0) for worker in present]
        worker = chance.choices(present, weights)[0]
        if moves := simulation.moves(worker):
            simulation.do(worker, chance.choice(moves))
            return True
        present.remove(worker)
    return False


@dataclass
class Adversary:
    """Kills, newcomers and leavers at random moments, on workers of random speed.

    A fault makes others soon after it likely: accidents come in company, and the interesting ones do.
    """

    chance: random.Random
    simulation: Simulation
    leaves: bool = True
    arrives: bool = True
    danger: float = 0.0
    pace: dict[str, float] = field(default_factory=dict)

    def disturb(self, num_moves: int) -> None:
        for _ in range(num_moves):
            if self.chance.random() < 0.01:
                self.pace = {uid: self.chance.choice([0.02, 0.3, 1.0, 3.0]) for uid in self.simulation.workers}
            if self.chance.random() < max(self._usual_danger(), self.danger):
                self._fault()
            self.danger *= 0.97
            if not move_anyone(self.simulation, self.chance, self.pace):
                return

    def _usual_danger(self) -> float:
        """More while a generation is being formed, most when it may be formed for some already."""
        opening = [worker.opening for worker in self.simulation.present if worker.opening is not None]
        return 0.15 if any(decision in self.simulation.met for decision in opening) else 0.02 if opening else 0.004

    def _fault(self) -> None:
        self.danger = self.chance.choice([0.0, 0.02, 0.1])
        kind = self.chance.choices(["kill", "arrive", "leave"], [5, 4 * self.arrives, self.leaves])[0]
        if kind == "arrive" and len(self.simulation.present) < 7:
            self.simulation.arrive(self._free_slot())
        elif kind == "leave" and (staying := self._staying()):
            self.simulation.ask_to_leave(self.chance.choice(staying).uid)
        elif kind == "kill":
            self._kill()

    def _kill(self) -> None:
        """Anybody, as long as one remains who has the state."""
        if not self.simulation.present:
            return
        victim = self.chance.choice(self.simulation.present)
        if any(worker is not victim for worker in self.simulation.with_state if not worker.machine.leaving):
            self.simulation.kill(victim.uid)

    def _staying(self) -> list[Worker]:
        asked = [worker for worker in self.simulation.with_state if not worker.machine.leaving]
        return asked if len(asked) > 1 else []

    def _free_slot(self) -> int:
        taken = {worker.machine.me.slot for worker in self.simulation.present}
        return self.chance.choice([slot for slot in range(8) if slot not in taken])


def disturbed(seed: int) -> Simulation:
    """A random history, disturbed and then settled."""
    chance = random.Random(seed)
    simulation = Simulation(chance.choice([2, 2, 3, 3, 3, 4, 4, 5, 6]))
    Adversary(chance, simulation).disturb(chance.choice([60, 200, 500]))
    settle(simulation, chance)
    return simulation


# -- partitions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parted:
    """What became of two sides after the link between them was cut: who committed steps that no one had begun then."""

    simulation: Simulation
    far: frozenset[str]
    step: int

    @property
    def went_on(self) -> set[bool]:
        """True for the far side, False for the near one."""
        workers = self.simulation.workers.items()
        return {uid in self.far for uid, worker in workers if max(worker.committed, default=0) > self.step}

    @property
    def is_over(self) -> bool:
        """One side has gone on, and of the other nobody is there any more."""
        return len(self.went_on) == 1 and {worker.uid in self.far for worker in self.simulation.present} == self.went_on


def part(simulation: Simulation, far: frozenset[str], chance: random.Random, num_moves: int) -> Parted:
    """Cuts `far` off and lets all go on for `num_moves`; fails when both sides commit new steps."""
    parted = Parted(simulation, far, furthest(simulation.with_state))
    simulation.cut(far)
    simulation.out_of_time = False
    for number in range(num_moves):
        if not move_anyone(simulation, chance) or (number % 16 == 0 and parted.is_over):
            break
    if len(parted.went_on) > 1:
        raise Violation(f"both sides went on after step {parted.step}\n{simulation.story()}")
    return parted


def parted_amid_faults(seed: int) -> Parted:
    """A random history with kills, newcomers and leavers, cut in two at a random moment."""
    chance = random.Random(seed)
    simulation = Simulation(chance.choice([2, 3, 3, 4, 4, 5]))
    Adversary(chance, simulation, danger=0.05).disturb(chance.randrange(30, 250))
    uids = sorted(simulation.workers)
    far = frozenset(chance.sample(uids, chance.randrange(1, len(uids))))
    return part(simulation, far, chance, 600)


# -- scripts --------------------------------------------------------------------------------------------------


def drive(simulation: Simulation, until: Callable[[], bool], resting: frozenset[str] = frozenset()) -> None:
    """Everybody moves in turn, except those who rest, until something is true."""
    simulation.out_of_time = False
    for number in range(MAX_MOVES):
        if until():
            return
        move_in_turn(simulation, number, resting)
    raise AssertionError(f"this never happened\n{simulation.story()}")


def move_in_turn(simulation: Simulation, number: int, resting: frozenset[str] = frozenset()) -> None:
    """The first possible move of the next worker that can move: the same schedule every time."""
    present = [worker for worker in simulation.present if worker.uid not in resting]
    for offset in range(len(present)):
        worker = present[(number + offset) % len(present)]
        if moves := simulation.moves(worker):
            return simulation.do(worker, moves[0])
    return None


def make(simulation: Simulation, uid: str, *names: str) -> None:
    """This worker makes these moves, one after the other; each must be possible."""
    worker = simulation.workers[uid]
    for name in names:
        found = [move for move in simulation.moves(worker) if move[0] == name]
        assert found, f"{uid} cannot {name}\n{simulation.story()}"
        simulation.do(worker, found[0])


# -- any partition --------------------------------------------------------------------------------------------

Links = frozenset[tuple[str, str]]
"""Directed: what the one sends does not reach the other."""


def random_partition(chance: random.Random, uids: Sequence[str]) -> Links:
    """A complete one (two or three groups), a partial one, one-way loss, or a mixture; sometimes none."""
    pairs = list(permutations(uids, 2))
    kind = chance.choice(["complete", "complete", "partial", "partial", "one-way", "mixed", "none"])
    if kind == "complete":
        group = {uid: chance.randrange(chance.choice([2, 2, 3])) for uid in uids}
        return frozenset((one, other) for one, other in pairs if group[one] != group[other])
    if kind == "none":
        return frozenset()
    how_many = chance.choice([0.1, 0.3, 0.6])
    one_way = {pair for pair in pairs if kind != "partial" and chance.random() < how_many}
    both_ways = {pair for pair in pairs if kind != "one-way" and pair[0] < pair[1] and chance.random() < how_many}
    return frozenset(one_way | both_ways | {(other, one) for one, other in both_ways})


@dataclass(frozen=True)
class Aftermath:
    """What a partition came to: who goes on, and for what reasons the others have left."""

    simulation: Simulation
    links: Links

    @property
    def going_on(self) -> list[str]:
        return sorted(worker.uid for worker in self.simulation.present)


def partitioned(seed: int) -> Aftermath:
    """A random history, cut up at random moments by random partitions, with kills; the last one stays.

    Fails if two trainings go on at any time (see Simulation), or if not all who are left have settled.
    """
    chance = random.Random(seed)
    simulation = Simulation(chance.choice([2, 3, 3, 4, 4, 5, 6]))
    simulation.delays = True
    if chance.random() < 0.5:
        simulation.have_witness()
    adversary = Adversary(chance, simulation, danger=chance.choice([0.0, 0.05]))
    adversary.disturb(chance.randrange(0, 250))
    for newcomer in [worker for worker in simulation.present if not worker.has_state]:
        simulation.kill(newcomer.uid)
    adversary.arrives = False  # see Note [A newcomer of the dead] in test_membership_partitions.py
    for _ in range(chance.choice([0, 1, 2, 4, 8, 16])):
        _cut_anyhow(simulation, chance)
        adversary.disturb(chance.choice([10, 40, 120]))
    links = _cut_anyhow(simulation, chance)
    settle_apart(simulation, chance)
    return Aftermath(simulation, links)


def _cut_anyhow(simulation: Simulation, chance: random.Random) -> Links:
    links = random_partition(chance, sorted(worker.uid for worker in simulation.present))
    simulation.lose_links(links)
    deaf = {worker.uid for worker in simulation.present if chance.random() < 0.2}
    simulation.reaches_witness = lambda uid: uid not in deaf
    return links


def settle_apart(simulation: Simulation, chance: random.Random) -> None:
    """All who are left must come to be in one training, or to leave: then there is nobody to settle."""
    settle(simulation, chance)
