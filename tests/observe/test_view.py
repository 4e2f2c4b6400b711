"""What a run's folder says: histories as they are written, and the view that is made of them."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.cli.main import lockstep
from lockstep.errors import BadArgument
from lockstep.events import CheckpointSaved, Closed, Event, Events, GenerationFormed, StepCommitted
from lockstep.launch.channels.status import Phase, StatusRow
from lockstep.launch.events import LAUNCHER, LaunchBegan, WorkerExited, WorkersSeen
from lockstep.observe import json_lines
from lockstep.observe.history import STEPS_FILE, WORKERS_FILE, LineRhythm, StepHistory, WorkerHistory
from lockstep.observe.journal import Journal, read_journal
from lockstep.observe.json_lines import LineFile, read_lines
from lockstep.observe.page.entries import RunEntries, read_entries
from lockstep.observe.page.log_tail import log_tail
from lockstep.observe.page.view import make_view, thinned, without_undone
from lockstep.observe.watch import sparkline


def no_word(text: str) -> None:
    raise AssertionError(text)


# -- what is written --------------------------------------------------------------------------------------------------


def history_of(folder: Path, events: list[Event], speaks: bool = True) -> list[dict[str, Any]]:
    history = StepHistory(folder, lambda: speaks, lambda: {0: 2, 3: 1}, no_word, clock=lambda: 5.0)
    for event in events:
        history(event)
    return read_lines(folder / STEPS_FILE)


def test_the_history_counts_all_samples_although_lines_are_apart(tmp_path: Path) -> None:
    steps = [StepCommitted(8, 1.0 / (step + 1), time_s=0.03 * step, step=step) for step in range(100)]
    lines = history_of(tmp_path, [*steps, Closed()])
    assert 10 < len(lines) < 20
    assert sum(line["samples"] for line in lines) == 800
    assert sum(line["steps"] for line in lines) == 100
    assert (lines[-1]["step"], lines[-1]["loss"]) == (99, 1 / 100)
    assert lines[-1]["lanes"] == {"0": 2, "3": 1}


def test_only_the_worker_that_speaks_writes(tmp_path: Path) -> None:
    assert history_of(tmp_path, [StepCommitted(8, 1.0)], speaks=False) == []


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    assert history_of(tmp_path, [StepCommitted(8, float("nan"))])[0]["loss"] is None


def test_changes_of_workers_and_checkpoints_are_lines_at_once(tmp_path: Path) -> None:
    formed = GenerationFormed(2, (0, 2), (1,), (), (2,), (1,), (0,), False, "", 0.3, step=7)
    lines = history_of(tmp_path, [formed, CheckpointSaved("there", 0.5, step=8)])
    assert [(line["kind"], line["step"]) for line in lines] == [("GenerationFormed", 7), ("CheckpointSaved", 8)]
    assert (lines[0]["lost"], lines[0]["joined"]) == ([1], [2])


def test_a_run_of_a_week_has_some_fifteen_thousand_lines() -> None:
    rhythm, now_s, number = LineRhythm(0.2), 0.0, 0
    while now_s < 7 * 86400:
        number += rhythm.is_due(now_s)
        now_s += max(0.2, now_s / 5000)
    assert 10_000 < number < 20_000


def test_the_launcher_writes_what_every_worker_does(tmp_path: Path) -> None:
    history = WorkerHistory(tmp_path, no_word, clock=lambda: 5.0)
    row = StatusRow(pid=7, generation=1, phase=Phase.COMPUTING, num_lanes=4, memory_bytes=99)
    for seconds in (0.0, 0.3, 1.0):
        history(WorkersSeen({0: row, 1: StatusRow()}, time_s=seconds))
    lines = read_lines(tmp_path / WORKERS_FILE)
    assert len(lines) == 2
    assert set(lines[0]["workers"]) == {"0"}
    assert lines[0]["workers"]["0"]["phase"] == "computing"
    assert lines[0]["workers"]["0"]["memory"] == 99


def test_the_journal_keeps_plain_fields_and_the_message(tmp_path: Path) -> None:
    events = Events(LAUNCHER)
    events.subscribe(Journal(tmp_path, no_word, clock=lambda: 5.0))
    events.emit(LaunchBegan, "train.py", 2)
    events.publish(WorkerExited("SIGKILL", True, "out of memory", worker=1, step=6))
    events.note("! something <b>")
    events.emit(WorkersSeen, {})
    kinds = [(entry["kind"], entry["worker"], entry["text"]) for entry in read_journal(tmp_path)]
    assert kinds == [("LaunchBegan", -1, ""), ("WorkerExited", 1, ""), ("Note", -1, "! something <b>")]
    assert read_journal(tmp_path)[1]["reason"] == "out of memory"


def test_files_that_cannot_be_written_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json_lines, "append_line", full)
    say = json_lines.only_first(said.append)
    files = [LineFile(tmp_path / name, "the history", say) for name in ("a.jsonl", "b.jsonl")]
    for file in [*files, *files]:
        file.append({})
    (sentence,) = said
    assert "the history cannot be written to" in sentence
    assert "training goes on" in sentence


# -- the view ---------------------------------------------------------------------------------------------------------


def step_line(step: int, at: float, **fields: Any) -> dict[str, Any]:
    return {"at": at, "step": step, "loss": 1.0, "samples": 10, "seconds": 2.0, "lanes": {"0": 2}, **fields}


def worker_line(at: float, step: int, spent_s: float) -> dict[str, Any]:
    """A worker that has spent so long on compute, half of it on waiting, and a tenth on data."""
    times = {"committed_s": 100 + 2 * spent_s, "compute_s": spent_s, "waiting_s": spent_s / 2, "data_s": spent_s / 10}
    return {"at": at, "step": step, "workers": {"0": {"step": step, "memory": 5, "gpu_memory": 0, **times}}}


def test_the_parts_of_a_step_are_differences_between_two_looks() -> None:
    view = make_view(
        RunEntries("a", workers=[worker_line(1, 10, 1.0), worker_line(2, 20, 2.0), worker_line(3, 20, 2.0)])
    )
    parts = {name: values for name, values in view["parts"].items() if name not in ("step", "t")}
    assert parts == {
        "compute": pytest.approx([0.1]), "waiting": pytest.approx([0.05]), "data": pytest.approx([0.01]),
        "other": pytest.approx([0.04]),
    }  # fmt: skip


def test_another_process_in_the_slot_is_not_compared_with_the_one_before() -> None:
    view = make_view(RunEntries("a", workers=[worker_line(1, 10, 5.0), worker_line(2, 20, 1.0)]))
    assert view["parts"]["compute"] == []


def test_marks_stand_where_workers_came_and_went() -> None:
    formed = step_line(7, 3.0, kind="GenerationFormed", lost=[1], joined=[2, 3], left=[])
    view = make_view(RunEntries("a", history=[step_line(6, 1.0), formed]))
    assert [(mark["kind"], mark["step"], mark["t"]) for mark in view["marks"]] == [("lost", 7, 2), ("joined", 7, 2)]
    assert view["marks"][1]["text"] == "workers 2, 3 have joined"
    assert view["steps"]["samples_per_s"] == [5.0]


def test_steps_that_a_resumed_run_made_again_count_once() -> None:
    lines = [step_line(step, at) for at, step in enumerate([0, 10, 20, 30, 15, 25])]
    assert [(line["step"], line["at"]) for line in without_undone(lines)] == [(0, 0), (10, 1), (15, 4), (25, 5)]


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=3000))
def test_thinning_keeps_ends_and_extremes(values: list[float | None]) -> None:
    rows = [{"step": place, "loss": value} for place, value in enumerate(values)]
    kept = thinned(rows, "loss", most=100)
    assert len(kept) <= max(100, 0)
    assert kept[:1] == rows[:1]
    assert kept[-1:] == rows[-1:]
    known = [value for value in values if value is not None]
    if known:
        shown = [row["loss"] for row in kept if row["loss"] is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))


def test_two_lines_of_metrics_of_one_step_are_both_shown() -> None:
    lines = [{"step": 1, "loss": 0.5}, {"step": 1, "accuracy": 0.9}, {"step": 2, "loss": None, "note": "x"}]
    view = make_view(RunEntries("a", metrics=lines))
    assert view["metrics"] == {
        "loss": {"step": [1.0], "value": [0.5]}, "accuracy": {"step": [1.0], "value": [0.9]}
    }  # fmt: skip


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["at", "step", "kind", "loss", "samples", "seconds", "lanes", "workers", "lost", "joined", "plain", "took_s",
     "text", "time_s", "preconditioned", "critical_batch", "low", "0", "exit_code"]
)  # fmt: skip
LINES = st.lists(st.dictionaries(NAMES, ANYTHING | st.dictionaries(NAMES, ANYTHING, max_size=4)), max_size=3)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(journal=LINES, history=LINES, workers=LINES, noise=LINES, metrics=LINES)
def test_no_line_that_anybody_has_written_breaks_the_view(
    tmp_path_factory: pytest.TempPathFactory, journal: Any, history: Any, workers: Any, noise: Any, metrics: Any
) -> None:
    folder = tmp_path_factory.mktemp("run")
    files = {"events": journal, "history": history, "workers": workers, "noise": noise, "metrics": metrics}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    json.dumps(make_view(read_entries(folder)), allow_nan=False)


def test_a_log_is_shown_from_a_whole_line_on_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    assert log_tail(tmp_path, 0, 20) == "line 998\nline 999\n"
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "worker-1.log").symlink_to(tmp_path / "secret")
    assert log_tail(tmp_path, 1) == log_tail(tmp_path, 2) == ""


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert sparkline([1.0, None, 3.0, 2.0], 10) == "▁ █▅"
    assert sparkline([5.0, 5.0], 10) == "▁▁"
    assert sparkline([None], 10) == sparkline([], 10) == ""


def test_the_terminal_shows_a_run_and_no_markup_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "[red]run"
    folder.mkdir()
    (folder / STEPS_FILE).write_text(json.dumps(step_line(7, 1.0)) + "\n")
    entry = {"at": 1.0, "time_s": 1.0, "kind": "Note", "worker": -1, "step": 7, "text": "! [bold]lost"}
    (folder / "events.jsonl").write_text(json.dumps(entry) + "\n")
    shown = CliRunner().invoke(lockstep, ["watch", str(folder), "--once"]).output
    assert "[red]run" in shown
    assert "! [bold]lost" in shown
    assert "step 7" in shown


@pytest.mark.parametrize("command", ["watch", "page", "report"])
def test_a_folder_without_a_run_is_refused_in_a_sentence(tmp_path: Path, command: str) -> None:
    for folder, sentence in ((tmp_path / "nowhere", "there is no run in"), (tmp_path, "is not the folder of a run")):
        refused = CliRunner().invoke(lockstep, [command, str(folder)]).exception
        assert isinstance(refused, BadArgument)
        assert sentence in str(refused)
