"""Whom workers name when one of them leaves: four workers' ends of real connections, in one process."""

import socket
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations, permutations

import pytest
import torch

from lockstep.wire.cuda.gpu import GpuWatchdog
from lockstep.wire.shared.neighbours import ENDED, Neighbours

ORDERS = list(permutations(range(4)))


@pytest.fixture
def workers() -> Iterator[list[Neighbours]]:
    ends: list[dict[int, socket.socket]] = [{} for _ in range(4)]
    for one, other in combinations(range(4), 2):
        ends[one][other], ends[other][one] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = torch.zeros(4, dtype=torch.int32)
    opened = [Neighbours(rank, sockets, page, 1.0) for rank, sockets in enumerate(ends)]
    yield opened
    for neighbours in opened:
        neighbours.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_chain_of_blame_ends_at_the_one_that_died(workers: list[Neighbours], order: tuple[int, ...]) -> None:
    died, second, third, last = order
    workers[died].close()
    assert workers[second].blame(died, ENDED).rank == died
    workers[second].close()
    assert workers[third].blame(second, ENDED).rank == died
    workers[third].close()
    assert {workers[last].blame(gone, ENDED).rank for gone in workers[last].gone()} == {died}


@pytest.mark.parametrize("order", ORDERS)
def test_who_is_accused_of_silence_and_lives_accuses_nobody_in_turn(
    workers: list[Neighbours], order: tuple[int, ...]
) -> None:
    silent, first, second, last = order
    assert workers[first].blame(silent, "it has been silent").rank == silent
    workers[first].close()
    assert workers[silent].blame(first, ENDED).rank == first  # it cannot know better
    workers[silent].close()
    assert workers[second].blame(first, ENDED).rank == silent
    workers[second].close()
    assert {workers[last].blame(gone, ENDED).rank for gone in workers[last].gone()} == {silent}


@pytest.mark.parametrize("order", ORDERS)
def test_whom_another_lets_go_names_the_one_it_accuses_before_anybody_has_hung_up(
    workers: list[Neighbours], order: tuple[int, ...]
) -> None:
    rank, faster, silent, _ = order
    with closing(GpuWatchdog(workers[rank], lambda: None, list)) as watchdog:
        assert workers[faster].blame(silent, "it has been silent").rank == silent
        assert watchdog.verdict().rank == silent
        workers[rank].close()
