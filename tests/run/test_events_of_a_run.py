"""The events that a reader of one's own receives from a real run on two workers, with a loader and checkpoints."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import launch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers

import lockstep
from lockstep.events import CheckpointSaved, Event
from lockstep.state.checkpoints.folder import name_of

NUM_STEPS, NUM_LANES, NUM_BUCKETS = 4, 4, 4
ON_THE_WIRE = ("ReduceBegan", "ReduceDone")


def _observed(folder: str) -> list[dict[str, Any]]:
    """Trains four steps and closes the run; gives every event as its fields, in the order in which they came."""
    seen: list[dict[str, Any]] = []

    def keep(event: Event) -> None:
        plain = {name: value for name, value in vars(event).items() if isinstance(value, int | float | str)}
        if isinstance(event, CheckpointSaved):
            plain["is_on_disk"] = Path(event.path).is_dir()
        seen.append({"kind": type(event).__name__, "thread": threading.get_ident(), **plain})

    run = lockstep.start(lanes=NUM_LANES, bucket_bytes=1 << 20)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 100_000), nn.Linear(100_000, 3))  # each parameter fills a bucket
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    run.replicate(model, optimizer)
    run.checkpoints(folder, every_steps=3, resume="never")
    run._events.subscribe(keep)
    loader = run.shard(DataLoader(TensorDataset(torch.ones(8 * NUM_STEPS, 4)), batch_size=8))
    for _ in run.epochs(1):
        for batch in loader:
            for (x,) in run.lanes(batch):
                run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Of each of the two workers."""
    return on_workers(2, _observed, str(tmp_path_factory.mktemp("checkpoints")))


def _of_step(events: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    return [event for event in events if event["step"] == step]


def _places(events: list[dict[str, Any]], kind: str, **fields: Any) -> list[int]:
    wanted = {"kind": kind, **fields}
    return [place for place, event in enumerate(events) if wanted.items() <= event.items()]


def test_every_event_has_the_slot_of_its_worker_and_a_step(seen) -> None:
    for rank, events in enumerate(seen):
        assert {event["worker"] for event in events} == {rank}
        steps = [event["step"] for event in events if event["kind"] == "StepCommitted"]
        assert steps == list(range(NUM_STEPS))
        assert {event["step"] for event in events} == set(range(NUM_STEPS + 1))


def test_times_never_run_backwards_on_a_thread(seen) -> None:
    for events in seen:
        for thread in {event["thread"] for event in events}:
            times = [event["time_s"] for event in events if event["thread"] == thread]
            assert times == sorted(times)
            assert times[0] > 0


def test_a_step_is_loaded_begun_computed_awaited_and_committed_in_this_order(seen) -> None:
    for rank, events in enumerate(seen):
        lanes = (2 * rank, 2 * rank + 1)
        for step in range(NUM_STEPS):
            of_script = [
                (event["kind"], event.get("lane"))
                for event in _of_step(events, step)
                if event["kind"] in ("BatchLoaded", "StepBegan", "LaneBegan", "LaneEnded", "WaitEnded", "StepCommitted")
            ]
            assert of_script == [
                ("BatchLoaded", None),
                ("StepBegan", None),
                *((kind, lane) for lane in lanes for kind in ("LaneBegan", "LaneEnded")),
                ("WaitEnded", None),
                ("StepCommitted", None),
            ]


def test_a_bucket_is_filled_in_the_last_lane_then_reduced_and_awaited_until_the_commit(seen) -> None:
    for rank, events in enumerate(seen):
        for step in range(NUM_STEPS):
            found = _of_step(events, step)
            (last_lane,) = _places(found, "LaneBegan", lane=2 * rank + 1)
            (wait_ended,) = _places(found, "WaitEnded", wait="the end of a step")
            for bucket in range(NUM_BUCKETS):
                (filled,), (began,), (done,) = (
                    _places(found, kind, bucket=bucket) for kind in ("BucketFilled", "ReduceBegan", "ReduceDone")
                )
                (waits,) = _places(found, "WaitBegan", bucket=bucket, num_buckets=NUM_BUCKETS)
                assert last_lane < filled
                assert began < done < wait_ended
                assert filled < waits < wait_ended
            assert len(_places(found, "ReduceDone")) == NUM_BUCKETS


def test_only_the_reductions_come_from_another_thread_than_the_lanes(seen) -> None:
    for events in seen:
        (script,) = {event["thread"] for event in events if event["kind"] == "LaneBegan"}
        assert {event["kind"] for event in events if event["thread"] != script} == set(ON_THE_WIRE)


def test_a_commit_carries_the_samples_and_the_loss_that_all_workers_share(seen) -> None:
    commits = [[event for event in events if event["kind"] == "StepCommitted"] for events in seen]
    assert [commit["num_samples"] for commit in commits[0]] == [8] * NUM_STEPS
    assert [commit["loss"] for commit in commits[0]] == [commit["loss"] for commit in commits[1]]
    assert all(commit["loss"] > 0 for commit in commits[0])


def test_the_first_worker_alone_saves_a_checkpoint_which_is_on_disk_when_its_event_comes(seen) -> None:
    (place,) = _places(seen[0], "CheckpointSaved")
    saved = seen[0][place]
    assert Path(saved["path"]).name == name_of(3)
    assert saved["took_s"] > 0
    assert saved["is_on_disk"]
    assert _places(seen[0], "StepCommitted", step=2)[0] < place
    assert not _places(seen[1], "CheckpointSaved")


def test_the_run_ends_with_a_wait_for_the_others_after_it_was_closed(seen) -> None:
    for events in seen:
        last = [event["kind"] for event in events if event["step"] == NUM_STEPS]
        assert [kind for kind in last if kind != "CheckpointSaved"] == [
            "Closed", "WaitBegan", "WaitEnded",
        ]  # fmt: skip


NOTES = """
import os, lockstep
run = lockstep.start(lanes=2)
note, slot = run._events.note, run.rank
note(f"of {slot} alone", one_worker=True)
note(f"of {slot} for its log", one_worker=True, in_log=True)
note(f"of all, by {slot}")
if (child := os.fork()) == 0:
    note(f"of a child of {slot}", one_worker=True)
    os._exit(0)
os.waitpid(child, 0)
run.total(1)
"""


def test_a_note_that_holds_for_one_worker_is_shown_by_the_launcher_and_no_other(tmp_path: Path) -> None:
    with launch(tmp_path, NOTES, "-n", "2") as run:
        assert run.finish() == 0, run.shown()
    shown = sorted(line.removeprefix("  note: ") for line in run.lines if "note: " in line)
    assert shown == ["of 0 alone", "of 0 for its log", "of a child of 0", "of all, by 0", "worker 1: of 1 alone"]
