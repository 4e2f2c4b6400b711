"""The timeline from events to the trace and the account, in one process."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_schema import check_trace, of_kind

from lockstep.events import (
    BackwardBegan,
    BackwardEnded,
    BatchLoaded,
    BucketFilled,
    Copied,
    Events,
    GenerationFormed,
    LaneBegan,
    LaneEnded,
    RecoveryBegan,
    ReduceBegan,
    ReduceDone,
    StepBegan,
    StepCommitted,
    UpdateBegan,
    UpdateEnded,
    Wait,
    WaitBegan,
    WaitEnded,
)
from lockstep.observe.timeline import part as parts_module
from lockstep.observe.timeline.account import PARTS, make_account
from lockstep.observe.timeline.account_lines import account_lines, advice
from lockstep.observe.timeline.clocks import shifts_ns
from lockstep.observe.timeline.part import Head, Part, PartWriter, parse_part, read_parts
from lockstep.observe.timeline.spans import SpanKind, activities
from lockstep.observe.timeline.trace import LauncherMark, make_trace

HEAD = Head(0, 100, "a", "boot-a", 0, 1_000_000_000, "cpu", 1)
MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """Emits the events of steps, in milliseconds of its own choosing."""

    def __init__(self, worker: int, folder: Path) -> None:
        self.clock = Clock()
        self.events = Events(worker, self.clock)
        self.said: list[str] = []
        self.writer = PartWriter(self.events, folder, "cpu", lambda: 1, self.said.append)

    def emit(self, after_ms: float, kind: Any, *args: Any) -> None:
        self.clock.now_s += after_ms / 1e3
        self.events.emit(kind, *args)

    def step(self, lane_ms: float = 20, wait_ms: float = 10) -> None:
        """A step of one lane, `lane_ms` long, that is over `wait_ms` after it; then data of 2 ms, an update of 3."""
        self.emit(0, StepBegan)
        self.emit(0, LaneBegan, 0, True)
        self.emit(lane_ms / 2, BackwardBegan)
        self.emit(lane_ms / 4, BucketFilled, 0)
        self.emit(0, ReduceBegan, 0)
        self.emit(lane_ms / 4, BackwardEnded)
        self.emit(0, LaneEnded, 0)
        self.emit(0, WaitBegan, Wait.STEP)
        self.emit(0, WaitBegan, Wait.STEP, 0, 1)
        self.emit(wait_ms, ReduceDone, 0)
        self.emit(0, WaitEnded, Wait.STEP)
        self.emit(0, StepCommitted, 8, 0.5)
        self.events.step += 1
        self.emit(0, UpdateBegan)
        self.emit(3, UpdateEnded)
        self.emit(2, BatchLoaded, 0, 0.002)


def of_steps(folder: Path, *steps: tuple[float, float], worker: int = 0) -> Part:
    """The part of a worker with these steps: each the milliseconds of its lane and of its wait."""
    one = Worker(worker, folder)
    one.writer.begin()
    for lane_ms, wait_ms in steps:
        one.step(lane_ms, wait_ms)
    one.writer.close()
    return next(part for part in read_parts(folder) if part.head.worker == worker)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_nobody_reads_events_before_a_timeline_begins_and_after_its_steps(tmp_path: Path) -> None:
    worker = Worker(0, tmp_path)
    assert not worker.events.has_readers(LaneBegan)
    worker.writer.begin(steps=2)
    assert worker.events.has_readers(LaneBegan)
    for _ in range(4):
        worker.step()
    assert not worker.events.has_readers(LaneBegan)
    (part,) = read_parts(tmp_path)
    assert {record.step for record in part.records if record.kind == "StepCommitted"} == {0, 1}


def test_a_part_is_read_up_to_the_line_in_which_its_worker_was_killed(tmp_path: Path) -> None:
    part = of_steps(tmp_path, *[(200, 10)] * 4)
    (path,) = (tmp_path / "timeline").iterdir()
    *whole, last = path.read_text().splitlines()
    path.write_text("\n".join([*whole, last[:9]]))
    (cut,) = read_parts(tmp_path)
    assert 0 < len(cut.records) < len(part.records)
    assert cut.records == part.records[: len(cut.records)]


def test_a_worker_that_is_killed_leaves_all_but_its_last_step_and_a_quarter_of_a_second(tmp_path: Path) -> None:
    worker = Worker(0, tmp_path)
    worker.writer.begin()
    for _ in range(40):
        worker.step()
    (left,) = read_parts(tmp_path)
    worker.writer.close()
    (whole,) = read_parts(tmp_path)
    assert left.records == whole.records[: len(left.records)]
    assert whole.records[-1].time_ns - left.records[-1].time_ns < (250 + 2 * 35) * MS


def test_lines_that_are_none_are_left_out() -> None:
    good = '[[5,"LaneEnded",0,[3]]]'
    bad = ["", "null", "[]", "[5]", '[[5,"LaneEnded",0]]', '[["5","LaneEnded",0,[3]]]', '[[5,"Nonsense",0,[3]]]', "{}"]
    part = parse_part([json.dumps(vars(HEAD)), *bad, good])
    assert part is not None
    assert [record.values for record in part.records] == [(3,)]
    assert parse_part(bad) is None
    assert parse_part([]) is None


def test_a_copy_of_a_worker_begins_a_part_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(0, tmp_path)
    worker.writer.begin()
    worker.step()
    monkeypatch.setattr(os, "getpid", lambda: 4242)
    worker.events.worker = 2
    worker.emit(1, Copied, 2)
    worker.step()
    worker.writer.close()
    first, second = read_parts(tmp_path)
    assert (first.head.worker, second.head.worker, second.head.pid) == (0, 2, 4242)
    assert {record.kind for record in first.records} > {"StepBegan", "WaitBegan"}
    assert [record.kind for record in second.records][:2] == ["Copied", "StepBegan"]


def test_of_a_long_run_the_newest_steps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "MOST_BYTES", 2000)
    monkeypatch.setattr(parts_module, "WRITE_EVERY_S", 0)
    worker = Worker(0, tmp_path)
    worker.writer.begin()
    for _ in range(50):
        worker.step()
    worker.writer.close()
    kept = [record.step for part in read_parts(tmp_path) for record in part.records if record.kind == "StepCommitted"]
    assert kept == list(range(kept[0], 50))
    assert 3 <= len(kept) < 20


def test_a_full_disk_ends_the_timeline_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(0, tmp_path)
    worker.writer.begin()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    worker.step()
    worker.step()
    (said,) = worker.said
    assert "No space left on device" in said
    assert "training goes on" in said
    assert not worker.events.has_readers(LaneBegan)


# -- spans and the trace ----------------------------------------------------------------------------------------------


def test_a_step_becomes_spans_on_the_tracks_of_its_worker(tmp_path: Path) -> None:
    spans = activities(of_steps(tmp_path, (20, 10))).spans
    took_ms = {span.kind: round(span.took_ns / MS) for span in spans if span.took_ns}
    assert took_ms == {
        SpanKind.STEP: 30, SpanKind.LANE: 20, SpanKind.BACKWARD: 10, SpanKind.FILL: 5, SpanKind.REDUCE: 15,
        SpanKind.WAIT: 10, SpanKind.WAIT_PART: 10, SpanKind.UPDATE: 3, SpanKind.DATA: 2,
    }  # fmt: skip
    assert all(span.is_whole for span in spans)


def test_the_trace_of_two_workers_keeps_to_the_format(tmp_path: Path) -> None:
    fast, slow = of_steps(tmp_path, (20, 30), (20, 30)), of_steps(tmp_path, (40, 10), (40, 10), worker=1)
    began_at = (fast.head.wall_ns - fast.head.monotonic_ns) / 1e9 + 9.0
    trace = make_trace([fast, slow], [LauncherMark("worker 1 started", 1, 0, began_at)])
    check_trace(trace)
    assert len(of_kind(trace, "launcher", "i")) == 1


def test_arrows_lead_from_the_worker_that_began_last_to_the_others(tmp_path: Path) -> None:
    fast, slow = of_steps(tmp_path, (20, 30)), of_steps(tmp_path, (40, 10), worker=1)
    trace = make_trace([fast, slow])
    (begin,) = of_kind(trace, "reduction", "s")
    (end,) = of_kind(trace, "reduction", "f")
    assert (begin["pid"], end["pid"]) == (3, 2)


def test_a_step_that_was_undone_is_cut_and_shown_again(tmp_path: Path) -> None:
    worker = Worker(0, tmp_path)
    worker.writer.begin()
    worker.emit(0, StepBegan)
    worker.emit(0, LaneBegan, 0, True)
    worker.emit(5, BackwardBegan)
    worker.emit(5, RecoveryBegan)
    worker.emit(100, GenerationFormed, 2, (0,), (1,), (), (), (1,), (0,), False, "", 0.1)
    worker.emit(0, LaneBegan, 0, True)
    worker.emit(10, LaneEnded, 0)
    worker.emit(0, StepCommitted, 8, None)
    worker.writer.close()
    (part,) = read_parts(tmp_path)
    shown = {(span.name, span.is_whole, span.generation, round(span.took_ns / MS)) for span in activities(part).spans}
    assert shown == {
        ("step 0", False, 1, 10), ("lane 0", False, 1, 10), ("backward", False, 1, 5), ("recovery", True, 2, 100),
        ("step 0 again", True, 2, 10), ("lane 0", True, 2, 10),
    }  # fmt: skip
    check_trace(make_trace([part]))


# -- clocks -----------------------------------------------------------------------------------------------------------


def shifted_part(part: Part, by_ns: int, wall_error_ns: int) -> Part:
    """The same part, written on another host whose clock differs by so much, and whose time of day by an error."""
    head = part.head
    other = replace(head, boot="boot-b", monotonic_ns=head.monotonic_ns + by_ns, wall_ns=head.wall_ns + wall_error_ns)
    return Part(other, tuple(record._replace(time_ns=record.time_ns + by_ns) for record in part.records))


@given(by_ns=st.integers(-(10**15), 10**15), wall_error_ns=st.integers(-(10**10), 10**10))
def test_clocks_of_two_hosts_come_together_to_within_the_shortest_reduction(
    tmp_path_factory: pytest.TempPathFactory, by_ns: int, wall_error_ns: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    here, there = of_steps(folder, (20, 30), (40, 10)), of_steps(folder, (20, 30), (40, 10), worker=1)
    there = replace(there, head=replace(there.head, wall_ns=here.head.wall_ns, monotonic_ns=here.head.monotonic_ns))
    far = shifted_part(there, by_ns, wall_error_ns)
    shift = shifts_ns([activities(here), activities(far)])["boot-b"]
    assert abs(shift + by_ns) <= min(abs(wall_error_ns), 20 * MS)


def test_processes_of_one_host_are_left_as_they_are(tmp_path: Path) -> None:
    here = of_steps(tmp_path, (20, 30))
    later = replace(here, head=replace(here.head, wall_ns=here.head.wall_ns + 10**9))
    assert set(shifts_ns([activities(here), activities(later)]).values()) == {0}


# -- the account ------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_step_add_up_to_it_and_name_whom_it_waited_for(tmp_path: Path) -> None:
    steps = ((20.0, 25.0),) * 3, ((40.0, 5.0),) * 3
    account = make_account([of_steps(tmp_path, *steps[0]), of_steps(tmp_path, *steps[1], worker=1)])
    assert account is not None
    assert account.steps == (2,)
    assert sum(account.parts_s.values()) == pytest.approx(account.step_s) == pytest.approx(0.050)
    assert {part: round(account.parts_s[part] * 1e3) for part in PARTS} == {
        "compute": 30, "waiting": 10, "communication": 5, "data": 2, "update": 3, "host": 0
    }  # fmt: skip
    assert account.waited_for == {1: 1}
    assert account.hidden_s == pytest.approx((0.005 + 0.010) / 2)
    assert advice(account).startswith("worker 1 takes 2.0 times as long for a lane")
    assert len(account_lines(account, "run")) <= 10


def test_steps_in_which_workers_came_or_went_are_left_out(tmp_path: Path) -> None:
    worker = Worker(0, tmp_path)
    worker.writer.begin()
    for number in range(5):
        if number == 3:
            worker.emit(0, RecoveryBegan)
            worker.emit(500, GenerationFormed, 2, (0,), (1,), (), (), (), (), False, "", 0.5)
        worker.step()
    worker.writer.close()
    (part,) = read_parts(tmp_path)
    account = make_account([part])
    assert account is not None
    assert account.num_left_out == 1
    assert account.step_s == pytest.approx(0.035)
    assert make_account([part], step=3) is None
