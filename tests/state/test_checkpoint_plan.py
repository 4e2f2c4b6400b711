"""When checkpoints are due, and what the script and the command line say about it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.settings.environment import Overrides, read_overrides
from lockstep.state.checkpoints.plan import (
    CheckpointOptions,
    CheckpointSchedule,
    Every,
    parse_every,
    plan_checkpoints,
    script_options,
)


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("100 steps", Every(100)),
        ("1 step", Every(1)),
        ("10 min", Every(minutes=10)),
        ("1.5 hours", Every(minutes=90)),
        ("30s", Every(minutes=0.5)),
        ("100 steps, 10 min", Every(100, 10)),
        ("  10 Minutes ,100 Steps", Every(100, 10)),
    ],
)
def test_a_text_says_how_often(text: str, every: Every) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "does not say how often"),
        ("100", "does not say how often"),
        ("often", "does not say how often"),
        ("100 steps 10 min", "does not say how often"),
        ("100 steps,", "does not say how often"),
        ("-5 steps", "does not say how often"),
        ("10 parsec", "does not say how often"),
        ("2.5 steps", "steps are whole"),
        ("0 steps", "1 or more"),
        ("0 min", "more than 0"),
        ("10 min, 1 hour", "says twice"),
    ],
)
def test_a_text_that_says_nothing_clear_is_refused_with_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(BadArgument, match=complaint):
        parse_every(text)


@given(st.integers(0, 10**6), st.integers(1, 500))
def test_saved_steps_are_multiples_wherever_a_run_was_resumed(start: int, every: int) -> None:
    schedule = CheckpointSchedule(Every(every), start, 0.0)
    saved = []
    for step in range(start, start + 3 * every + 1):
        if schedule.due(step, 0.0):
            saved.append(step)
            schedule.done(step, 0.0)
    assert saved == [step for step in range(start + 1, start + 3 * every + 1) if step % every == 0]


def test_time_alone_makes_a_checkpoint_due() -> None:
    schedule = CheckpointSchedule(Every(minutes=10), 7, 100.0)
    assert not schedule.due(8, 699.0)
    assert schedule.due(9, 700.0)


def test_a_step_is_never_due_twice_however_long_it_takes() -> None:
    schedule = CheckpointSchedule(Every(steps=1, minutes=1), 7, 0.0)
    assert not schedule.due(7, 1e9)


def test_of_steps_and_minutes_whichever_comes_first_counts() -> None:
    assert CheckpointSchedule(Every(100, 10), 0, 0.0).due(5, 600.0)
    assert CheckpointSchedule(Every(100, 10), 0, 0.0).due(100, 5.0)
    assert not CheckpointSchedule(Every(100, 10), 0, 0.0).due(99, 599.0)


def test_without_a_word_checkpoints_come_every_ten_minutes() -> None:
    assert Every() == Every(minutes=10)


def test_the_command_line_goes_over_the_script() -> None:
    line = read_overrides({"LOCKSTEP_CHECKPOINTS": "there", "LOCKSTEP_CHECKPOINT_EVERY": "7 steps"})
    plan = plan_checkpoints(script_options("here", 5, None, 2, "never"), line)
    assert (plan.folder.name, plan.every, plan.keep, plan.resume) == ("there", Every(7), 2, "never")


def test_a_folder_that_the_script_names_goes_before_the_one_beside_the_logs() -> None:
    logs = Overrides(run_dir=Path("runs/mnist-3"))
    assert plan_checkpoints(CheckpointOptions(folder="here"), logs).folder == Path("here").absolute()
    assert plan_checkpoints(CheckpointOptions(), logs).folder == Path("runs/mnist-3/checkpoints").absolute()


def test_without_a_word_three_are_kept_and_the_newest_is_resumed() -> None:
    plan = plan_checkpoints(CheckpointOptions(folder="here"), Overrides())
    assert (plan.every, plan.keep, plan.resume) == (Every(minutes=10), 3, "auto")


def test_a_script_without_a_folder_is_told_to_give_one() -> None:
    with pytest.raises(BadArgument, match=r"run\.checkpoints\('checkpoints'\)"):
        plan_checkpoints(CheckpointOptions(), Overrides())


def test_a_variable_that_cannot_be_read_is_named() -> None:
    with pytest.raises(BadEnvironment, match="LOCKSTEP_CHECKPOINT_EVERY"):
        plan_checkpoints(CheckpointOptions(folder="here"), Overrides(checkpoint_every="some"))


@pytest.mark.parametrize("keep", [0, -1, True, 2.0])
def test_at_least_one_checkpoint_is_kept(keep: int) -> None:
    with pytest.raises(BadArgument, match="1 or more"):
        plan_checkpoints(CheckpointOptions(folder="c", keep=keep), Overrides())
