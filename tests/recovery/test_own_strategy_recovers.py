"""What the engine of a user's own strategy holds, after workers were lost and have joined."""

from typing import cast

from disturbed import Arrival, Plan, disturbed
from faults import Fault
from own_strategy import Counting, CountingEngine
from trainings import Training, Work

TRAINING = Training(options=(("strategy", Counting()),))


def _note_updates(number: int, work: Work) -> None:
    work.notes.append([work.run.step, cast(CountingEngine, work.run._engine).num_updates])


def test_its_engine_counts_each_update_once_where_a_step_is_computed_again() -> None:
    result = disturbed(TRAINING, 3, Plan((Fault(1, 2, "before waits"),), extra=_note_updates))
    assert result.values("notes") == [[[step, step] for step in range(TRAINING.steps)]] * 2


def test_a_newcomer_goes_on_from_what_the_engine_of_a_member_gave() -> None:
    result = disturbed(TRAINING, 2, Plan(arrivals=(Arrival(2, 2),), extra=_note_updates))
    founders, newcomer = result.values("notes")[:2], result.values("notes")[2]
    assert founders == [[[step, step] for step in range(TRAINING.steps)]] * 2
    assert newcomer == [[step, step] for step in range(newcomer[0][0], TRAINING.steps)]
    assert newcomer[0][0] >= 2
