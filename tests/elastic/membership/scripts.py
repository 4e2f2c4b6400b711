"""Histories told move by move: the moments that random ones seldom reach. Each must settle."""

import random

from histories import drive, make, part, settle
from simulation import Simulation

from lockstep.elastic.membership import MembershipStage


def _all_have_met(simulation: Simulation, newcomer: str) -> bool:
    """Everybody is about to open the wire of a generation with this newcomer."""
    return all(
        worker.opening is not None and newcomer in worker.opening.newcomers and not worker.todo
        for worker in simulation.present
    )


def replacement_of_the_lowest_slot_formed_for_some() -> Simulation:
    """Worker 0 is replaced. Worker 3 dies when worker 1 and the newcomer are through, and worker 2 is not."""
    simulation = Simulation(4)
    simulation.kill("w0")
    simulation.arrive(0)
    drive(simulation, lambda: _all_have_met(simulation, "w0'"))
    make(simulation, "w0'", "take_state", "form", "act", "begin")
    make(simulation, "w1", "form", "act", "begin")
    simulation.kill("w3")
    make(simulation, "w2", "unform")
    settle(simulation, random.Random(0))
    return simulation


def newcomer_with_the_state_that_a_member_has_not_seen_come() -> Simulation:
    """Worker 3 is new. Worker 2 dies when worker 3 is through; then worker 1, the host, fails to form, and decides."""
    simulation = Simulation(3)
    simulation.kill("w0")
    simulation.arrive(3)
    drive(simulation, lambda: _all_have_met(simulation, "w3"))
    make(simulation, "w3", "take_state", "form", "act", "begin", "act")
    simulation.kill("w2")
    make(simulation, "w1", "unform", "act", "act", "probe")
    settle(simulation, random.Random(0))
    return simulation


def two_newcomers_and_all_members_die() -> Simulation:
    """Whoever of two newcomers is through goes on with the other when all others die at that moment."""
    simulation = Simulation(2)
    drive(simulation, lambda: simulation.workers["w0"].machine.step == 1)
    simulation.arrive(2)
    simulation.arrive(3)
    drive(simulation, lambda: any(worker.opening is not None for worker in simulation.present))
    decision = next(worker.opening for worker in simulation.present if worker.opening is not None)
    through = decision.newcomers[-1]
    drive(
        simulation, lambda: all(simulation.workers[member.uid].opening == decision for member in decision.view.members)
    )
    make(simulation, through, "take_state", "form", "act")
    simulation.kill("w0")
    simulation.kill("w1")
    settle(simulation, random.Random(0))
    return simulation


def newcomer_waiting_while_a_lower_slot_is_admitted() -> Simulation:
    """Worker 3 comes to worker 1's door just when the replacement of worker 0 has been admitted there."""
    simulation = Simulation(2)
    simulation.kill("w0")
    simulation.arrive(0)
    drive(simulation, lambda: _all_have_met(simulation, "w0'"))
    simulation.arrive(3)
    make(simulation, "w3", "act", "find", "act", "probe", "act")
    settle(simulation, random.Random(0))
    return simulation


def newcomers_of_a_lone_worker() -> Simulation:
    """Two come to a worker that has nobody to wait for."""
    simulation = Simulation(2)
    simulation.kill("w0")
    drive(simulation, lambda: simulation.workers["w1"].machine.step == 2)
    simulation.arrive(2)
    simulation.arrive(3)
    settle(simulation, random.Random(0))
    return simulation


def leaver_whose_host_left_without_answering() -> Simulation:
    """Workers 0 and 1 leave; worker 1 does not get the answer of worker 0, worker 2 does."""
    simulation = Simulation(3)
    for uid in ("w0", "w1"):
        simulation.ask_to_leave(uid)
    one = simulation.workers["w1"]
    drive(simulation, lambda: one.machine.stage is MembershipStage.CLAIMING and not one.todo)
    drive(simulation, lambda: simulation.workers["w2"].machine.view.generation == 2, resting=frozenset({"w1"}))
    make(simulation, "w1", "lose_host")
    settle(simulation, random.Random(0))
    return simulation


def cut_when_only_the_host_knows_who_left() -> Simulation:
    """Worker 2 leaves. Worker 0 has decided so when it is cut off from both others, who have not heard."""
    simulation = Simulation(3)
    simulation.ask_to_leave("w2")
    others = [simulation.workers[uid] for uid in ("w1", "w2")]
    for other in others:
        drive(simulation, lambda other=other: other.machine.stage is MembershipStage.CLAIMING and not other.todo)
    drive(simulation, lambda: simulation.workers["w0"].opening is not None, resting=frozenset({"w1", "w2"}))
    part(simulation, frozenset({"w1", "w2"}), random.Random(0), 600)
    return simulation


ALL = (
    replacement_of_the_lowest_slot_formed_for_some,
    newcomer_with_the_state_that_a_member_has_not_seen_come,
    two_newcomers_and_all_members_die,
    newcomer_waiting_while_a_lower_slot_is_admitted,
    newcomers_of_a_lone_worker,
    leaver_whose_host_left_without_answering,
    cut_when_only_the_host_knows_who_left,
)
