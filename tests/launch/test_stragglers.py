"""Who is slow and with what, from what the workers' rows say at which time."""

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.errors import BadArgument
from lockstep.launch.channels.status import Phase, StatusPage, StatusRow, StatusWriter
from lockstep.launch.supervision.messages import LauncherConsole, slow_message
from lockstep.launch.supervision.stragglers import (
    CaughtUp,
    PaceFinding,
    Slow,
    SlowCause,
    StragglerDetector,
    TimeSpent,
    slow_workers,
    time_spent,
)
from lockstep.launch.supervision.watchdog import Watchdog


@dataclass(frozen=True)
class Work:
    """What a worker needs for a step, in seconds; data and compute by the lane."""

    data_s: float = 0.01
    compute_s: float = 0.2
    other_s: float = 0.01
    lanes: int = 2

    def step_s(self) -> float:
        return self.lanes * (self.data_s + self.compute_s) + self.other_s


USUAL = Work()
SLOW = {
    SlowCause.DATA: replace(USUAL, data_s=0.4),
    SlowCause.COMPUTE: replace(USUAL, compute_s=0.6),
    SlowCause.OTHER: replace(USUAL, other_s=0.8),
}


class Workers:
    """Workers that step together: each waits for the one that takes longest."""

    def __init__(self, num_workers: int = 3, **slowness: float) -> None:
        self.slowness = StragglerDetector(**slowness)
        self.now_s = 1000.0
        self.rows = {
            slot: StatusRow(pid=100 + slot, generation=1, usual_step_ns=1, committed_ns=int(1e12))
            for slot in range(num_workers)
        }

    def steps(self, number: int, work: dict[int, Work] | None = None, usual: Work = USUAL) -> list[PaceFinding]:
        """All that is found while they do so many steps, looked at after each."""
        found: list[PaceFinding] = []
        for _ in range(number):
            work_of = {slot: (work or {}).get(slot, usual) for slot in self.rows}
            taken_s = max(one.step_s() for one in work_of.values())
            self.now_s += taken_s
            self.rows = {slot: stepped(row, work_of[slot], taken_s) for slot, row in self.rows.items()}
            found += self.slowness.look(self.now_s, self.rows)
        return found


def stepped(row: StatusRow, work: Work, taken_s: float) -> StatusRow:
    return replace(
        row,
        step=row.step + 1,
        num_lanes=work.lanes,
        committed_ns=row.committed_ns + int(taken_s * 1e9),
        data_ns=row.data_ns + int(work.lanes * work.data_s * 1e9),
        compute_ns=row.compute_ns + int(work.lanes * work.compute_s * 1e9),
        waiting_ns=row.waiting_ns + int((taken_s - work.step_s()) * 1e9),
    )


def named(found: list[PaceFinding]) -> list[tuple[int, str]]:
    return [(one.slot, one.cause if isinstance(one, Slow) else "caught up") for one in found]


@pytest.mark.parametrize("cause", SlowCause)
@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_a_slow_worker_is_named_once_with_its_cause(cause, num_workers):
    assert named(Workers(num_workers).steps(300, {1: SLOW[cause]})) == [(1, cause)]


def test_it_is_named_when_the_second_window_ends_with_what_was_measured_in_both():
    workers = Workers()
    assert workers.steps(40, {2: SLOW[SlowCause.DATA]}) == []  # the first step only opens the first window
    (slow,) = workers.steps(1, {2: SLOW[SlowCause.DATA]})
    assert (slow.slot, slow.num_steps, slow.num_others) == (2, 40, 2)
    assert (slow.cause_s, slow.others_s) == pytest.approx((0.8, 0.02))
    assert slow.times == pytest.approx(1.21 / 0.43)
    assert slow.waiting_share == pytest.approx(1 - 0.43 / 1.21)


def test_a_window_takes_five_seconds_however_fast_the_steps_are():
    fast, slow = Work(0.0, 0.001, 0.0), Work(0.0, 0.003, 0.0)
    workers = Workers()
    assert workers.steps(1600, {0: slow}, fast) == []
    assert named(workers.steps(100, {0: slow}, fast)) == [(0, SlowCause.COMPUTE)]


def test_a_worker_that_was_given_more_lanes_is_not_slow():
    assert Workers().steps(200, {0: replace(USUAL, lanes=6)}) == []


def test_a_worker_with_few_lanes_is_not_slow_for_what_every_worker_has_to_do():
    usual = replace(USUAL, other_s=1.0, lanes=6)
    assert Workers().steps(200, {0: replace(usual, lanes=1)}, usual) == []


def test_a_worker_with_fewer_lanes_is_slow_if_the_others_wait_for_it_all_the_same():
    one_lane = replace(USUAL, lanes=1, compute_s=2.0)
    assert named(Workers().steps(200, {0: one_lane})) == [(0, SlowCause.COMPUTE)]


def test_a_little_more_by_the_step_is_not_slow_whatever_it_is_by_the_lane():
    usual = Work(data_s=0.0, compute_s=0.1, other_s=0.15, lanes=6)
    assert Workers().steps(200, {0: replace(usual, lanes=1, compute_s=0.85)}, usual) == []


def test_lanes_that_take_no_longer_than_those_of_others_are_not_the_cause():
    more_lanes = replace(USUAL, lanes=10, data_s=0.15)
    assert named(Workers().steps(200, {0: more_lanes})) == [(0, SlowCause.DATA)]


def test_workers_without_lanes_are_no_measure_for_the_others():
    idle = replace(USUAL, lanes=0)
    assert Workers(5).steps(200, {2: idle, 3: idle, 4: idle}) == []


def test_a_worker_without_lanes_is_slow_if_the_others_wait_for_its_code_between_steps():
    assert named(Workers().steps(200, {1: Work(lanes=0, other_s=2.0)})) == [(1, SlowCause.OTHER)]


def test_a_worker_alone_is_never_slow():
    assert Workers(1).steps(200, {0: SLOW[SlowCause.DATA]}) == []


def test_two_slow_workers_of_five_are_both_named():
    found = Workers(5).steps(200, {1: SLOW[SlowCause.DATA], 3: SLOW[SlowCause.COMPUTE]})
    assert named(found) == [(1, SlowCause.DATA), (3, SlowCause.COMPUTE)]


@settings(max_examples=30)
@given(st.integers(0, 45), st.floats(1.0, 1000.0))
def test_one_pause_names_nobody(after, pause_s):
    workers = Workers()
    found = workers.steps(after) + workers.steps(1, {1: Work(other_s=pause_s)}) + workers.steps(100)
    assert found == []


def test_a_pause_in_every_third_window_names_nobody():
    workers = Workers()
    evaluates = Work(other_s=30.0)
    assert [one for _ in range(10) for one in workers.steps(59) + workers.steps(1, {0: evaluates})] == []


def test_a_slow_start_names_nobody():
    workers = Workers()
    workers.rows = {slot: replace(row, usual_step_ns=0) for slot, row in workers.rows.items()}
    assert workers.steps(200, {1: SLOW[SlowCause.COMPUTE]}) == []
    workers.rows = {slot: replace(row, usual_step_ns=1) for slot, row in workers.rows.items()}
    assert workers.steps(200) == []


def test_a_new_generation_begins_its_windows_anew():
    workers = Workers()
    workers.steps(35, {1: SLOW[SlowCause.DATA]})
    workers.rows = {slot: replace(row, generation=2) for slot, row in workers.rows.items()}
    assert workers.steps(35, {1: SLOW[SlowCause.DATA]}) == []
    assert named(workers.steps(10, {1: SLOW[SlowCause.DATA]})) == [(1, SlowCause.DATA)]


def test_a_run_that_went_back_to_an_earlier_step_begins_its_windows_anew():
    workers = Workers()
    workers.steps(135)
    workers.rows = {slot: replace(row, step=0) for slot, row in workers.rows.items()}
    assert named(workers.steps(60, {1: SLOW[SlowCause.DATA]})) == [(1, SlowCause.DATA)]


def test_joiners_are_neither_compared_nor_awaited():
    workers = Workers()
    workers.rows[3] = StatusRow(pid=999, phase=Phase.JOINING)
    assert named(workers.steps(100, {1: SLOW[SlowCause.DATA]})) == [(1, SlowCause.DATA)]


def test_when_it_is_normal_for_two_windows_it_has_caught_up_and_that_is_said_once():
    workers = Workers()
    workers.steps(60, {1: SLOW[SlowCause.DATA]})
    assert workers.steps(39) == []
    assert workers.steps(1000) == [CaughtUp(1)]


def test_one_that_is_slow_again_is_named_again_but_not_within_five_minutes():
    workers = Workers()
    found = workers.steps(60, {1: SLOW[SlowCause.OTHER]}) + workers.steps(60)
    began_s = workers.now_s
    assert named(found) == [(1, SlowCause.OTHER), (1, "caught up")]
    soon = workers.steps(200, {1: SLOW[SlowCause.OTHER]})
    assert workers.now_s - began_s < 300
    assert soon == []
    assert named(workers.steps(200, {1: SLOW[SlowCause.OTHER]})) == [(1, SlowCause.OTHER)]


def test_one_whose_cause_changes_is_named_again_but_not_within_five_minutes():
    workers = Workers()
    assert named(workers.steps(60, {1: SLOW[SlowCause.DATA]})) == [(1, SlowCause.DATA)]
    assert workers.steps(180, {1: SLOW[SlowCause.COMPUTE]}) == []
    assert named(workers.steps(300, {1: SLOW[SlowCause.COMPUTE]})) == [(1, SlowCause.COMPUTE)]


def test_a_pause_of_a_worker_that_is_slow_anyway_is_no_new_cause():
    workers = Workers(again_s=0.0)
    found = workers.steps(60, {1: SLOW[SlowCause.DATA]}) + workers.steps(
        1, {1: replace(SLOW[SlowCause.DATA], other_s=100.0)}
    )
    assert named(found + workers.steps(100, {1: SLOW[SlowCause.DATA]})) == [(1, SlowCause.DATA)]


def test_a_new_generation_is_no_reason_to_name_a_slow_worker_again():
    workers = Workers(again_s=0.0)
    workers.steps(60, {1: SLOW[SlowCause.DATA]})
    workers.rows = {slot: replace(row, generation=2) for slot, row in workers.rows.items()}
    assert workers.steps(200, {1: SLOW[SlowCause.DATA]}) == []


def test_a_replacement_in_the_slot_of_a_slow_worker_has_a_clean_slate():
    workers = Workers()
    workers.steps(60, {1: SLOW[SlowCause.DATA]})
    workers.rows[1] = replace(workers.rows[1], pid=555)
    assert workers.steps(200) == []


work = st.builds(Work, *[st.floats(0.0, 1.0)] * 3, lanes=st.integers(0, 4))


@given(st.lists(work, min_size=1, max_size=6))
def test_a_named_worker_takes_longer_than_the_others_by_the_step_and_by_the_lane(team):
    taken_s = max(one.step_s() for one in team)
    assume(taken_s > 1e-3)
    row = StatusRow(pid=1, generation=1)
    window = {slot: time_spent(row, stepped(row, one, taken_s)) for slot, one in enumerate(team)}
    for slot, slow in slow_workers(window).items():
        others = [other for number, other in enumerate(team) if number != slot and other.lanes]
        mine = team[slot]
        assert mine.step_s() > min(other.step_s() for other in others)
        assert mine.step_s() / max(mine.lanes, 1) > min(other.step_s() / other.lanes for other in others)
        assert slow.times >= 1.5
        assert slow.waiting_share >= 0.2


@given(st.lists(work, min_size=2, max_size=6), st.randoms())
def test_who_is_slow_does_not_depend_on_the_slots(team, choice):
    row, taken_s = StatusRow(pid=1, generation=1), max(one.step_s() for one in team) + 0.001
    window = {slot: time_spent(row, stepped(row, one, taken_s)) for slot, one in enumerate(team)}
    places = list(window)
    choice.shuffle(places)
    moved = {places[slot]: one for slot, one in window.items()}
    assert {places[slot] for slot in slow_workers(window)} == set(slow_workers(moved))


def test_workers_that_wait_as_long_as_the_others_are_not_slow_for_a_little_more_of_their_own_time():
    """As on a GPU, which computes while its worker waits."""
    begins = {cause: 0.1 if cause is SlowCause.COMPUTE else 0.0 for cause in SlowCause}
    window = {slot: TimeSpent(20, 2, begins, 9.9) for slot in range(3)}
    window[1] = TimeSpent(20, 2, {**begins, SlowCause.COMPUTE: 0.2}, 9.8)
    assert slow_workers(window) == {}


@pytest.mark.parametrize(
    "nonsense", [{"window_steps": 0}, {"window_s": 0.0}, {"window_s": float("nan")}, {"again_s": -1}]
)
def test_a_window_without_steps_or_time_is_refused(nonsense):
    with pytest.raises(BadArgument, match="at least one step"):
        StragglerDetector(**nonsense)


# -- what a worker writes ------------------------------------------------------------------------------------------


def test_a_worker_books_its_lanes_as_compute_and_the_reduction_as_waiting():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        since_ns = []
        for phase in (Phase.COMPUTING, Phase.COMPUTING, Phase.REDUCING, Phase.REDUCING):
            writer.enter(phase, 7)
            since_ns.append(page.row(0).since_ns)
        writer.committed(7, 1, data_ns=40)
        row = page.row(0)
        writer.close()
    assert (row.data_ns, row.compute_ns) == (40, since_ns[2] - since_ns[0])
    assert row.waiting_ns == row.committed_ns - since_ns[2]


def test_what_is_done_between_steps_is_booked_as_neither():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        writer.committed(7, 1)
        for phase in (Phase.OUTSIDE, Phase.STARTING, Phase.OUTSIDE):
            writer.enter(phase, 8)
        writer.committed(8, 1)
        row = page.row(0)
        writer.close()
    assert (row.data_ns, row.compute_ns, row.waiting_ns) == (0, 0, 0)


def test_what_was_not_committed_is_not_on_the_row_yet():
    with StatusPage() as page:
        writer = StatusWriter(page.fd, 0)
        writer.enter(Phase.COMPUTING, 7)
        writer.enter(Phase.REDUCING, 7)
        row = page.row(0)
        writer.close()
    assert (row.data_ns, row.compute_ns, row.waiting_ns) == (0, 0, 0)


def test_the_times_stand_behind_all_other_fields():
    with StatusPage() as page:
        os.pwrite(page.fd, b"".join(number.to_bytes(8, "little") for number in range(16)), 0)
        row = page.row(0)
    assert (row.num_lanes, row.data_ns, row.compute_ns, row.waiting_ns) == (12, 13, 14, 15)


# -- how it is told ------------------------------------------------------------------------------------------------


def test_a_slow_worker_is_told_in_two_lines_with_what_to_do():
    assert slow_message(Slow(2, 1.9, 40, SlowCause.DATA, 0.31, 0.02, 0.48, 3)).splitlines() == [
        "! worker 2 is slow: 1.9 times the others for 40 steps, in data (loading 0.31 s a step, others 0.02 s); "
        "the others wait 48 % of their time",
        "  its loader needs more processes (num_workers), or its disk is slow or busy",
    ]


def test_between_two_workers_the_other_is_one():
    result = slow_message(Slow(0, 2.0, 40, SlowCause.COMPUTE, 0.004, 0.002, 0.5, 1))
    assert "2.0 times the other for 40 steps, in compute (its lanes 4.0 ms a step, other 2.0 ms); " in result
    assert "the other waits 50 % of its time\n" in result


@pytest.mark.parametrize("cause", SlowCause)
def test_every_cause_is_told_in_two_lines(cause):
    assert len(slow_message(Slow(0, 1e6, 40, cause, 1.0, 0.0, 0.9, 3)).splitlines()) == 2


def test_the_watchdog_says_who_is_slow_and_when_it_has_caught_up():
    workers, said = Workers(), []
    running = {slot: f"worker {slot}" for slot in workers.rows}
    pool = SimpleNamespace(running=running, row=lambda slot: workers.rows[slot], state=lambda slot: "R", activity=None)
    watchdog = Watchdog(pool, LauncherConsole(said.append))
    for work in (SLOW[SlowCause.DATA], USUAL):
        for _ in range(60):
            workers.steps(1, {1: work})
            assert watchdog.look(workers.now_s) == []
    slow, caught_up = said
    assert slow.startswith("! worker 1 is slow: ")
    assert caught_up == "  worker 1 has caught up: it is not slow any more"
