"""What the supervisor decides, without a process."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.channels.failure import EXITED, KILLED, QUIT, RAISED, Failure
from lockstep.launch.channels.status import Collective, Phase, StatusRow
from lockstep.launch.pool import speaking_slot
from lockstep.launch.supervision.decisions import (
    EXIT_GRACE_S,
    Condemned,
    Dismiss,
    Event,
    Failed,
    Finished,
    Looked,
    Over,
    Report,
    Rescaled,
    Restart,
    SendSignal,
    StartJoiner,
    decide,
    judge,
)
from lockstep.launch.supervision.messages import message
from lockstep.launch.supervision.supervisor_state import SupervisorState, initial_state, restarted_state


def member(slot: int, generation: int = 1) -> StatusRow:
    return StatusRow(pid=100 + slot, generation=generation, rank=slot, endpoint_port=41000 + slot)


MEMBERS = {slot: member(slot) for slot in range(32)}
NOBODY = {slot: StatusRow() for slot in range(32)}


def failure(slot: int, how: str = KILLED, step: int | None = 412, secondary: bool = False, kind: str = "") -> Failure:
    kind = kind or {KILLED: "SIGKILL", EXITED: "5", QUIT: "3", RAISED: "ValueError"}[how]
    return Failure(slot, step, kind, "", (), secondary, float(slot), how, f"pid {100 + slot}")


def after(
    state: SupervisorState, *events: Event, page: dict[int, StatusRow] = MEMBERS
) -> tuple[SupervisorState, list[object]]:
    """The state after the events, and all that was done on the way."""
    done: list[object] = []
    for event in events:
        state, actions = decide(state, event, page)
        done += actions
    return state, done


def said(done: list[object]) -> list[str]:
    """What the user reads of the actions."""
    return [text for action in done if isinstance(action, Report) and (text := message(action.event))]


def without(done: list[object], kind: type) -> list[object]:
    return [action for action in done if not isinstance(action, kind)]


def test_a_lost_member_is_replaced_in_its_slot_by_a_joiner_that_knows_the_living():
    _, done = after(initial_state(4, 16), Failed(failure(2)))
    assert without(done, Report) == [StartJoiner(2, ("127.0.0.1:41000", "127.0.0.1:41001", "127.0.0.1:41003"), 4)]


def test_a_replacement_waits_until_a_member_has_a_door():
    shut = {slot: replace(row, endpoint_port=0) for slot, row in MEMBERS.items()}
    state, done = after(initial_state(2, 16), Failed(failure(1)), page=shut)
    assert without(done, Report) == []
    assert decide(state, Looked(1.0), MEMBERS)[1] == [StartJoiner(1, ("127.0.0.1:41000",), 2)]


def test_a_worker_that_the_supervisor_killed_itself_is_not_told_a_second_time():
    _, done = after(initial_state(2, 16), Condemned(1), Failed(failure(1)))
    assert [type(action) for action in done] == [StartJoiner]


def test_workers_that_the_supervisor_kills_together_leave_nobody_who_could_admit_another():
    state, done = after(initial_state(2, 16), Condemned(0), Condemned(1), Failed(failure(0)), Failed(failure(1)))
    assert (judge(state), done, state.unreported) == (Restart(), [], ())


def test_an_error_in_user_code_is_over_even_after_many_kills():
    state, _ = after(initial_state(4, 16), Failed(failure(1)), Failed(failure(2)), Failed(failure(0, RAISED)))
    assert judge(state) == Over(failure(0, RAISED), ())


def test_an_error_in_user_code_beats_the_kill_and_the_complaints_that_follow_it():
    state = initial_state(3, 0)
    state, _ = after(state, Failed(failure(1)), Failed(failure(2, RAISED, secondary=True)), Failed(failure(0, RAISED)))
    verdict = judge(state)
    assert isinstance(verdict, Over)
    assert (verdict.first, verdict.why, len(verdict.others)) == (failure(0, RAISED), "", 2)


def test_an_error_in_user_code_at_the_start_is_over_even_if_somebody_was_killed_too():
    state, _ = after(initial_state(2, 16), Failed(failure(1, step=None)), Failed(failure(0, RAISED)), page=NOBODY)
    assert judge(state) == Over(failure(0, RAISED), (failure(1, step=None),))


def test_a_kill_before_anybody_is_a_member_starts_all_again():
    state, done = after(initial_state(3, 16), Failed(failure(1, step=None)), page=NOBODY)
    assert (judge(state), done) == (Restart(), [])
    assert [lost.rank for lost in state.unreported] == [1]


def test_the_loss_of_the_last_member_starts_all_again_even_if_a_joiner_is_on_its_way():
    state, _ = after(initial_state(2, 16), Failed(failure(1)))
    page = {**MEMBERS, 1: StatusRow()}
    state, _ = after(state, Failed(failure(0)), page=page)
    assert judge(state) == Restart()


def test_a_survivor_that_could_not_recover_starts_all_again_only_after_a_kill():
    lost = failure(0, RAISED, secondary=True, kind="WorkerLost")
    after_a_kill, _ = after(initial_state(3, 16), Failed(failure(1)), Failed(lost))
    without_one, _ = after(initial_state(3, 16), Failed(lost))
    assert judge(after_a_kill) == Restart()
    assert judge(without_one) == Over(lost, ())


def test_a_worker_that_fails_in_a_call_of_all_workers_because_one_was_killed_there_starts_all_again():
    waiting = {slot: StatusRow(pid=100 + slot, phase=Phase.AWAITING, detail_a=Collective.START) for slot in range(3)}
    alone = failure(1, RAISED, step=None, kind="BadEnvironment")
    killed_later, _ = after(initial_state(3, 16), Failed(alone), Failed(failure(0, step=None)), page=waiting)
    not_killed, _ = after(initial_state(3, 16), Failed(alone), page=waiting)
    elsewhere, _ = after(initial_state(3, 16), Failed(alone), Failed(failure(0, step=None)), page=NOBODY)
    assert judge(killed_later) == Restart()
    assert judge(not_killed) == Over(alone, ())
    assert isinstance(judge(elsewhere), Over)


def test_starting_again_remembers_faults_and_steps_and_nothing_else():
    state, _ = after(initial_state(2, 16), Failed(failure(1)), Rescaled(3), Failed(failure(0)))
    again = restarted_state(state)
    assert (again.num_faults, dict(again.losses), sorted(again.workers)) == (2, {412: {(1, 1)}}, [0, 1, 2])
    assert not again.failures
    assert not again.num_killed


def test_a_step_that_costs_a_worker_in_each_of_five_starts_is_over():
    state = initial_state(1, 16)
    for _ in range(4):
        state, _ = after(state, Failed(failure(0)))
        assert judge(state) == Restart()
        state = restarted_state(state)
    state, _ = after(state, Failed(failure(0)))
    verdict = judge(state)
    assert isinstance(verdict, Over)
    assert verdict.why == "step 412 has cost workers in 5 attempts: it would cost the next one too"


def test_workers_that_are_lost_in_one_attempt_at_a_step_count_once():
    state = initial_state(8, 16)
    for slot in range(7):
        state, _ = after(state, Failed(failure(slot)))
    assert not state.failures


def test_losses_at_the_start_are_forgotten_once_there_are_members():
    state = initial_state(2, 16)
    for _ in range(2):
        state, _ = after(state, Failed(failure(0, step=None)), page=NOBODY)
        state = restarted_state(state)
    state, _ = after(state, Looked(1.0))
    state, _ = after(state, Failed(failure(0, step=None)), page=NOBODY)
    assert judge(state) == Restart()


def test_the_budget_is_what_is_borne_and_one_more_is_over():
    state = initial_state(8, 3)
    for slot in range(3):
        state, _ = after(state, Failed(failure(slot, step=slot)))
        assert not state.failures
    state, done = after(state, Failed(failure(3, step=3)))
    verdict = judge(state)
    assert isinstance(verdict, Over)
    assert verdict.why.startswith("4 workers lost in this run: the fault budget of 3 is used up")
    assert done == []


def test_the_budget_is_refilled_by_steps_that_nobody_had_committed_before():
    state = initial_state(2, 2)
    for step in range(100):
        at = {slot: replace(row, step=step, committed_ns=1) for slot, row in MEMBERS.items()}
        state, _ = after(state, Failed(failure(1, step=step)), Looked(1.0), page=at)
        assert not state.failures
    assert (state.num_lost, state.num_faults) == (100, 1)


def test_steps_that_are_made_once_more_after_a_new_start_give_nothing_back():
    state = initial_state(1, 3)
    for _ in range(4):
        for step in (5, 6, 7):
            state, _ = after(state, Looked(1.0), page={0: replace(member(0), step=step, committed_ns=1)})
        state, _ = after(state, Failed(failure(0, step=7)), page=MEMBERS)
        state = state if state.exhausted else restarted_state(state)
    verdict = judge(state)
    assert isinstance(verdict, Over)
    assert verdict.why.startswith("4 workers lost in this run, and too few steps meanwhile: the fault budget of 3")


def test_members_that_come_to_the_end_after_a_loss_make_the_run_done():
    state, _ = after(initial_state(3, 16), Finished(0), Failed(failure(1)), Finished(2))
    assert state.done


def test_nobody_is_replaced_once_a_member_came_to_the_end():
    _, done = after(initial_state(3, 16), Finished(0), Failed(failure(1)))
    assert without(done, Report) == []


def test_a_joiner_that_nobody_is_left_to_admit_is_dismissed():
    page = {**MEMBERS, 1: StatusRow()}
    state, _ = after(initial_state(2, 16), Failed(failure(1)))
    state, done = after(state, Finished(0), page=page)
    assert (state.done, done) == (True, [Dismiss(1)])


def test_a_joiner_that_raises_is_given_up_and_the_members_go_on():
    page = {**MEMBERS, 1: StatusRow()}
    state, _ = after(initial_state(2, 16), Failed(failure(1)))
    state, done = after(state, Failed(failure(1, RAISED), ended=False), Failed(failure(1, RAISED)), page=page)
    assert ([type(action) for action in done], state.num_faults, state.failures) == ([Report], 2, ())
    assert decide(state, Looked(9.0), page)[1] == []


def test_a_joiner_that_only_tells_of_another_loss_is_tried_again():
    page = {**MEMBERS, 1: StatusRow()}
    state, _ = after(initial_state(2, 16), Failed(failure(1)))
    _, done = after(state, Failed(failure(1, RAISED, secondary=True)), page=page)
    assert [type(action) for action in done] == [Report, StartJoiner]


def test_an_exit_code_counts_as_a_loss_only_if_the_others_stay():
    state, at_once = after(initial_state(2, 16), Failed(failure(1, EXITED)))
    _, later = after(state, Looked(failure(1).time_s + EXIT_GRACE_S))
    everyone, _ = after(state, Failed(failure(0, EXITED)), Looked(0.1))
    assert at_once == []
    assert [type(action) for action in later] == [Report, StartJoiner]
    assert judge(everyone) == Over(failure(0, EXITED), (failure(1, EXITED),))


def test_a_member_that_the_others_left_out_is_a_loss_and_replaced_at_once():
    state, done = after(initial_state(2, 16), Failed(failure(1, EXITED, kind="75")))
    assert [type(action) for action in done] == [Report, StartJoiner]
    assert said(done) == ["! worker 1 (pid 101) was left out by the others at step 412"]
    alone, _ = after(initial_state(1, 16), Failed(failure(0, EXITED, kind="75")))
    assert (state.num_faults, judge(alone)) == (1, Restart())


@pytest.mark.parametrize("page", [MEMBERS, {**MEMBERS, 1: StatusRow()}], ids=["admitted", "not admitted"])
def test_a_joiner_that_gives_its_place_up_is_no_fault_and_after_two_no_more_are_started(page):
    misplaced = Failed(failure(1, EXITED, kind="76"))
    state, _ = after(initial_state(2, 1), Failed(failure(1)))
    state, first = after(state, misplaced, page=page)
    state, second = after(state, misplaced, Looked(9.0), page=page)
    assert without(first, Report) == [StartJoiner(1, ("127.0.0.1:41000",), 2)]
    assert (said(first), without(second, Report)) == ([], [])
    assert said(second) == [
        "  2 new workers have not found their place in the script: no more are started, and the others go on"
    ]
    assert (state.num_faults, state.finished, state.failures, sorted(state.workers)) == (1, False, (), [0])
    assert state.turned_away == (misplaced.failure, misplaced.failure)
    assert [type(action) for action in decide(state, Rescaled(3), page)[1]] == [Report, StartJoiner, StartJoiner]


def test_an_exit_code_is_a_loss_if_the_others_come_to_the_end_meanwhile():
    state, done = after(initial_state(3, 16), Failed(failure(1, EXITED)), Finished(0), Finished(2), Looked(0.1))
    assert ([type(action) for action in done], state.failures, state.done) == ([Report], (), True)


def test_a_worker_that_called_exit_itself_has_ended_the_run():
    complaint = failure(0, RAISED, secondary=True, kind="WorkerLost")
    state, done = after(initial_state(3, 16), Failed(failure(1, QUIT), ended=False), Failed(complaint))
    assert (judge(state), done) == (Over(failure(1, QUIT), (complaint,)), [])


def test_fewer_wanted_sends_the_highest_members_away_once():
    state, done = after(initial_state(4, 16), Rescaled(2), Looked(1.0))
    assert without(done, Report) == [SendSignal(2, signal.SIGUSR1), SendSignal(3, signal.SIGUSR1)]
    state, done = after(state, Finished(3), Finished(2))
    assert (done, sorted(state.workers), state.finished, state.num_faults) == ([], [0, 1], False, 0)


def test_fewer_wanted_ends_joiners_that_were_not_admitted_without_a_word():
    page = {**MEMBERS, 2: StatusRow()}
    state, _ = after(initial_state(2, 16), Rescaled(3))
    _, done = after(state, Rescaled(2), page=page)
    assert (without(done, Report), said(done)) == ([Dismiss(2)], [])


def test_founders_are_not_sent_away_before_they_are_members():
    state, done = after(initial_state(3, 16), Rescaled(1), page=NOBODY)
    assert (without(done, Report), said(done)) == ([], [])
    assert SendSignal(2, signal.SIGUSR1) in decide(state, Looked(1.0), MEMBERS)[1]


def test_more_wanted_fills_the_lowest_free_slots():
    state, _ = after(initial_state(4, 16), Rescaled(2), Finished(2), Finished(3))
    _, done = after(state, Rescaled(5))
    assert [action.slot for action in done if isinstance(action, StartJoiner)] == [2, 3, 4]


def test_the_member_with_rank_0_of_the_newest_generation_speaks():
    assert speaking_slot({0: member(0), 1: replace(member(1, generation=2), rank=0)}) == 1
    assert speaking_slot({1: member(1), 2: member(2)}) is None
    assert speaking_slot(NOBODY) is None


slots = st.integers(0, 5)
hows = st.sampled_from([KILLED, EXITED, QUIT, RAISED])
kinds = st.sampled_from(["", "75", "76"])
events = st.one_of(
    st.builds(Finished, slots),
    st.builds(Failed, st.builds(failure, slots, hows, st.integers(0, 20), st.booleans(), kinds), st.booleans()),
    st.builds(Rescaled, st.integers(1, 6)),
    st.builds(Condemned, slots),
    st.builds(Looked, st.floats(0, 100)),
)
pages = st.fixed_dictionaries({slot: st.sampled_from([StatusRow(), member(slot)]) for slot in range(12)})


@given(st.integers(1, 6), st.integers(0, 4), st.lists(st.tuples(events, pages), max_size=30))
def test_whatever_happens_no_slot_is_given_twice_and_nothing_starts_in_a_crisis(num_workers, budget, happenings):
    state = initial_state(num_workers, budget)
    for event, page in happenings:
        before, (state, actions) = state, decide(state, event, page)
        started = [action.slot for action in actions if isinstance(action, StartJoiner)]
        gone = {event.slot} if isinstance(event, Finished) else set()
        gone |= {event.failure.rank} if isinstance(event, Failed) else set()
        assert not set(started) & (before.workers.keys() - gone)
        assert len(set(started)) == len(started)
        assert not (started and (state.failures or state.finished))
        staying = [slot for slot, worker in state.workers.items() if not worker.leaving]
        assert not started or len(staying) + len(state.given_up) + len(state.exits) == state.wanted
        assert state.failures or state.num_faults <= budget
        assert not state.failures or isinstance(judge(state), Restart | Over)
