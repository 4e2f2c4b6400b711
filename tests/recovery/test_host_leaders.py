"""Records that travel host by host: who is killed in the middle of an exchange, as the first of its host too, costs
nothing.

Workers 0 and 1 are one host, 2 and 3 another; 0 and 2 pass on the records of their hosts.
"""

import os
import sys

import pytest
from disturbed import Plan, disturbed
from faults import Fault, sampled
from trainings import Training

from lockstep.settings.environments.lockstep_run import RANK
from lockstep.wire.network import hosts

OVER_HOSTS = Training(options=(("wire", "hierarchical"),))
PARTS = {
    0: ["receive", "receive", "send", "send"],  # of its host, of the other; to the other, to its host
    2: ["receive", "receive", "send", "send"],
    3: ["send", "receive"],
}
MOMENTS = [
    (worker, f"{when} {move} in {what} exchange", moves[:place].count(move) + 1)
    for what in ("commit", "record")
    for worker, moves in PARTS.items()
    for place, move in enumerate(moves)
    for when in ("before", "after")
]


@pytest.fixture(autouse=True)
def _two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lockstep.wire.exchange"], "MOST_DIRECT", 1)
    monkeypatch.setattr(hosts, "_here", lambda: f"host {int(os.environ[RANK]) // 2}")


@pytest.mark.parametrize(("worker", "point", "nth"), sampled(MOMENTS, 5))
def test_a_kill_in_the_middle_of_an_exchange_costs_nothing(worker: int, point: str, nth: int) -> None:
    result = disturbed(OVER_HOSTS, 4, Plan((Fault(worker, 2, point, nth),)))
    assert {sizes[-1] for sizes in result.values("sizes")} == {3}
