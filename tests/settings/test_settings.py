"""Who decides: the command line, the script, the environment, the default."""

import re

import pytest
import torch

from lockstep.errors import BadArgument
from lockstep.lanes import Assignment
from lockstep.settings.environment import Overrides
from lockstep.settings.options import Options, lanes_note, resolve, wire_on
from lockstep.world import World

TWO = World(0, 2, 0, 2)


@pytest.mark.parametrize(
    ("line", "script", "openmp", "expected"),
    [(4, 3, 2, 4), (None, 3, 2, 3), (None, None, 2, 2), (None, None, None, 1)],
)
def test_threads_come_from_the_line_then_the_script_then_openmp(
    line: int | None, script: int | None, openmp: int | None, expected: int
) -> None:
    overrides = Overrides(threads=line, usual_threads=openmp)
    assert resolve(Options(threads=script), overrides, TWO).threads == expected


def test_without_a_word_on_lanes_there_are_as_many_as_workers() -> None:
    settings = resolve(Options(), Overrides(), TWO)
    assert settings.assignment == Assignment.even(2, 2)
    assert not settings.lanes_given


def test_what_the_command_line_sets_goes_over_the_script_and_is_noted() -> None:
    settings = resolve(Options(lanes=8, seed=1), Overrides(lanes=4, seed=7), TWO)
    assert (settings.assignment.num_lanes, settings.seed) == (4, 7)
    assert settings.notes == (
        "lanes 4 from the command line, not 8 from the script",
        "seed 7 from the command line, not 1 from the script",
    )


def test_an_explicit_assignment_counts_as_a_word_on_lanes() -> None:
    assert resolve(Options(assignment=((0, 2), (1,))), Overrides(), TWO).lanes_given


def test_an_assignment_for_another_number_of_workers_is_refused() -> None:
    with pytest.raises(BadArgument, match="names 3 workers, but there are 2"):
        resolve(Options(assignment=((0,), (1,), (2,))), Overrides(), TWO)


TWO_HOSTS = World(0, 4, 0, 2)


@pytest.mark.parametrize(
    ("world", "asked", "wire"),
    [
        (TWO, Options(), "shared"),
        (TWO, Options(exact=False), "shared"),
        (TWO, Options(wire="gloo"), "gloo"),
        (TWO_HOSTS, Options(), "hierarchical"),
        (TWO_HOSTS, Options(exact=False), "gloo"),
        (TWO_HOSTS, Options(exact=False, wire="hierarchical"), "hierarchical"),
    ],
)
def test_the_wire_follows_from_the_hosts_unless_told(world: World, asked: Options, wire: str) -> None:
    assert resolve(asked, Overrides(), world).wire == wire


def test_shared_memory_on_several_hosts_is_refused() -> None:
    with pytest.raises(BadArgument, match="all workers on one host"):
        resolve(Options(wire="shared"), Overrides(), TWO_HOSTS)


def test_an_algorithm_for_sending_is_refused_where_nothing_is_sent() -> None:
    with pytest.raises(BadArgument, match=r"algorithm='direct'.*in shared memory nothing is"):
        resolve(Options(algorithm="direct"), Overrides(), TWO)


def test_an_algorithm_for_sending_is_taken_where_buckets_are_sent_or_nobody_else_is() -> None:
    assert resolve(Options(algorithm="direct"), Overrides(), TWO_HOSTS).algorithm == "direct"
    assert resolve(Options(algorithm="direct"), Overrides(), World()).algorithm == "direct"


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "asked", "expected"),
    [
        (torch.device("cpu"), None, "shared"),
        (torch.device("cpu"), "gloo", "gloo"),
        (GPU, None, "cuda"),
        (GPU, "gpu", "gpu"),
        (GPU, "nccl", "nccl"),
    ],
)
def test_the_wire_follows_the_device(device: torch.device, asked: str | None, expected: str) -> None:
    assert wire_on(device, asked, None, asked or "shared", World(0, 2, 0, 2)) == expected


@pytest.mark.parametrize(
    ("device", "asked", "algorithm", "world", "told"),
    [
        (torch.device("cpu"), "gpu", None, World(0, 2, 0, 2), "wire='gpu' cannot be had on cpu"),
        (torch.device("cpu"), "nccl", None, World(0, 2, 0, 2), "'shared' or 'hierarchical' or 'gloo'"),
        (GPU, "shared", None, World(0, 2, 0, 2), "say 'gpu' or 'nccl'"),
        (GPU, None, "direct", World(0, 2, 0, 2), "leave it out on a GPU"),
        (GPU, "gpu", None, World(0, 2, 0, 1), "needs all workers on one host"),
    ],
)
def test_a_wire_that_a_device_cannot_have_is_refused(
    device: torch.device, asked: str | None, algorithm: str | None, world: World, told: str
) -> None:
    with pytest.raises(BadArgument, match=re.escape(told)):
        wire_on(device, asked, algorithm, asked or "shared", world)


def test_many_lanes_on_one_gpu_are_noted() -> None:
    gpu, four, three = torch.device("cuda"), Assignment(((0, 1, 2, 3), (4, 5))), Assignment(((0, 1, 2), (3, 4, 5)))
    (note,) = lanes_note(gpu, four)
    assert note.startswith("a worker computes 4 lanes one after the other:")
    assert lanes_note(gpu, three) == lanes_note(torch.device("cpu"), four) == []


def test_workers_that_carry_no_lane_are_noted() -> None:
    five = World(0, 5, 0, 5)
    (note,) = resolve(Options(), Overrides(lanes=2), five).notes
    assert note.startswith("3 of 5 workers idle: with 2 lanes,")
    assert resolve(Options(lanes=5), Overrides(), five).notes == ()
    (one,) = resolve(Options(assignment=((0,), ())), Overrides(), TWO).notes
    assert one.startswith("1 of 2 workers idles: with 1 lane,")
