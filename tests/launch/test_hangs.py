"""Who is late, hung or stopped, from what was seen at which time."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.channels.stacks import innermost
from lockstep.launch.channels.status import Collective, Phase, StatusRow
from lockstep.launch.channels.traceback_lines import Frame
from lockstep.launch.events import HangFound
from lockstep.launch.host.processes import Activity
from lockstep.launch.supervision.hangs import (
    STEP,
    HangDetector,
    HangFinding,
    Hung,
    IdlenessTracker,
    Late,
    Observation,
    StoppedWorker,
    WorkerView,
)
from lockstep.launch.supervision.messages import hung_message, late_message

USUAL_NS = 410_000_000
BEGAN_S = 100.0
HANG_S = 20.0


def look(slot: int, phase: Phase, state: str = "S", since_s: float = BEGAN_S, usual_ns: int = USUAL_NS) -> WorkerView:
    row = StatusRow(
        pid=100 + slot,
        generation=1,
        rank=slot,
        step=1877,
        phase=phase,
        since_ns=int(since_s * 1e9),
        detail_a=1,
        detail_b=3,
        usual_step_ns=usual_ns,
    )
    return WorkerView(f"pid {100 + slot}", row, state)


def waiting_in(call: Collective, slot: int, generation: int = 1) -> WorkerView:
    row = StatusRow(100 + slot, generation=generation, phase=Phase.AWAITING, detail_a=call, since_ns=int(BEGAN_S * 1e9))
    return WorkerView(f"pid {100 + slot}", row, "S")


WAITS = {slot: look(slot, Phase.REDUCING) for slot in (0, 1, 3)}
ONE_MISSING = {**WAITS, 2: look(2, Phase.COMPUTING)}
IN_THEIR_LANES = {slot: look(slot, Phase.COMPUTING) for slot in range(3)}


def idle(slot: int) -> Activity:
    return Activity(cpu_s=7.0, io_bytes=1000, wakes={100 + slot: 50})


def busy() -> Callable[[int], Activity]:
    seconds = count()
    return lambda slot: Activity(cpu_s=float(next(seconds)))


def patient(seen: WorkerView, until_s: float) -> WorkerView:
    return replace(seen, row=replace(seen.row, patient_until_ns=int(until_s * 1e9)))


def watch_over(
    looks: dict[int, WorkerView], until_s: float, activity=idle, watch: HangDetector | None = None
) -> list[tuple]:
    """All that is found, with its time, by looking four times a second from the moment the wait began."""
    watch = watch or HangDetector(HANG_S)
    times = [BEGAN_S + 0.25 * tick for tick in range(int(4 * (until_s - BEGAN_S)) + 1)]
    return [(now_s, finding) for now_s in times for finding in watch.look(now_s, looks, activity)]


def kinds(found: list[tuple[float, HangFinding]]) -> set[type]:
    return {type(finding) for _, finding in found}


def first(kind: type, found: list[tuple[float, HangFinding]]) -> tuple[float, HangFinding]:
    """When such a thing was first found, since the wait began, and what it was."""
    return next((now_s - BEGAN_S, finding) for now_s, finding in found if isinstance(finding, kind))


def test_a_step_is_late_once_within_two_seconds_of_five_seconds_or_five_usual_steps():
    found = watch_over(ONE_MISSING, BEGAN_S + 60, busy())
    assert len(found) == 1
    after_s, late = first(Late, found)
    assert 6.2 < after_s <= 7.0
    assert (late.step, late.what, late.waiting, late.missing, late.usual_s) == (1877, STEP, (0, 1, 3), (2,), 0.41)


def test_a_run_with_slow_steps_is_given_five_of_them():
    slow = {slot: look(slot, seen.row.phase, usual_ns=10_000_000_000) for slot, seen in ONE_MISSING.items()}
    assert watch_over(slow, BEGAN_S + 51) == []
    assert Late in kinds(watch_over(slow, BEGAN_S + 52))


def test_before_the_usual_step_is_learned_a_minute_is_allowed():
    new = {slot: look(slot, seen.row.phase, usual_ns=0) for slot, seen in ONE_MISSING.items()}
    assert watch_over(new, BEGAN_S + 60) == []
    assert Late in kinds(watch_over(new, BEGAN_S + 61))


@pytest.mark.parametrize("call", set(Collective) - {Collective.STATISTICS})
def test_a_worker_missing_in_a_call_of_all_workers_is_named_after_ten_seconds(call):
    missing = look(2, Phase.OUTSIDE)
    after_s, late = first(Late, watch_over({0: waiting_in(call, 0), 2: missing}, BEGAN_S + 20))
    assert 10 < after_s <= 11
    assert (late.waiting, late.missing) == ((0,), (2,))


def test_a_founder_that_never_called_start_is_named_and_a_joiner_that_did_not_is_not():
    unstarted = WorkerView("pid 101", StatusRow(), "S")
    waits = {0: waiting_in(Collective.START, 0, generation=0)}
    assert first(Late, watch_over({**waits, 1: unstarted}, BEGAN_S + 20))[1].missing == (1,)
    assert watch_over({**WAITS, 1: replace(unstarted, joins=True)}, BEGAN_S + 50) == []


def test_a_worker_missing_where_the_others_wait_in_batch_norm_or_recover_is_named_as_in_a_step():
    for waiting in (waiting_in(Collective.STATISTICS, 0), look(0, Phase.RECOVERING)):
        waiting = replace(waiting, row=replace(waiting.row, usual_step_ns=USUAL_NS))
        after_s, late = first(Late, watch_over({0: waiting, 2: look(2, Phase.COMPUTING)}, BEGAN_S + 20))
        assert (after_s <= 7.0, late.what, late.missing) == (True, STEP, (2,))


def test_nothing_is_late_while_all_wait_or_recover():
    recovering = {**WAITS, 2: look(2, Phase.RECOVERING)}
    assert watch_over(recovering, BEGAN_S + 1000) == []


def test_a_missing_worker_without_a_sign_of_work_is_hung_after_its_time_and_not_before():
    found = watch_over(ONE_MISSING, BEGAN_S + 30)
    after_s, hung = first(Hung, found)
    assert first(Late, found)[0] < HANG_S <= after_s <= HANG_S + 3
    assert (hung.slots, hung.is_all) == ((2,), False)


@pytest.mark.parametrize(
    "sign",
    [
        lambda second: Activity(cpu_s=0.1 * second),
        lambda second: Activity(io_bytes=second // 15),
        lambda second: Activity(processes=frozenset([100, 200 + second // 15])),
        lambda second: Activity(wakes={7: 2 * second}),
    ],
    ids=["the processor", "input and output", "processes", "waking up"],
)
def test_any_sign_of_work_keeps_a_worker_from_being_hung(sign):
    seconds = count()
    assert kinds(watch_over(ONE_MISSING, BEGAN_S + 100, lambda slot: sign(next(seconds)))) == {Late}


def test_timers_that_wake_a_process_now_and_then_are_no_sign_of_work():
    seconds = count()
    ticking = watch_over(
        ONE_MISSING,
        BEGAN_S + 60,
        lambda slot: Activity(cpu_s=0.001 * (n := next(seconds)), wakes=dict.fromkeys(range(30), n)),
    )
    assert Hung in kinds(ticking)


def test_the_answer_to_the_question_where_it_is_is_no_sign_of_work():
    watch, written = HangDetector(HANG_S), {"bytes": 0}

    def activity(slot: int) -> Activity:
        return Activity(io_bytes=written["bytes"])

    found: list[tuple[float, HangFinding]] = []
    for tick in range(4 * 30):
        now_s = BEGAN_S + 0.25 * tick
        found += [(now_s, finding) for finding in watch.look(now_s, ONE_MISSING, activity)]
        written["bytes"] = 300 * (Late in kinds(found))
    assert HANG_S <= first(Hung, found)[0] <= HANG_S + 3
    assert watch.limit_s == HANG_S


def test_a_worker_is_left_alone_for_twice_as_long_as_one_has_been_idle_before_and_went_on():
    idleness = IdlenessTracker()
    for second in range(40):
        idleness.look(second, {7: Observation(Activity(cpu_s=float(second == 39)), 0)})
    watch = HangDetector(HANG_S, _idleness=idleness)
    assert watch.limit_s == 2 * 39
    assert Hung not in kinds(watch_over(ONE_MISSING, BEGAN_S + 77, watch=watch))


def test_a_worker_that_asked_for_patience_is_neither_late_nor_hung_before_its_time_is_over():
    looks = {**WAITS, 2: patient(look(2, Phase.OUTSIDE), BEGAN_S + 100)}
    found = watch_over(looks, BEGAN_S + 130)
    assert first(Late, found)[0] == 100
    assert 100 + HANG_S <= first(Hung, found)[0] <= 100 + HANG_S + 3


def test_patience_of_one_does_not_cover_another():
    looks = {**WAITS, 2: patient(look(2, Phase.OUTSIDE), BEGAN_S + 100), 4: look(4, Phase.COMPUTING)}
    found = watch_over(looks, BEGAN_S + 30)
    assert {finding.missing for _, finding in found if isinstance(finding, Late)} == {(4,)}
    assert first(Hung, found)[1].slots == (4,)


def test_workers_that_all_do_nothing_in_their_lanes_are_named_once_and_then_hung_together():
    found = watch_over(IN_THEIR_LANES, BEGAN_S + 40)
    after_s, named = first(Late, found)
    assert 10 < after_s <= 13
    assert (named.waiting, named.missing, named.step) == ((), (0, 1, 2), 1877)
    after_s, hung = first(Hung, found)
    assert HANG_S < after_s <= HANG_S + 3
    assert (hung.slots, hung.is_all) == ((0, 1, 2), True)
    assert sum(isinstance(finding, Late) for _, finding in found) == 1


def test_one_that_works_or_asks_for_patience_keeps_all_from_being_idle():
    assert watch_over(IN_THEIR_LANES, BEGAN_S + 100, lambda slot: Activity() if slot else next(working)) == []
    assert watch_over({**IN_THEIR_LANES, 1: patient(IN_THEIR_LANES[1], BEGAN_S + 1000)}, BEGAN_S + 100) == []


working = (Activity(cpu_s=float(second)) for second in count())


def test_workers_that_have_ended_or_not_begun_are_not_idle():
    ended = {slot: look(slot, Phase.ENDED) for slot in range(2)}
    not_begun = {slot: WorkerView(100 + slot, StatusRow(), "S") for slot in range(2)}
    assert watch_over(ended, BEGAN_S + 100) == watch_over(not_begun, BEGAN_S + 100) == []


def test_workers_that_all_wait_for_each_other_are_named_after_a_minute_and_then_hung_together():
    found = watch_over(WAITS, BEGAN_S + 70)
    after_s, late = first(Late, found)
    assert 60 < after_s <= 61
    assert (late.waiting, late.missing) == ((0, 1, 3), ())
    assert first(Hung, found)[1].is_all


@pytest.mark.parametrize("state", ["D", "t"])
def test_a_worker_that_waits_for_a_disk_or_a_debugger_is_not_hung(state):
    waits = {**WAITS, 2: look(2, Phase.OUTSIDE, state)}
    assert kinds(watch_over(waits, BEGAN_S + 60)) == {Late}


def test_a_stopped_worker_is_found_after_half_a_second():
    stopped = {0: look(0, Phase.COMPUTING), 1: look(1, Phase.COMPUTING, "T")}
    found = watch_over(stopped, BEGAN_S + 0.5)
    assert found == [(BEGAN_S + 0.5, StoppedWorker(1, 0.5))]


def test_a_job_that_is_stopped_as_a_whole_is_let_be_and_its_time_does_not_count():
    watch = HangDetector(HANG_S)
    asleep = {slot: look(slot, seen.row.phase, "T") for slot, seen in ONE_MISSING.items()}
    assert watch_over(asleep, BEGAN_S + 60, watch=watch) == []
    assert [finding for tick in range(20) for finding in watch.look(BEGAN_S + 60 + tick / 4, ONE_MISSING, idle)] == []


def test_time_in_which_the_supervisor_did_not_run_does_not_count():
    watch = HangDetector(HANG_S)
    watch.look(BEGAN_S, ONE_MISSING, idle)
    assert watch.look(BEGAN_S + 600, ONE_MISSING, idle) == []
    assert watch.look(BEGAN_S + 605, ONE_MISSING, idle) == []


def test_only_those_who_are_missed_are_looked_at_and_not_more_than_once_a_second():
    asked: list[int] = []
    watch_over(ONE_MISSING, BEGAN_S + 10, lambda slot: asked.append(slot) or Activity())
    assert set(asked) == {2}
    assert len(asked) <= 10


def test_after_a_new_start_the_same_is_told_again():
    watch = HangDetector(HANG_S)
    watch_over(ONE_MISSING, BEGAN_S + 10, busy(), watch)
    watch.forget()
    assert kinds(watch_over(ONE_MISSING, BEGAN_S + 10, busy(), watch)) == {Late}


def test_a_late_step_is_told_in_two_lines_as_people_need_it():
    late = Late(1, 1877, STEP, 6.2, 0.41, (0, 1, 3), (2,))
    place = Frame(str(Path("train.py").absolute()), 88, "<module>", "loss.backward()")
    assert late_message(late, ONE_MISSING, {2: place}, BEGAN_S + 4.1).splitlines() == [
        "! step 1877 is late: 6.2 s (usually 0.41 s)",
        "    waiting: 0 1 3 (reduce, bucket 2 of 3)    "
        "missing: 2 (sleeping, state S, since 4.1 s; train.py:88 loss.backward())",
    ]


def test_a_late_call_is_told_with_who_waits_where():
    looks = {0: waiting_in(Collective.TOTAL, 0), 1: look(1, Phase.RECOVERING), 2: look(2, Phase.OUTSIDE, "R")}
    late = Late(1, 12, "run.total", 10.3, 0.41, (0, 1), (2,))
    assert late_message(late, looks, {}, BEGAN_S + 4.1).splitlines() == [
        "! run.total at step 12 is late: 10.3 s",
        "    waiting: 0 (run.total), 1 (recovery)    missing: 2 (running, state R, since 4.1 s)",
    ]


def test_a_worker_that_never_called_start_is_told_so():
    looks = {0: waiting_in(Collective.START, 0), 1: WorkerView("pid 101", StatusRow(), "S")}
    result = late_message(Late(0, 0, "lockstep.start", 10.3, None, (0,), (1,)), looks, {}, BEGAN_S)
    assert result.splitlines() == [
        "! lockstep.start is late: 10.3 s",
        "    waiting: 0 (lockstep.start)    missing: 1 (sleeping, state S, has not called lockstep.start)",
    ]


def test_workers_of_whom_none_works_are_told_with_their_places_up_to_four():
    looks = {slot: look(slot, Phase.COMPUTING) for slot in range(6)}
    place = Frame(str(Path("train.py").absolute()), 88, "<module>", "lock.acquire()")
    result = late_message(
        Late(1, 12, STEP, 10.2, None, (), tuple(range(6))), looks, {0: place}, BEGAN_S + 10.2
    ).splitlines()
    assert result[0] == "! step 12 does not get on: all 6 workers do nothing, since 10 s"
    assert result[1].startswith("    0 (sleeping, state S, since 10.2 s; train.py:88 lock.acquire()), 1 (sleeping")
    assert result[1].endswith(", and 2 more")


def test_hung_workers_are_told_in_one_line():
    assert (
        hung_message(HangFound((2,), False, 301.0))
        == "  worker 2 shows no sign of work for 301 s (--hang-s): it is ended"
    )
    everyone = hung_message(HangFound((0, 1), True, 301.0))
    assert everyone == "  all 2 workers show no sign of work for 301 s (--hang-s): they are ended"


def test_many_who_wait_are_told_as_runs_of_numbers():
    looks = {slot: look(slot, Phase.REDUCING) for slot in range(10)} | {4: look(4, Phase.OUTSIDE, "R")}
    result = late_message(Late(1, 5, STEP, 61.0, None, (0, 1, 2, 3, 5, 6, 9), (4,)), looks, {}, BEGAN_S)
    assert "waiting: 0-3 5 6 9 (reduce, bucket 2 of 3)    missing: 4 (running, state R, since 0.0 s)" in result


def test_the_place_is_the_innermost_call_in_user_code(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("\n\nloss.backward()\n")
    written = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/usr/lib/site-packages/torch/_tensor.py", line 5 in backward\n'
        f'  File "{script}", line 3 in <module>\n'
        '  File "<frozen runpy>", line 88 in _run_code\n'
    )
    assert innermost(written) == Frame(str(script), 3, "<module>", "loss.backward()")


@given(st.text())
def test_what_is_not_a_stack_gives_no_place(text):
    assert innermost(text) is None


# -- pools that know less of their workers -------------------------------------------------------------------------


def test_a_worker_whose_activity_is_not_known_is_late_and_never_hung():
    assert kinds(watch_over(ONE_MISSING, BEGAN_S + 3 * HANG_S, activity=lambda slot: None)) == {Late}


def test_a_worker_whose_state_is_not_known_is_named_without_it():
    looks = {**WAITS, 2: look(2, Phase.COMPUTING, state="")}
    late = Late(1, 1877, STEP, 6.2, 0.41, (0, 1, 3), (2,))
    assert late_message(late, looks, {}, BEGAN_S + 4.1).endswith("missing: 2 (since 4.1 s)")
