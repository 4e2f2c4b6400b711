"""The status page: what a worker writes, the launcher reads."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.channels.status import (
    MAX_SLOTS,
    Collective,
    NoStatus,
    Phase,
    StatusPage,
    StatusReader,
    StatusRow,
    StatusWriter,
    Trait,
)

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
        writer.place(generation=2, rank=1, size=4, endpoint_port=41001, num_lanes=2)
        row = page.row(3)
        writer.close()
        assert row.is_member
        assert (row.generation, row.rank, row.size, row.endpoint_port, row.num_lanes) == (2, 1, 4, 41001, 2)


def test_a_worker_is_in_its_run_from_its_place_until_it_closes_it():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 3)
        seen = [page.row(3).is_in_run]
        writer.place(generation=1, rank=1, size=4, endpoint_port=41001, num_lanes=2)
        seen.append(page.row(3).is_in_run)
        for phase, call in ((Phase.AWAITING, Collective.TOTAL), (Phase.AWAITING, Collective.END), (Phase.ENDED, 0)):
            writer.enter(phase, 8, call)
            seen.append(page.row(3).is_in_run)
        writer.close()
    assert seen == [False, True, True, False, False]


def test_a_copy_of_a_worker_keeps_its_traits_and_no_place():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        writer.place(1, 0, 2, 41000, 1)
        writer.add_trait(Trait.READS_RANK)
        writer.move_to(2)
        row = page.row(2)
        writer.close()
    assert (row.is_member, row.traits) == (False, Trait.READS_RANK)


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
        os.pwrite(page.fd, b"".join(number.to_bytes(8, "little") for number in range(21)), 2 * 21 * 8)
        assert page.row(2) == StatusRow(*range(21))


def test_a_wait_is_shown_while_it_lasts_and_stays_where_it_fails():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        writer.enter(Phase.REDUCING, 12, 1, 3)
        with writer.awaiting(Collective.TOTAL):
            during = page.row(0)
        after = page.row(0)
        with pytest.raises(ZeroDivisionError), writer.awaiting(Collective.END):
            raise ZeroDivisionError
        failed = page.row(0)
        writer.close()
    assert (during.phase, during.step, during.detail_a) == (Phase.AWAITING, 12, Collective.TOTAL)
    assert (after.phase, after.step, after.detail_a, after.detail_b) == (Phase.REDUCING, 12, 1, 3)
    assert (failed.is_ending, during.is_ending, after.is_ending) == (True, False, False)


def test_waits_in_calls_count_as_waiting_and_not_as_compute():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        writer.enter(Phase.COMPUTING, 3)
        with writer.awaiting(Collective.STATISTICS):
            since_ns = page.row(0).since_ns
            while time.monotonic_ns() == since_ns:
                pass
        writer.enter(Phase.OUTSIDE, 3)
        writer.committed(3, 0)
        row = page.row(0)
        writer.close()
    assert row.waiting_ns > 0
    assert row.compute_ns + row.waiting_ns <= row.committed_ns


def test_patience_is_asked_for_until_it_is_left_and_the_longest_counts():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        with writer.patient(100.0):
            outer = page.row(0).patient_until_ns
            with writer.patient(1.0):
                assert page.row(0).patient_until_ns == outer
            assert page.row(0).patient_until_ns == outer
        left = page.row(0).patient_until_ns
        writer.close()
    assert 90e9 < outer - time.monotonic_ns() <= 100e9
    assert left == 0


def test_another_run_of_the_same_process_begins_with_nothing_of_the_one_before():
    with StatusPage() as page:
        first = StatusWriter(page.fd, 0)
        first.place(1, 0, 2, 41000, 1)
        first.committed(3, 1000)
        first.enter(Phase.ENDED, 4)
        first.close()
        second = StatusWriter(page.fd, 0)
        row = page.row(0)
        second.close()
    assert (row.is_member, row.is_ending, row.has_started, row.committed_ns) == (False, False, True, 0)


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
            writer.enter(Phase.OUTSIDE, slot)
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
