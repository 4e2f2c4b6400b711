"""What a failure carries, which one is told, and how."""

import json
import re
import select
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.errors import Disagreement, Misuse, WorkerLost
from lockstep.launch.channels.failure import (
    EXITED,
    KILLED,
    RAISED,
    Failure,
    Notice,
    clear_report,
    first_failure,
    note_of,
    read_report,
    report_path,
    write_report,
)
from lockstep.launch.channels.traceback_lines import Frame, is_users
from lockstep.launch.events import RunFailed
from lockstep.launch.supervision.messages import message
from lockstep.run import active

PACKAGE = Path(lockstep.__file__).parent
LOG = Path("runs/mnist-3/worker-2.log")
LOST = WorkerLost(rank=1, step=4, during="reduce", cause="closed")
words = st.text(st.characters(codec="utf-8"))
frames = st.builds(Frame, words, st.integers(0), words, words)
failures = st.builds(
    Failure,
    rank=st.integers(0, 64),
    step=st.none() | st.integers(0),
    kind=words,
    message=words,
    frames=st.lists(frames, max_size=3).map(tuple),
    secondary=st.booleans(),
    time_s=st.floats(0, 1e9),
    how=st.sampled_from([RAISED, KILLED, EXITED]),
    worker_id=st.text(),
    traceback=words,
)


def fail(exception: Exception, rank: int = 0, step: int | None = None) -> Failure:
    with pytest.raises(type(exception)) as caught:
        raise exception
    return Failure.of(caught.value, rank, step)


@given(failures)
def test_a_failure_survives_json(failure):
    assert Failure.from_json(failure.to_json()) == failure


def test_a_report_is_read_as_it_was_written(tmp_path):
    failure = fail(ValueError("bad sample 7"), rank=2, step=412)
    write_report(failure, tmp_path)
    assert read_report(tmp_path, 2) == failure


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"frames": [[1]]}'])
def test_a_damaged_report_counts_as_none(tmp_path, text):
    report_path(tmp_path, 0).write_text(text)
    assert read_report(tmp_path, 0) is None


def test_a_report_is_plain_json(tmp_path):
    write_report(fail(ValueError("bad sample 7"), step=3), tmp_path)
    fields = json.loads((tmp_path / "worker-0.failure.json").read_text())
    assert (fields["kind"], fields["message"], fields["step"]) == ("ValueError", "bad sample 7", 3)


@given(st.lists(failures, min_size=1))
def test_the_first_failure_is_the_earliest_that_has_its_cause_in_its_own_worker(many):
    first = first_failure(many)
    own = [failure for failure in many if not failure.secondary] or many
    assert first in own
    assert first.time_s == min(failure.time_s for failure in own)


def test_a_lost_worker_is_another_workers_failure():
    assert fail(LOST).secondary


def test_a_lost_worker_behind_another_error_is_still_another_workers_failure():
    def tidy_up_badly() -> None:
        try:
            raise LOST
        finally:
            raise KeyError("tidying up failed")

    with pytest.raises(KeyError) as caught:
        tidy_up_badly()
    assert Failure.of(caught.value, 0, None).secondary


def test_a_disagreement_is_the_failure_of_the_workers_that_disagree():
    disagreement = Disagreement(what="dtype", here=1, mine="float32", there=2, theirs="float64")
    assert not fail(disagreement, rank=1).secondary
    assert fail(disagreement, rank=0).secondary


def test_a_worker_is_known_to_its_peers_by_its_rank_now_and_to_people_by_its_slot():
    disagreement = Disagreement(what="dtype", here=1, mine="float32", there=0, theirs="float64")
    failure = Failure.of(disagreement, rank=2, step=5, rank_now=1)
    assert (failure.rank, failure.secondary) == (2, False)


def test_a_report_is_cleared_before_the_slot_is_given_to_another_process(tmp_path):
    write_report(fail(ValueError("yesterday"), rank=2), tmp_path)
    clear_report(tmp_path, 2)
    clear_report(tmp_path, 2)
    assert read_report(tmp_path, 2) is None


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/home/me/train.py", True),
        (str(PACKAGE / "programs/demo/train.py"), True),
        (str(PACKAGE / "strategies/replicated.py"), False),
        (json.__file__, False),
        ("<string>", False),
    ],
)
def test_a_file_is_the_users_unless_it_belongs_to_python_or_to_lockstep(file, users):
    assert is_users(file) is users


def test_the_frames_are_the_users_and_not_the_librarys():
    with pytest.raises(ValueError, match="property name") as caught:
        json.loads("{")
    failure = Failure.of(caught.value, 0, None)
    assert [(Path(frame.file).name, frame.source) for frame in failure.frames] == [
        ("test_failure.py", 'json.loads("{")')
    ]


def test_a_syntax_error_points_at_its_line():
    with pytest.raises(SyntaxError) as caught:
        compile("x = 1\ny = = 2\n", "train.py", "exec")
    assert Failure.of(caught.value, 0, None).frames[-1] == Frame("train.py", 2, "", "y = = 2")


class Broken(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise KeyError(f"bad sample {index}")


def test_an_error_in_a_data_loader_process_is_told_as_it_happened_there():
    batches = iter(DataLoader(Broken(), num_workers=1))
    with pytest.raises(KeyError) as caught:
        next(batches)
    failure = Failure.of(caught.value, 0, None)
    batches._shutdown_workers()  # else it happens whenever the traceback is collected, in some other test
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":  # its queue is closed: it ends by itself, a moment later
            thread.join(30)
    assert (failure.kind, failure.message) == ("KeyError", "'bad sample 0'")
    assert failure.frames[-1].function == "__getitem__"
    assert failure.frames[-1].source == 'raise KeyError(f"bad sample {index}")'


def failure_with(**fields: object) -> Failure:
    plain = {"rank": 2, "step": 412, "kind": "ValueError", "message": "bad sample 10442", "frames": ()}
    return Failure(**{**plain, "secondary": False, "time_s": 0.0, **fields})


def failure_message(failure: Failure, num_well: int, log_path: Path, num_failed_too: int = 0) -> str:
    """What the launcher says when this failure has ended the run."""
    return message(RunFailed(failure, (failure_with(),) * num_failed_too, "", num_well, str(log_path)))


def test_a_failure_is_told_with_its_place_the_others_and_the_log():
    frame = Frame(str(Path("train.py").absolute()), 57, "collate", "x = torch.stack(rows)")
    assert failure_message(failure_with(frames=(frame,)), 3, LOG).splitlines() == [
        "✗ worker 2 failed at step 412: ValueError: bad sample 10442",
        "    train.py:57  in collate     x = torch.stack(rows)",
        "  3 other workers were fine. Full log: runs/mnist-3/worker-2.log",
    ]


def test_a_worker_that_called_exit_is_told_with_the_code_the_line_and_the_step():
    with pytest.raises(SystemExit) as caught:
        sys.exit(3)
    failure = replace(Failure.of(caught.value, 1, 12), frames=(Frame(str(Path("train.py").absolute()), 57, "", ""),))
    assert failure_message(failure, 3, LOG).startswith("✗ worker 1 called sys.exit(3) at train.py:57, step 12\n")


def test_a_process_group_that_finds_no_variables_is_told_which_option_sets_them(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK") as caught:
        torch.distributed.init_process_group("gloo")
    assert "`lockstep run --torch-distributed` sets it" in failure_message(Failure.of(caught.value, 0, None), 0, LOG)


def test_a_worker_alone_has_no_others_to_tell_of():
    assert failure_message(failure_with(), 0, LOG).endswith("\n  Full log: runs/mnist-3/worker-2.log")


def test_workers_that_failed_for_their_own_reasons_are_not_called_fine():
    result = failure_message(failure_with(), 0, LOG, num_failed_too=3)
    assert "3 other workers failed too." in result
    assert "fine" not in result


def test_out_of_memory_is_said_where_the_kernel_says_it():
    killed = failure_with(how=KILLED, kind="SIGKILL", worker_id="pid 812", step=None, message="out of memory")
    assert failure_message(killed, 0, LOG).startswith("✗ worker 2 (pid 812) was killed by SIGKILL: out of memory\n")


@given(failures, st.integers(0, 9), st.integers(0, 9))
def test_no_failure_takes_more_than_six_lines(failure, others, too):
    printable = failure_with(frames=tuple(Frame("f.py", 1, "f", "x") for _ in failure.frames), message=failure.message)
    assert len(failure_message(printable, others, LOG, num_failed_too=too).splitlines()) <= 6


class Run:
    step = 3
    is_first = True


def test_a_second_run_in_one_process_is_a_misuse():
    first, second = Run(), Run()
    active.activate(first)
    try:
        with pytest.raises(Misuse, match="close it first"):
            active.activate(second)
    finally:
        active.deactivate(first)
    assert active.current() is None


def test_an_allocation_that_failed_tells_how_much_was_asked_for_and_how_much_was_free():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    message = Failure.of(caught.value, rank=1, step=3).message
    assert re.match(r"out of memory: 1048576\.0 GiB asked for, \d+\.\d GiB free on this host\. ", message)


def test_a_memory_error_of_python_tells_what_was_free():
    assert re.fullmatch(r"out of memory: \d+\.\d GiB free on this host", fail(MemoryError()).message)


def test_a_killed_worker_whose_id_is_not_known_is_named_by_its_slot_alone():
    killed = failure_with(how=KILLED, kind="SIGKILL", step=None, message="out of memory")
    assert failure_message(killed, 0, LOG).startswith("✗ worker 2 was killed by SIGKILL: out of memory\n")


def test_a_note_is_one_line_that_the_kernel_writes_whole():
    line = note_of("pid 7", "first\n\tsecond " + "é" * select.PIPE_BUF)
    assert (line[-1:], line.count(b"\n"), len(line) <= select.PIPE_BUF) == (b"\n", 1, True)
    notice = Notice.parsed(line.decode().rstrip("\n"))
    assert (notice.worker_id, notice.report, notice.note[:14]) == ("pid 7", None, "first second é")
    assert set(notice.note[13:]) == {"é"}
