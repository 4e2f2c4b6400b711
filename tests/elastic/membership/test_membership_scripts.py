"""The histories of scripts.py: all who live end in one generation, newcomers too, and the steps go on."""

from collections.abc import Callable

import pytest
import scripts
from simulation import Simulation


@pytest.mark.parametrize("script", scripts.ALL, ids=lambda script: script.__name__)
def test_all_who_live_go_on_together(script: Callable[[], Simulation]) -> None:
    script()


def test_a_replacement_does_not_become_the_host_before_those_who_were_there() -> None:
    simulation = scripts.newcomer_waiting_while_a_lower_slot_is_admitted()
    keepers = [worker.uid for worker in simulation.present if worker.machine.is_coordinator]
    assert keepers == ["w1"]


def test_ranks_follow_slots_whoever_was_admitted_first() -> None:
    simulation = scripts.newcomer_waiting_while_a_lower_slot_is_admitted()
    assert [member.uid for member in simulation.workers["w1"].machine.view.members] == ["w0'", "w1", "w3"]
