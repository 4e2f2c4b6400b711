"""The roster that a Ray actor keeps does what every home of a roster does."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from ray_clusters import RayCluster, joined, needs_ray, ray_cluster

pytestmark = needs_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(1, 4) as opened:
        yield opened


@pytest.fixture(scope="module")
def actor(cluster: RayCluster) -> Iterator[Any]:
    """The module, in a process that belongs to the cluster."""
    with joined(cluster):
        yield importlib.import_module("lockstep.elastic.roster.ray_actor")


def test_what_one_puts_all_find(actor: Any) -> None:
    here, there = actor.RayHome("found"), actor.RayHome("found")
    here.put("member/0", "a")
    here.put("member/1", "b")
    here.put("member/0", "c")
    assert there.entries() == {"member/0": "c", "member/1": "b"}
    assert actor.RayHome("other").entries() == {}


def test_of_many_that_put_at_once_one_is_first_and_all_learn_who(actor: Any) -> None:
    ray = importlib.import_module("ray")
    home = actor.RayHome("first")
    asked = [home._actor.put_first.remote("elected", str(number)) for number in range(20)]
    assert len(set(ray.get(asked))) == 1
    assert home.put_first("elected", "late") == home.entries()["elected"]


def test_a_roster_whose_actor_is_gone_is_an_error_that_names_it(actor: Any) -> None:
    ray = importlib.import_module("ray")
    home = actor.RayHome("gone")
    ray.kill(home._actor)
    with pytest.raises(ray.exceptions.RayActorError):  # Ray kills it a moment later
        while True:
            ray.get(home._actor.entries.remote())
    with pytest.raises(ConnectionError, match="ray://gone is gone"):
        home.entries()


def test_a_roster_is_not_lost_with_a_node(actor: Any, cluster: RayCluster) -> None:
    homes = [actor.RayHome(f"kept-{number}") for number in range(4)]
    cluster.kill_node(1)
    assert [home.put_first("elected", "a") for home in homes] == ["a"] * 4


def test_a_name_that_is_none_is_refused(actor: Any) -> None:
    with pytest.raises(ValueError, match="cannot name"):
        actor.RayHome("../x")


def test_nothing_imports_ray_unless_it_is_asked_for() -> None:
    code = "import sys, lockstep, lockstep.cli.main, lockstep.cli.run; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
