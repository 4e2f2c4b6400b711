"""What a survivor holds after many losses: no socket and no thread of a generation that is gone."""

import gc
import os
import threading
from functools import partial

import pytest
from disturbed import Arrival, Plan, disturbed
from faults import Fault
from trainings import Training, Work

FEW = 4
"""So many descriptors are no leak of one with every loss."""


def _held(work: Work) -> dict[str, int]:
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    return {"descriptors": len(os.listdir("/proc/self/fd")), "wire threads": names.count("lockstep-wire")}


def _note(last: int, number: int, work: Work) -> None:
    """What this worker holds before anybody is lost, and at the end."""
    if work.run.step in (1, last):
        work.notes.append(_held(work))


@pytest.mark.soak
@pytest.mark.parametrize("wire", ["shared", "gloo"])
def test_ten_kills_leave_no_socket_and_no_thread(wire: str) -> None:
    """Ten workers join, one after the other, and each is killed: the same two are there before and after."""
    training = Training(epochs=8, options=(("wire", wire),))
    arrivals = tuple(Arrival(1 + 3 * death, 2) for death in range(10))
    faults = tuple(Fault(2 + death, 3 + 3 * death, "before waits") for death in range(10))
    result = disturbed(training, 2, Plan(faults, arrivals, extra=partial(_note, training.steps - 1)))
    for worker in (0, 1):
        before, after = result.outcomes[worker].value["notes"]
        assert after["descriptors"] <= before["descriptors"] + FEW
        assert after["wire threads"] <= 1
