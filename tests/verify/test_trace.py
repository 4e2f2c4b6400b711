"""A worker's trace, written from events and read back."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.events import (
    KEPT_BY_LANE,
    Closed,
    Copied,
    GenerationFormed,
    GraphCompiled,
    LaneBegan,
    LaneEnded,
    LaneGradients,
    Note,
    Started,
    StepBegan,
    StepCommitted,
)
from lockstep.verify.evidence import RunTrace, read_disturbed, read_run, trace_path, trace_paths
from lockstep.verify.trace import Sources, Trace

STARTED = Started("train.py", 1, 1, 0, 1, True)
DATA = {"x": torch.ones(3)}


def traced(folder: Path, *events: Any, state: dict[str, Any] | None = None) -> RunTrace:
    """What is read back after a worker has seen the events; an event that is a function is called instead."""
    trace = Trace(folder, 0, Sources(lambda: {} if state is None else state, lambda: ["mean"]))
    for event in (STARTED, *events, Closed(step=1)):
        event() if callable(event) else trace(event)
    return read_run("1 worker", [trace_path(folder, 0)])


def step(*inside: Any, step: int = 0) -> tuple[Any, ...]:
    gradients = LaneGradients(0, {"w": torch.ones(4)}, step=step)
    return (
        StepBegan(step=step),
        LaneBegan(0, True, DATA, step=step),
        gradients,
        *inside,
        LaneEnded(0, step=step),
        StepCommitted(3, None, step=step),
    )


def test_the_state_is_read_before_each_step_and_at_the_end(tmp_path: Path) -> None:
    weight = torch.zeros(1)
    run = traced(tmp_path, *step(), lambda: weight.add_(1), state={"w": weight, "mean": weight})
    first, last = run.workers[0].states[0], run.workers[0].states[1]
    assert first.digest != last.digest
    assert run.digest == last.digest
    assert (run.num_steps, list(last.tensors), last.buffers) == (1, ["w", "mean"], frozenset({"mean"}))


def test_gradients_that_come_bucket_by_bucket_are_one_lanes(tmp_path: Path) -> None:
    run = traced(tmp_path, *step(LaneGradients(0, {"b": torch.zeros(2)})))
    norms = {name: norm for name, (_, norm) in run.lanes[0, 0].gradients.items()}
    assert norms == {"w": 2.0, "b": 0.0}


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random], ids=["torch", "Python"])
def test_one_number_more_shows_in_that_generator_alone(tmp_path: Path, draw: Any) -> None:
    torch.manual_seed(0)
    random.seed(0)
    plain = traced(tmp_path / "plain", *step()).lanes[0, 0].chance
    drawn = traced(tmp_path / "drawn", *step(draw)).lanes[0, 0].chance
    assert sum(plain[name] != drawn[name] for name in plain) == 1


def test_threads_set_by_the_script_are_seen(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    run = traced(tmp_path, *step(lambda: torch.set_num_threads(before + 1)))
    torch.set_num_threads(before)
    assert run.lanes[0, 0].threads == before + 1


def test_lanes_of_an_evaluation_are_not_those_of_a_step(tmp_path: Path) -> None:
    evaluation = LaneBegan(0, False, {"x": torch.zeros(1)}, step=1), LaneEnded(0, step=1)
    assert list(traced(tmp_path, *step(), *evaluation).lanes) == [(0, 0)]


def test_torchs_warning_of_a_nondeterministic_operator_is_kept_once_and_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn_twice() -> None:
        for _ in range(2):
            warnings.showwarning(UserWarning("put_ is not deterministic"), UserWarning, "file", 1)

    shown: list[Any] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *warning: shown.append(warning))
    assert traced(tmp_path, *step(warn_twice)).warnings == ("put_ is not deterministic",)
    assert len(shown) == 2


def test_a_note_on_what_a_lane_keeps_is_in_the_trace_and_others_are_not(tmp_path: Path) -> None:
    kept = f"{KEPT_BY_LANE}, by `n += 1`"
    run = traced(tmp_path, *step(Note(kept), Note("BatchNorm sees 4 samples"), Note(kept)))
    assert run.kept == (kept,)


def test_what_was_compiled_is_kept_once(tmp_path: Path) -> None:
    run = traced(
        tmp_path, *step(GraphCompiled("3 operators"), GraphCompiled("5 operators"), GraphCompiled("3 operators"))
    )
    assert run.compiled == ("3 operators", "5 operators")


def test_warnings_are_shown_as_before_when_the_run_is_over(tmp_path: Path) -> None:
    before = warnings.showwarning
    traced(tmp_path, *step())
    assert warnings.showwarning is before


def worker(folder: Path, rank: int, *events: Any, failed: bool = False, **options: bool) -> Trace:
    sources = Sources(lambda: {"w": torch.zeros(1)}, list, has_failed=lambda: failed)
    trace = Trace(folder, rank, sources, **options)
    for event in (STARTED, *events):
        trace(event)
    return trace


def test_a_disturbed_run_has_the_workers_that_came_to_a_good_end_and_the_lanes_of_all(tmp_path: Path) -> None:
    worker(tmp_path, 0, *step(), *step(step=1), Closed(step=2))
    worker(tmp_path, 1, *step(), StepBegan(step=1))  # killed
    with trace_path(tmp_path, 1).open("a") as file:
        file.write('{"kind": "sta')
    worker(tmp_path, 1, *step(step=1), Closed(step=2), failed=True, is_replacement=True)  # sent away
    run = read_disturbed("disturbed", [tmp_path])
    assert len(trace_paths(tmp_path)) == 3
    assert [sorted(worker.states) for worker in run.workers] == [[0, 1, 2]]
    assert sorted(run.lanes) == [(0, 0), (1, 0)]


def test_a_copy_goes_on_in_a_file_of_its_own(tmp_path: Path) -> None:
    worker(tmp_path, 0, *step(), Copied(1), *step(step=1), Closed(step=2))
    assert len(trace_paths(tmp_path)) == 2
    (copy,) = read_disturbed("disturbed", [tmp_path]).workers
    assert sorted(copy.states) == [1, 2]


def test_of_a_lane_that_was_computed_again_the_last_generation_counts(tmp_path: Path) -> None:
    formed = GenerationFormed(2, (0,), (1,), (), (), (0,), (0,), False, "", 0.0)
    worker(tmp_path, 0, StepBegan(), formed, *step()[1:], Closed(step=1))
    worker(tmp_path, 1, *step(), Closed(step=1))
    assert read_disturbed("disturbed", [tmp_path]).lanes[0, 0].worker == 0


def test_the_number_of_the_batch_the_rates_and_the_gradient_of_a_step_are_kept(tmp_path: Path) -> None:
    sources = Sources(dict, list, lambda: {"w": torch.full((4,), 3.0)}, lambda: {"optimizer, group 0": 0.5})
    trace = Trace(tmp_path, 0, sources)
    for event in (STARTED, StepBegan(7), StepCommitted(3, None), Closed(step=1)):
        trace(event)
    run = read_run("1 worker", [trace_path(tmp_path, 0)])
    state = run.workers[0].states[0]
    assert (state.batch, state.rates, run.norms[0]) == (7, {"optimizer, group 0": 0.5}, {"w": 6.0})


def test_a_run_that_stops_at_a_step_has_the_state_that_a_longer_one_has_there(tmp_path: Path) -> None:
    worker(tmp_path / "longer", 0, StepBegan(0), StepBegan(1, step=1), Closed(step=2))
    worker(tmp_path / "shorter", 0, StepBegan(0), Closed(step=1))
    longer, shorter = (read_disturbed("", [tmp_path / name]).workers[0] for name in ("longer", "shorter"))
    assert longer.states[1] == shorter.states[1]
