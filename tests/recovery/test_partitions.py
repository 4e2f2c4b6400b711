"""Links between some hosts are lost, in both directions or in one: at most one training goes on, soon.

Each scene is played by real workers on hosts of their own. See hosts_faults.py for how a link is lost.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hosts_faults import JOB, Fault, Scene, cut_power, ends, lose_links, played, silence_link
from training import digest_after, loader_of, make, train_step
from workers import Outcome, on_workers, outcomes

import lockstep
from lockstep.elastic.opener import WireOpener
from lockstep.errors import BadEnvironment

LIMIT_S = 30.0
ONE_EACH = (1, 1, 1)

PARTIAL = {
    "0 and 1 lose each other": (lose_links((0, 1), (1, 0)), {0, 2}),
    "0 and 2 lose each other": (lose_links((0, 2), (2, 0)), {0, 1}),
    "1 and 2 lose each other": (lose_links((1, 2), (2, 1)), {0, 1}),
    "what 0 sends to 1 is lost": (lose_links((0, 1)), {0, 2}),
    "what 2 sends to 0 is lost": (lose_links((2, 0)), {0, 1}),
    "what 1 sends to 2 is lost": (lose_links((1, 2)), {0, 1}),
    "all lose one another": (lose_links((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)), set()),
}
"""What is lost between three hosts of one worker each, and who must go on."""

HALVES = {
    "the first host's power is cut": (Scene((1, 1), "hierarchical", Fault(cut_power, 0, 0)), [{1}]),
    "the link between two halves is lost": (Scene((1, 1), "gloo", Fault(silence_link, 0, 1)), [{0}, {1}]),
}
"""The scene, with a witness, and each set of workers that may go on."""


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Digest and number of steps on one worker that nothing happens to."""
    found: list[Any] = on_workers(1, digest_after, JOB)[0]
    return found


@pytest.fixture(scope="module")
def partial(request: pytest.FixtureRequest) -> dict[str, list[Outcome]]:
    """Those that are asked for, all at once: each waits for seconds."""
    wanted = test_of_hosts_that_do_not_all_reach_one_another_at_most_one_training_goes_on
    cases = [item for item in request.session.items if getattr(item, "function", None) is wanted]
    names = [case.callspec.params["name"] for case in cases]  # type: ignore[attr-defined]
    scenes = [Scene(ONE_EACH, "gloo", Fault(PARTIAL[name][0], 0, 0)) for name in names]
    return dict(zip(names, played(scenes), strict=True))


@pytest.mark.parametrize("name", PARTIAL)
def test_of_hosts_that_do_not_all_reach_one_another_at_most_one_training_goes_on(
    name: str, partial: dict[str, list[Outcome]], alone: list[Any]
) -> None:
    found, going_on = ends(partial[name]), PARTIAL[name][1]
    assert {rank for rank, end in found.items() if not end.left} == going_on, [end.left for end in found.values()]
    for rank, end in found.items():
        if rank in going_on:
            assert [end.digest, end.step, end.size] == [*alone, len(going_on)]
        else:
            assert end.left.startswith(f"worker {rank} leaves the run: ")
            assert "reach" in end.left
        assert end.waited_s < LIMIT_S


@pytest.mark.parametrize("name", HALVES)
def test_of_two_halves_the_one_that_asks_the_witness_first_goes_on(name: str, tmp_path: Path, alone: list[Any]) -> None:
    scene, allowed = HALVES[name]
    scene = Scene(scene.workers_of, scene.wire, scene.fault, roster=str(tmp_path / "roster"))
    found = ends(played([scene])[0])
    going_on = {rank for rank, end in found.items() if not end.left}
    assert going_on in allowed, [end.left for end in found.values()]
    assert all([found[rank].digest, found[rank].step] == alone for rank in going_on)
    left = [end.left for end in found.values() if end.left]
    assert all("first to ask the witness" in text for text in left)


def _train_behind_a_closed_port() -> list[Any]:
    """Worker 3 dies; the connections of workers 1 and 2 can never be opened again, though they reach each other."""
    right = WireOpener.form

    def form(self: WireOpener, view: Any, *rest: Any) -> Any:
        if {1, 2} <= {member.slot for member in view.members}:
            raise BadEnvironment("the port is closed")
        return right(self, view, *rest)

    WireOpener.form = form  # type: ignore[method-assign]
    run = lockstep.start(lanes=8, seed=3)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader, slot = run.shard(loader_of(JOB)), run.rank
    try:
        for _ in run.epochs(JOB.epochs):
            for batch in loader:
                if slot == 3 and run.step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                train_step(run, JOB, model, optimizer, batch)
    except SystemExit as end:
        return [str(end.__cause__), end.code]
    return [run.digest(), run.step]


def test_who_reach_one_another_and_cannot_connect_go_on_without_the_latest_of_them(alone: list[Any]) -> None:
    found = outcomes(4, _train_behind_a_closed_port)
    assert [outcome.error for outcome in found] == [None] * 4, found
    assert found[0].value == found[1].value == alone
    reason, code = found[2].value
    assert code == 75
    assert "worker 2 leaves the run" in reason
    assert "the port is closed" in reason
