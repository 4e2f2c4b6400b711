"""One thread notices the end of any number of connections that another part of the process reads."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.wire.network.hangups import HangupWatch

LIMIT_S = 60.0


@contextmanager
def pairs(number: int) -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    ours, theirs = zip(*(socket.socketpair() for _ in range(number)), strict=True)
    try:
        yield list(ours), list(theirs)
    finally:
        for one in (*ours, *theirs):
            one.close()


@contextmanager
def watch(sockets: list[socket.socket]) -> Iterator[tuple[HangupWatch, threading.Semaphore]]:
    reports = threading.Semaphore(0)
    watching = HangupWatch({(one.fileno(), os.fstat(one.fileno()).st_ino) for one in sockets}, reports.release)
    try:
        yield watching, reports
    finally:
        watching.close()
        watching.close()


@pytest.mark.parametrize("number", [1, 50])
def test_one_thread_reports_each_socket_that_is_closed_after_a_hangup(number: int) -> None:
    before = threading.active_count()
    with pairs(number) as (ours, theirs), watch(ours) as (_, reports):
        assert threading.active_count() == before + 1
        for mine, other in zip(ours, theirs, strict=True):
            other.close()
            assert not reports.acquire(blocking=False)  # nobody has noticed yet: the owner has not closed it
            mine.close()
            assert reports.acquire(timeout=LIMIT_S)


def test_a_hangup_that_the_owner_has_not_noticed_hides_no_other() -> None:
    with pairs(2) as (ours, theirs), watch(ours) as (_, reports):
        theirs[0].close()
        theirs[1].close()
        ours[1].close()
        assert reports.acquire(timeout=LIMIT_S)


def test_a_socket_is_missed_whose_number_another_file_has() -> None:
    with pairs(1) as (ours, _), watch(ours) as (_, reports):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, ours[0].fileno())
        os.close(nothing)
        assert reports.acquire(timeout=LIMIT_S)
