"""Jobs one after the other on a thread of their own."""

import threading

import pytest
import torch

from lockstep.errors import Misuse, PeerGone
from lockstep.wire.reduction_queue import ThreadQueue, flushes_denormals


def test_a_job_handed_in_after_closing_fails_and_is_not_waited_for() -> None:
    sequence = ThreadQueue()
    sequence.close()
    with pytest.raises(Misuse, match="closed"):
        sequence.submit(lambda: None).result(timeout=60)


def test_a_job_that_cannot_be_woken_fails_with_the_error_told_from_outside() -> None:
    sequence, asleep = ThreadQueue(), threading.Event()
    stuck, waiting = sequence.submit(lambda: asleep.wait(30) and None), sequence.submit(lambda: None)
    sequence.fail(PeerGone(1, "it is gone"))
    for job in (stuck, waiting, sequence.submit(lambda: None)):
        assert isinstance(job.exception(timeout=60), PeerGone)
    asleep.set()
    sequence.close()


def test_after_a_failed_job_later_ones_fail_with_the_same_error_and_do_not_run() -> None:
    sequence, ran = ThreadQueue(), []

    def fail() -> None:
        raise PeerGone(2, "it is gone")

    first, second = sequence.submit(fail), sequence.submit(lambda: ran.append(1))
    assert first.exception(timeout=60) is second.exception(timeout=60)
    sequence.close()
    assert ran == []


def test_a_job_takes_tiny_numbers_for_zero_if_its_caller_does() -> None:
    sequence, seen = ThreadQueue(), []
    before = flushes_denormals()
    try:
        for wanted in (True, False, True):
            torch.set_flush_denormal(wanted)
            sequence.submit(lambda: seen.append(flushes_denormals())).result(timeout=60)
    finally:
        torch.set_flush_denormal(before)
        sequence.close()
    assert seen == [True, False, True]
