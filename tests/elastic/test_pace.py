"""Lanes follow the workers' pace: the decision in one process, then three real workers of which one is slow."""

import os
import signal
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workers import on_workers, outcomes

import lockstep
from lockstep.elastic import pace
from lockstep.elastic.pace import LaneMove, LanePace, LaneWindow, decide, gain, wanted_counts
from lockstep.lanes import Assignment
from lockstep.settings.environments.lockstep_run import RANK
from lockstep.strategies import replicated

SPEEDS = st.lists(st.floats(1e-4, 10), min_size=1, max_size=4)


def window(*lane_s: float, lanes: int = 40) -> LaneWindow:
    """Each rank has computed so many lanes, in so many seconds each."""
    return LaneWindow(tuple(seconds * lanes for seconds in lane_s), (lanes,) * len(lane_s))


@dataclass
class Run:
    """Steps of workers that take so long for a lane, one number each, and follow the decision."""

    lane_s: tuple[float, ...]
    assignment: Assignment
    pace: LanePace

    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self.assignment.lanes_of))

    def steps(self, number: int, *lane_s: float) -> int:
        """Makes so many steps; how often lanes have moved."""
        self.lane_s = lane_s or self.lane_s
        moves = 0
        for _ in range(number):
            times = {lane: self.lane_s[rank] for lane, rank in self.assignment.carriers().items()}
            self.pace.take([times[lane] for lane in sorted(times)], self.assignment)
            if (move := self.pace.move(self.assignment)) is not None:
                self.assignment, moves = move.assignment, moves + 1
        return moves


def even(num_lanes: int, *lane_s: float) -> Run:
    return Run(lane_s, Assignment.even(num_lanes, len(lane_s)), LanePace())


# -- the decision -----------------------------------------------------------------------------------------------------


def test_a_worker_of_half_the_speed_should_carry_half_the_lanes() -> None:
    assert wanted_counts([0.1, 0.1, 0.2], 10) == (4, 4, 2)
    assert wanted_counts([0.1, 0.1, 0.1], 10) == (4, 3, 3)


def test_every_worker_keeps_a_lane_however_slow_it_is() -> None:
    assert wanted_counts([0.1, 1000.0], 8) == (7, 1)


@given(SPEEDS, st.integers(0, 6))
def test_no_other_way_to_deal_lanes_out_is_done_earlier(lane_s: list[float], more: int) -> None:
    num_lanes = len(lane_s) + more

    def all_counts(workers: int, lanes: int) -> list[tuple[int, ...]]:
        if workers == 1:
            return [(lanes,)]
        return [(n, *rest) for n in range(1, lanes - workers + 2) for rest in all_counts(workers - 1, lanes - n)]

    found = wanted_counts(lane_s, num_lanes)
    assert sum(found) == num_lanes
    best = min(
        max(count * seconds for count, seconds in zip(counts, lane_s, strict=True))
        for counts in all_counts(len(lane_s), num_lanes)
    )
    assert max(n * seconds for n, seconds in zip(found, lane_s, strict=True)) == pytest.approx(best)


def test_lanes_move_only_where_every_window_gains() -> None:
    slow, calm = window(0.1, 0.1, 0.2), window(0.1, 0.1, 0.1)
    move = decide([slow, slow], (4, 4, 4))
    assert move is not None
    assert move.counts == (5, 5, 2)
    assert gain(move.counts, move.before, move.lane_s) == pytest.approx(1 - 5 / 8)
    assert decide([calm, slow], (4, 4, 4)) is None
    assert decide([slow, calm], (4, 4, 4)) is None
    assert decide([calm, calm], (4, 4, 4)) is None
    assert decide([window(0.1, 0.1, 0.105)] * 2, (4, 4, 4)) is None


def test_nothing_moves_where_a_worker_has_no_lane_or_none_was_measured() -> None:
    assert decide([LaneWindow((1.0, 2.0, 0.0), (10, 10, 0))] * 2, (1, 1, 0)) is None
    assert decide([LaneWindow((1.0, 2.0, 0.0), (10, 10, 0))] * 2, (2, 2, 2)) is None


def test_an_assignment_has_every_lane_once_in_a_row() -> None:
    move = LaneMove((5, 5, 2), (4, 4, 4), (0.1, 0.1, 0.2))
    assert move.assignment.lanes_of == ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9), (10, 11))


def test_the_move_is_explained_in_one_line() -> None:
    text = LaneMove((5, 5, 2), (4, 4, 4), (0.1, 0.1, 0.21)).sentence((0, 1, 7), 41)
    assert text.startswith("worker 7 takes 2.1 times as long for a lane as worker 0: from step 41 on")
    assert "worker 7: 2" in text
    assert "\n" not in text
    back = LaneMove((4, 4, 4), (5, 5, 2), (0.1, 0.1, 0.1)).sentence((0, 1, 7), 41)
    assert back.startswith("workers are about as fast as each other again")


# -- over time --------------------------------------------------------------------------------------------------------


def test_lanes_move_after_two_windows_and_back_after_the_worker_has_recovered() -> None:
    run = even(12, 0.1, 0.1, 0.2)
    assert run.steps(44) == 0  # five to warm up, and two windows of twenty
    assert run.steps(1) == 1
    assert run.counts() == (5, 5, 2)
    assert run.steps(200) == 0
    assert run.steps(200, 0.1, 0.1, 0.1) == 1
    assert run.counts() == (4, 4, 4)


def test_short_steps_are_watched_for_as_many_seconds_as_long_ones() -> None:
    run = even(12, 1e-3, 1e-3, 2e-3)
    assert run.steps(400) == 0  # 8 ms of lanes each: a window of two seconds has 250 of them
    assert run.steps(200) == 1


def test_one_pause_moves_nothing() -> None:
    run = even(12, 0.1, 0.1, 0.1)
    for _ in range(10):
        assert run.steps(19, 0.1, 0.1, 0.1) == run.steps(1, 0.1, 0.1, 5.0) == run.steps(40, 0.1, 0.1, 0.1) == 0


def test_a_worker_that_is_slow_now_and_then_makes_lanes_move_less_and_less_often() -> None:
    run, moves = even(12, 0.1, 0.1, 0.1), []
    for _ in range(40):
        moves.append(run.steps(60, 0.1, 0.1, 0.25) + run.steps(60, 0.1, 0.1, 0.1))
    assert sum(moves[:20]) > sum(moves[20:])
    assert sum(moves) <= 6


def test_all_is_forgotten_when_workers_come_or_go() -> None:
    run = even(12, 0.1, 0.1, 0.2)
    run.steps(44)
    run.pace.forget()
    assert run.steps(44) == 0
    assert run.steps(1) == 1


# -- real workers -----------------------------------------------------------------------------------------------------


class LaneClock:
    """The clock by which lanes are timed, in each worker: it shows what the script says that its lanes take."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def train(rebalance: bool = True, dies_at: int = -1) -> dict[str, object]:
    """Worker 2 takes twice as long for its lanes before step 14; what each worker carried in every step.

    Worker 1 may die in the lanes of a step.
    """
    clock = LaneClock()
    replicated.time = clock  # in this process, which is a worker's
    pace.WINDOW_STEPS, pace.WINDOW_S, pace.WARM_STEPS = 4, 0.0, 1
    run = lockstep.start(lanes=6, rebalance=rebalance)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    run.replicate(model, optimizer)
    carried, slot = [], run.rank
    while run.step < 26:
        for x in run.lanes(torch.arange(18 * 8, dtype=torch.float32).view(18, 8) / 100):
            clock.now_s += 0.2 if slot == 2 and run.step < 14 else 0.1
            if slot == 1 and run.step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(model(x).square().mean())
        carried.append(list(map(len, run.guard.generation.assignment.lanes_of)))
        optimizer.step()
        optimizer.zero_grad()
    return {"digest": run.digest(), "carried": carried}


def test_a_slow_worker_gets_fewer_lanes_and_later_its_own_again_with_the_same_bits() -> None:
    moved, still = on_workers(3, train), on_workers(3, train, rebalance=False)
    assert len({one["digest"] for one in [*moved, *still]}) == 1
    assert all(counts == [2, 2, 2] for one in still for counts in one["carried"])
    for one in moved:
        assert one["carried"] == [[2, 2, 2]] * 9 + [[3, 2, 1]] * 13 + [[2, 2, 2]] * 4


def test_a_worker_that_is_lost_after_lanes_have_moved_changes_no_bits() -> None:
    first, lost, last = outcomes(3, train, dies_at=11)
    assert lost.killed_by == signal.SIGKILL
    (digest,) = {one["digest"] for one in on_workers(1, train)}
    assert first.value["digest"] == last.value["digest"] == digest
    assert first.value["carried"] == [[2, 2, 2]] * 9 + [[3, 2, 1]] * 2 + [[3, 3]] * 15


def test_workers_that_were_told_differently_whether_to_rebalance_are_refused_at_the_start() -> None:
    def start() -> None:
        lockstep.start(lanes=4, rebalance=os.environ[RANK] == "0")

    found = outcomes(2, start)
    assert all("rebalance" in one.message for one in found)
