"""Who is late, hung or stopped, from what was seen at which time."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.run.launching.frames import Frame
from lockstep.run.launching.lateness import Finding, Hung, Late, Look, Stopped, Watch
from lockstep.run.launching.stacks import innermost
from lockstep.run.launching.status import Phase, StatusRow
from lockstep.run.launching.telling import tell_late

USUAL_NS = 410_000_000
BEGAN_S = 100.0


def look(slot: int, phase: Phase, state: str = "S", since_s: float = BEGAN_S, usual_ns: int = USUAL_NS) -> Look:
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
    return Look(100 + slot, row, state)


WAITS = {slot: look(slot, Phase.REDUCING) for slot in (0, 1, 3)}
ONE_MISSING = {**WAITS, 2: look(2, Phase.COMPUTING)}


def idle(slot: int) -> float:
    return 7.0


def watch_over(looks: dict[int, Look], until_s: float, cpu_s=idle, watch: Watch | None = None) -> list[tuple]:
    """All that is found, with its time, by looking four times a second from the moment the wait began."""
    watch = watch or Watch()
    times = [BEGAN_S + 0.25 * tick for tick in range(int(4 * (until_s - BEGAN_S)) + 1)]
    return [(now_s, finding) for now_s in times for finding in watch.look(now_s, looks, cpu_s)]


def kinds(found: list[tuple[float, Finding]]) -> set[type]:
    return {type(finding) for _, finding in found}


def test_a_step_is_late_once_within_two_seconds_of_five_seconds_or_five_usual_steps():
    busy = iter(range(1_000_000))
    found = watch_over(ONE_MISSING, BEGAN_S + 20, lambda slot: float(next(busy)))
    assert len(found) == 1
    now_s, late = found[0]
    assert 6.2 < now_s - BEGAN_S <= 7.0
    assert (late.step, late.waiting, late.missing, late.bucket, late.usual_s) == (1877, (0, 1, 3), (2,), (1, 3), 0.41)


def test_a_run_with_slow_steps_is_given_five_of_them():
    slow = {slot: look(slot, seen.row.phase, usual_ns=10_000_000_000) for slot, seen in ONE_MISSING.items()}
    assert watch_over(slow, BEGAN_S + 51) == []
    assert Late in kinds(watch_over(slow, BEGAN_S + 52))


def test_before_the_usual_step_is_learned_a_minute_is_allowed():
    new = {slot: look(slot, seen.row.phase, usual_ns=0) for slot, seen in ONE_MISSING.items()}
    assert watch_over(new, BEGAN_S + 60) == []
    assert Late in kinds(watch_over(new, BEGAN_S + 61))


def test_nothing_is_late_while_all_wait_or_recover():
    recovering = {**WAITS, 2: look(2, Phase.RECOVERING)}
    assert watch_over(recovering, BEGAN_S + 100) == []


def test_a_joiner_is_not_missed():
    joiner = Look(105, StatusRow(pid=105, phase=Phase.STARTING), "S")
    assert watch_over({**WAITS, 5: joiner}, BEGAN_S + 100) == []


def test_a_missing_worker_that_does_nothing_is_hung_when_the_step_is_late():
    found = watch_over(ONE_MISSING, BEGAN_S + 7)
    assert [type(finding) for _, finding in found[:2]] == [Late, Hung]
    assert found[1][1] == Hung(2)


def test_a_missing_worker_that_starts_to_do_nothing_is_hung_five_seconds_later():
    used = {"s": 0.0}

    def cpu_s(slot: int) -> float:
        return used["s"]

    watch = Watch()
    found = []
    for tick in range(4 * 20):
        now_s = BEGAN_S + 0.25 * tick
        used["s"] = min(now_s - BEGAN_S, 10.0)  # busy for ten seconds
        found += [(now_s, finding) for finding in watch.look(now_s, ONE_MISSING, cpu_s) if finding == Hung(2)]
    assert 14.75 <= found[0][0] - BEGAN_S <= 15.25


@pytest.mark.parametrize("state", ["D", "t"])
def test_a_worker_that_waits_for_a_disk_or_a_debugger_is_not_hung(state):
    busy = {**WAITS, 2: look(2, Phase.SAVING, state)}
    assert kinds(watch_over(busy, BEGAN_S + 60)) == {Late}


def test_a_stopped_worker_is_found_after_half_a_second():
    stopped = {0: look(0, Phase.COMPUTING), 1: look(1, Phase.COMPUTING, "T")}
    found = watch_over(stopped, BEGAN_S + 0.5)
    assert found == [(BEGAN_S + 0.5, Stopped(1, 0.5))]


def test_a_job_that_is_stopped_as_a_whole_is_let_be_and_its_time_does_not_count():
    watch = Watch()
    asleep = {slot: look(slot, seen.row.phase, "T") for slot, seen in ONE_MISSING.items()}
    assert watch_over(asleep, BEGAN_S + 60, watch=watch) == []
    assert [finding for tick in range(20) for finding in watch.look(BEGAN_S + 60 + tick / 4, ONE_MISSING, idle)] == []


def test_time_in_which_the_supervisor_did_not_run_does_not_count():
    watch = Watch()
    watch.look(BEGAN_S, ONE_MISSING, idle)
    assert watch.look(BEGAN_S + 600, ONE_MISSING, idle) == []
    assert watch.look(BEGAN_S + 605, ONE_MISSING, idle) == []


def test_processor_time_is_asked_only_of_those_who_are_missed():
    asked: set[int] = set()
    watch_over(ONE_MISSING, BEGAN_S + 10, lambda slot: asked.add(slot) or 0.0)
    assert asked == {2}


def test_a_late_step_is_told_in_two_lines_as_people_need_it():
    late = Late(1, 1877, 6.2, 0.41, (0, 1, 3), (1, 3), (2,))
    place = Frame(str(Path("train.py").absolute()), 88, "<module>", "loss.backward()")
    looks = {2: look(2, Phase.COMPUTING)}
    assert tell_late(late, looks, {2: place}, BEGAN_S + 4.1).splitlines() == [
        "! step 1877 is late: 6.2 s (usually 0.41 s)",
        "    waiting: 0 1 3 (reduce, bucket 2 of 3)    "
        "missing: 2 (sleeping, state S, since 4.1 s; train.py:88 loss.backward())",
    ]


def test_many_who_wait_are_told_as_runs_of_numbers():
    late = Late(1, 5, 61.0, None, (0, 1, 2, 3, 5, 6, 9), (0, 0), (4,))
    told = tell_late(late, {4: look(4, Phase.OUTSIDE, "R")}, {}, BEGAN_S)
    assert "waiting: 0-3 5 6 9 (reduce)    missing: 4 (running, state R, since 0.0 s)" in told


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
