"""The status page: what a worker writes, the launcher reads."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.run.launching.status import MAX_SLOTS, NoStatus, Phase, StatusPage, StatusReader, StatusRow, StatusWriter

slots = st.integers(0, MAX_SLOTS - 1)
numbers = st.integers(0, 2**63 - 1)


@given(slots, numbers, numbers, numbers)
def test_what_a_worker_enters_is_read_in_its_row(slot, step, a, b):
    with StatusPage() as page:
        before_ns = time.monotonic_ns()
        writer = StatusWriter(page.fd, slot)
        writer.enter(Phase.REDUCING, step, a, b)
        row = page.row(slot)
        writer.close()
        assert (row.pid, row.phase, row.step, row.detail_a, row.detail_b) == (os.getpid(), Phase.REDUCING, step, a, b)
        assert before_ns <= row.since_ns <= time.monotonic_ns()


def test_a_worker_becomes_a_member_with_its_place():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 3)
        assert not page.row(3).is_member
        writer.place(generation=2, rank=1, size=4, door_port=41001, num_lanes=2)
        row = page.row(3)
        writer.close()
        assert row.is_member
        assert (row.generation, row.rank, row.size, row.door_port, row.num_lanes) == (2, 1, 4, 41001, 2)


def test_after_a_commit_the_next_step_is_under_way():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        writer.committed(412, usual_step_ns=410_000_000)
        row = page.row(0)
        writer.close()
        assert (row.step, row.usual_step_ns) == (413, 410_000_000)
        assert 0 < row.committed_ns <= time.monotonic_ns()


def test_the_fields_stand_in_the_order_that_all_parts_agreed_on():
    with StatusPage() as page:
        os.pwrite(page.fd, b"".join(number.to_bytes(8, "little") for number in range(16)), 2 * 128)
        assert page.row(2) == StatusRow(*range(16))


@given(slots, slots)
def test_a_worker_writes_no_row_but_its_own(slot, other):
    with StatusPage() as page:
        writer = StatusWriter(page.fd, slot)
        writer.place(1, 2, 3, 4, 5)
        writer.close()
        assert other == slot or page.row(other) == StatusRow()


def test_a_cleared_row_tells_nothing_of_the_worker_before():
    with StatusPage() as page:
        for slot in (0, 1):
            writer = StatusWriter(page.fd, slot)
            writer.place(1, slot, 2, 41001, 4)
            writer.close()
        page.clear(0)
        assert page.row(0) == StatusRow()
        assert page.row(1).is_member


def test_a_reader_sees_the_rows_that_somebody_has_written():
    with StatusPage() as page:
        for slot in (5, 2):
            writer = StatusWriter(page.fd, slot)
            writer.enter(Phase.SAVING, slot)
            writer.close()
        reader = StatusReader(page.fd)
        rows = reader.rows()
        reader.close()
        assert rows == {2: page.row(2), 5: page.row(5)}


@pytest.mark.parametrize("slot", [-1, MAX_SLOTS])
def test_a_slot_that_is_not_on_the_page_is_refused(slot):
    with StatusPage() as page, pytest.raises(ValueError, match="slots 0 to 1023"):
        StatusWriter(page.fd, slot)


def test_without_a_launcher_the_same_calls_do_nothing():
    nobody = NoStatus()
    nobody.enter(Phase.COMPUTING, 1)
    nobody.place(1, 0, 1, 0, 1)
    nobody.committed(1, 0)
    nobody.close()
