"""Workers on several hosts go on by themselves when one of them, or a whole host, or the link to it, is lost.

Each run is compared with one undisturbed worker. See hosts_faults.py for what can be done to a host.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hosts import Network, _enter, address, existing, hosts
from hosts_faults import (
    JOB,
    NARROW_MBIT_PER_S,
    WIDE,
    Deed,
    Fault,
    Scene,
    cut_power,
    ends,
    kill_host,
    kill_worker,
    kill_worker_in_update,
    played,
    pull_cable,
    silence_link,
    silence_link_later,
)
from own_parameters import AsOnGpus
from torch.distributed import DistError  # type: ignore[attr-defined]
from training import Job, digest_after
from workers import Outcome, on_workers

from lockstep.elastic.client import EndpointClient, probe
from lockstep.elastic.endpoint import Endpoint
from lockstep.elastic.membership.view import Claim, Liveness, Member
from lockstep.elastic.store import Secret
from lockstep.wire.network.gloo import CONNECT_S


@pytest.fixture(scope="module", autouse=True)
def no_namespace_left() -> Iterator[None]:
    yield
    assert existing(f"lockstep-{os.getpid()}-") == []


@pytest.fixture(scope="module")
def alone() -> dict[Job, list[Any]]:
    """Digest and number of steps of each training on one worker that nothing happens to."""
    return {job: on_workers(1, digest_after, job)[0] for job in (JOB, WIDE)}


# -- the dead: their kernels say so ----------------------------------------------------------------------------

KILLS = (
    {
        f"{fault.deed.__name__} {fault.rank}, {wire}": Scene(workers_of, wire, fault)
        for wire in ("gloo", "hierarchical")
        for workers_of, fault in [
            ((2, 1), Fault(kill_worker, 0, 0)),
            ((2, 1), Fault(kill_worker, 2, 1)),
            ((2, 2), Fault(kill_host, 0, 0)),
            ((2, 2), Fault(kill_host, 3, 1)),
        ]
    }
    | {
        f"{fault.deed.__name__} {fault.rank}, sharded": Scene(
            workers_of, "hierarchical", fault, strategy="sharded:parameters"
        )
        for workers_of, fault in [
            ((2, 1), Fault(kill_worker_in_update, 0, 0)),
            ((1, 2), Fault(kill_worker_in_update, 2, 1)),
            ((2, 2), Fault(kill_host, 3, 1)),
        ]
    }
    | {
        f"{fault.deed.__name__} {fault.rank}, as on GPUs": Scene(
            workers_of, "hierarchical", fault, strategy=AsOnGpus(level)
        )
        for level, workers_of, fault in [
            ("optimizer", (2, 1), Fault(kill_worker_in_update, 1, 0)),
            ("gradients", (2, 2), Fault(kill_host, 3, 1)),
        ]
    }
)


def _asked_for(request: pytest.FixtureRequest, test: Callable[..., None]) -> list[str]:
    """The names with which the test is run this time."""
    return [item.callspec.params["name"] for item in request.session.items if getattr(item, "function", None) is test]


@pytest.fixture(scope="module")
def kills(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    names = _asked_for(request, test_when_a_worker_or_a_whole_host_is_killed_the_others_go_on_to_the_same_bits)
    return dict(zip(names, played([KILLS[name] for name in names]), strict=True))


@pytest.mark.parametrize("name", KILLS)
def test_when_a_worker_or_a_whole_host_is_killed_the_others_go_on_to_the_same_bits(
    name: str, kills: dict[str, list[Outcome]], alone: dict[Job, list[Any]]
) -> None:
    killed = [rank for rank, outcome in enumerate(kills[name]) if outcome.killed_by == signal.SIGKILL]
    fault = KILLS[name].fault
    assert killed == ([2 * fault.host, 2 * fault.host + 1] if fault.deed is kill_host else [fault.rank])
    survivors = ends(kills[name]).values()
    assert [(end.digest, end.step, end.size) for end in survivors] == [(*alone[JOB], 2)] * 2


# -- the silent: nobody says anything --------------------------------------------------------------------------

SILENCES = {
    "the host of one of three": (Scene((2, 1), "hierarchical", Fault(silence_link, 0, 1)), {0, 1}),
    "the host of worker 0, of three": (Scene((1, 2), "gloo", Fault(silence_link, 0, 0)), {1, 2}),
    "one of two": (Scene((1, 1), "hierarchical", Fault(silence_link, 1, 1)), {0}),
    "two of four": (Scene((2, 2), "gloo", Fault(silence_link, 3, 1)), {0, 1}),
    "one of three hosts": (Scene((1, 1, 1), "hierarchical", Fault(silence_link, 2, 1)), {0, 2}),
    "a cable is pulled": (Scene((2, 1), "gloo", Fault(pull_cable, 2, 1)), {0, 1}),
    "a message is half sent": (
        Scene((1, 1), "gloo", Fault(silence_link_later, 0, 0), WIDE, NARROW_MBIT_PER_S),
        {0},
    ),
    "a message is half sent between three": (
        Scene((2, 1), "hierarchical", Fault(silence_link_later, 2, 1), WIDE, NARROW_MBIT_PER_S),
        {0, 1},
    ),
    "no power on the host of worker 0": (Scene((1, 2), "hierarchical", Fault(cut_power, 0, 0)), {1, 2}),
    "no power on the host of most": (Scene((1, 2), "gloo", Fault(cut_power, 2, 1)), set()),
}
"""The scene, and who must go on."""


@pytest.fixture(scope="module")
def silences(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    """All of them at once: each waits for seconds."""
    names = _asked_for(request, test_a_link_that_falls_silent_is_noticed_by_the_kernel_long_before_gloo_gives_up)
    return dict(zip(names, played([SILENCES[name][0] for name in names]), strict=True))


@pytest.mark.parametrize("name", SILENCES)
def test_when_a_link_falls_silent_the_larger_half_or_the_lowest_slot_goes_on_to_the_same_bits(
    name: str, silences: dict[str, list[Outcome]], alone: dict[Job, list[Any]]
) -> None:
    scene, going_on = SILENCES[name]
    found = {rank: end for rank, end in ends(silences[name]).items() if not end.left}
    assert set(found) == going_on
    assert all((end.digest, end.step, end.size) == (*alone[scene.job], len(going_on)) for end in found.values())


@pytest.mark.parametrize("name", SILENCES)
def test_when_a_link_falls_silent_the_others_leave_and_commit_nothing_more(
    name: str, silences: dict[str, list[Outcome]]
) -> None:
    scene, going_on = SILENCES[name]
    lived = {rank for rank, outcome in enumerate(silences[name]) if outcome.killed_by is None}
    left = {rank: end for rank, end in ends(silences[name]).items() if end.left}
    assert set(left) == lived - going_on
    assert lived == set(range(sum(scene.workers_of))) or scene.fault.deed is cut_power
    for rank, end in left.items():
        assert end.left.startswith(f"worker {rank} leaves the run: worker")
        assert "cannot be reached" in end.left
        assert end.step <= scene.fault.step


@pytest.mark.parametrize("name", SILENCES)
def test_a_link_that_falls_silent_is_noticed_by_the_kernel_long_before_gloo_gives_up(
    name: str, silences: dict[str, list[Outcome]]
) -> None:
    assert all(end.waited_s < CONNECT_S for end in ends(silences[name]).values())


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wire", ["gloo", "hierarchical"])
@pytest.mark.parametrize("deed", [silence_link, pull_cable, cut_power], ids=lambda deed: deed.__name__)
def test_links_lost_before_any_step_never_leave_two_halves_that_both_go_on(
    wire: str, deed: Deed, alone: dict[Job, list[Any]]
) -> None:
    for step in range(12):
        for outcomes in played([Scene(of, wire, Fault(deed, 0, 0, step)) for of in ((2, 1), (1, 2), (2, 2))]):
            done = [end for end in ends(outcomes).values() if not end.left]
            assert {(end.digest, end.step) for end in done} <= {tuple(alone[JOB])}
            assert all(end.size == len(done) for end in done)


# -- doors that do not answer ----------------------------------------------------------------------------------


def test_a_door_that_takes_calls_but_never_says_a_word_does_not_hold_up_who_knocks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as speechless:
        assert probe(Member("uid", 0, f"127.0.0.1:{speechless.getsockname()[1]}"), Secret(b"s")) is Liveness.ALIVE


def _visit_a_vanishing_host(network: Network) -> list[str]:
    """What becomes of a visitor that waits for an answer, and of one that asks, when the link is lost."""
    if os.environ["RANK"] != "0":
        return []
    _enter(network.namespaces[1])
    door = Endpoint(1, address(1), secret=Secret(b"s"), everywhere=True)
    _enter(network.namespaces[0])
    waits, asks = EndpointClient(door.member.address, Secret(b"s")), EndpointClient(door.member.address, Secret(b"s"))
    claim = Claim(Member("uid", 0, ""), 1, 0)
    number = waits.send_claim(claim)
    silence_link(network, 1)
    with pytest.raises(DistError) as waiting:
        while waits.await_decision(number, 1.0) is None:
            pass
    with pytest.raises(DistError) as asking:
        asks.send_claim(claim)
    return [str(waiting.value), str(asking.value)]


def test_a_visit_at_the_door_of_a_host_that_vanishes_comes_to_an_end() -> None:
    with hosts([1, 1]) as network:
        result = network.on_workers(_visit_a_vanishing_host, network)[0]
    assert len(result) == 2
