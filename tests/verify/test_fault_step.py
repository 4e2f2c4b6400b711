"""Where faults happen, and what a verification says of them."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic import make_run

from lockstep.programs.verification.faults import AFTER, FEWEST_STEPS, LEAD, FaultResult, fault_step, resumed_on
from lockstep.programs.verification.report import as_json, show
from lockstep.programs.verification.runs import Request
from lockstep.programs.verification.verify import VerifyReport
from lockstep.settings.faults import Fault, FaultKind, parse_fault
from lockstep.verify.evidence import RunTrace, WorkerTrace


def trained(num_steps: int, steps_per_epoch: int | None, first: int = 0) -> RunTrace:
    """A run whose epochs have so many batches each; None if the batches are the script's own."""
    run = make_run(2, first + num_steps)
    batches = {
        step: replace(state, batch=None if steps_per_epoch is None else (step - first) % steps_per_epoch)
        for step, state in run.workers[0].states.items()
        if step >= first
    }
    return replace(run, workers=(WorkerTrace(batches, run.workers[0].last),) * 2)


@given(num_steps=st.integers(FEWEST_STEPS, 60), steps_per_epoch=st.none() | st.integers(1, 40), first=st.integers(0, 5))
def test_a_fault_has_steps_before_and_after_it(num_steps: int, steps_per_epoch: int | None, first: int) -> None:
    step = fault_step(trained(num_steps, steps_per_epoch, first))
    assert step is not None
    assert first + LEAD <= step <= first + num_steps - 2


@given(epochs=st.integers(2, 8), steps_per_epoch=st.integers(3, 20))
def test_a_fault_is_neither_in_the_first_nor_in_the_last_step_of_an_epoch(epochs: int, steps_per_epoch: int) -> None:
    step = fault_step(trained(epochs * steps_per_epoch, steps_per_epoch))
    assert step is not None
    assert 0 < step % steps_per_epoch < steps_per_epoch - 1


def test_a_new_worker_has_time_to_join_if_there_is_any() -> None:
    step = fault_step(trained(9, 5))
    assert step is not None
    assert 9 - step > AFTER


def test_too_few_steps_leave_no_room_for_a_fault() -> None:
    assert fault_step(trained(FEWEST_STEPS - 1, 2)) is None


@pytest.mark.parametrize(("counts", "other"), [((1, 2, 3, 4), 1), ((4, 2), 2), ((2,), 1), ((3,), 2)])
def test_a_run_is_resumed_on_another_number_of_workers(counts: tuple[int, ...], other: int) -> None:
    assert resumed_on(counts) == other


@given(kind=st.sampled_from(FaultKind), slot=st.integers(0, 500), step=st.integers(0, 10**9 - 1))
def test_a_fault_is_read_back_from_its_text(kind: FaultKind, slot: int, step: int) -> None:
    assert parse_fault(str(Fault(kind, slot, step))) == Fault(kind, slot, step)


@pytest.mark.parametrize("text", ["kill", "kill 1", "kill -1 at 2", "eat 1 at 2", "kill 1 at 2 or 3", "kill ² at 3"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match='"kill 2 at 7"'):
        parse_fault(text)


SENT_AWAY = FaultResult(
    FaultKind.REPLACE, "killed", True, "a worker that joins is sent away: `i` is 0", None, "", 3, "ab"
)
REFUSED = FaultResult(FaultKind.STOP, "stopped", False, "Misuse: `i` is 0", 7, "where")
PARTED = FaultResult(FaultKind.KILL, "copied", False, "a cause", 5, "The gradient differs.", 3, "ab")


def report(*faults: FaultResult, **changes: object) -> VerifyReport:
    runs = {"1": make_run(1), "2": make_run(2)}
    return replace(VerifyReport(Request("train.py", Path("runs"), (1, 2)), runs, faults=faults), **changes)  # type: ignore[arg-type]


def shown(told: VerifyReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(told, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_note_leaves_a_fault_equal_and_is_shown() -> None:
    told = report(SENT_AWAY)
    assert told.equal
    assert as_json(told)["faults"] == [
        {"kind": "replace", "equal": True, "cause": SENT_AWAY.cause, "first_step": None},
    ]
    assert "killed: equal; a worker that joins is sent away: `i` is 0" in shown(told)


def test_a_fault_that_was_refused_or_differs_makes_the_whole_unequal_and_says_why() -> None:
    told = report(REFUSED, PARTED)
    assert not told.equal
    refused, parted = as_json(told)["faults"]
    assert (refused["cause"], refused["first_step"]) == ("Misuse: `i` is 0", 7)
    assert (parted["cause"], parted["explanation"]) == ("a cause", "The gradient differs.")
    text = shown(told)
    assert "✗ stopped: failed\n  Misuse: `i` is 0" in text
    assert "✗ copied: not the same bits, first difference after 5 steps\n  likely cause: a cause" in text
    assert "the same bits after each of 3 steps" in text


def test_faults_that_were_not_tested_are_said_so_and_those_not_wanted_are_not_mentioned() -> None:
    told = report(untested="2 steps are too few")
    assert (told.equal, as_json(told)["faults"], as_json(told)["faults_untested"]) == (True, [], "2 steps are too few")
    assert "faults were not tested: 2 steps are too few" in shown(told)
    unwanted = report(request=Request("train.py", Path("runs"), (1, 2), faults=False))
    assert "faults" not in as_json(unwanted)
    assert "fault" not in shown(unwanted)


def test_a_loss_that_is_a_sum_is_told_in_place_of_dropout() -> None:
    told = report(distance={"weight": 3.0}, summed="The loss is a sum.")
    assert as_json(told)["distance_explanation"] == "The loss is a sum."
    assert "The loss is a sum." in shown(told)
    assert "Dropout" not in shown(told)
