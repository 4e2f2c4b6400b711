"""Every measurement of noise is a line of the record, whoever writes it; what cannot be written ends no training."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import small_disk
from hypothesis import example, given
from hypothesis import strategies as st
from measured_noise import measured
from torch import nn
from workers import on_workers, outcomes

import lockstep
from lockstep.events import Closed, NoiseMeasured, StepBegan
from lockstep.observe.recorder import FILE, Recorder, event_of, line_of
from lockstep.optim.noise import Measured, NoiseScale


def recorder(folder: Path, said: list[str] | None = None) -> Recorder:
    return Recorder(folder, lambda: True, [].append if said is None else said.append)


def lines_in(folder: Path) -> list[str]:
    return (folder / FILE).read_text().splitlines()


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in lines_in(folder)]


def test_every_measurement_is_a_line_and_other_events_are_none(tmp_path: Path) -> None:
    record = recorder(tmp_path)
    for event in (StepBegan(step=1), measured(1), measured(2), Closed(step=2)):
        record(event)
    assert steps_in(tmp_path) == [1, 2]


def test_a_line_has_the_numbers_and_what_follows_from_them(tmp_path: Path) -> None:
    recorder(tmp_path)(measured(7, lanes=4))
    result = json.loads(lines_in(tmp_path)[0])
    assert (result["step"], result["lanes"], result["optimizer"], result["preconditioned"]) == (7, 4, "sgd", None)
    assert (result["plain"]["critical_batch"], result["plain"]["sure"], result["plain"]["batch"]) == (812, True, 256)


def test_what_is_infinite_is_null_in_the_record() -> None:
    nothing_known = NoiseScale().noise
    result = json.loads(line_of(measured(1, nothing_known)))["plain"]
    assert (result["high"], result["critical_batch"], result["low"]) == (None, None, 0.0)


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=30), st.sampled_from(["sgd", "adam", ""])
)
@example([(0.0, 450532.0), (3.2691008487748237e-302, 753362.0)], "sgd")  # both ends of the interval are infinite
def test_a_line_is_read_back_as_what_was_measured(estimates: list[tuple[float, float]], optimizer: str) -> None:
    plain, other = NoiseScale(), NoiseScale(preconditioned=True)
    for step, pair in enumerate(estimates):
        plain.add(step, 64, Measured(*pair))
        other.add(step, 64, Measured(*pair))
    event = NoiseMeasured(8, optimizer, plain.noise, other.noise if optimizer == "adam" else None, step=40)
    assert event_of(line_of(event)) == event


def _with(line: str, **changed: Any) -> str:
    return json.dumps({**json.loads(line), **changed})


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[]",
        "{}",
        line_of(measured())[:-1],
        _with(line_of(measured()), step="7"),
        _with(line_of(measured()), step=True),
        _with(line_of(measured()), lanes=0),
        _with(line_of(measured()), optimizer="none such"),
        _with(line_of(measured()), optimizer=["sgd"]),
        _with(line_of(measured()), plain=None),
        _with(line_of(measured()), preconditioned=json.loads(line_of(measured()))["plain"]),
        line_of(measured()).replace('"low": ', '"low": 1e999, "was": '),
        line_of(measured()).replace('"low": ', '"low": NaN, "was": '),
        line_of(measured()).replace('"variance": ', '"variance": null, "was": '),
        line_of(measured()).replace('"count": ', '"count": 4.5, "was": '),
        line_of(measured()).replace('"batch": ', f'"batch": 1{"0" * 400}, "was": '),
        b"\xff",
    ],
)
def test_a_line_that_tells_no_measurement_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever JSON or a number has against it
        event_of(line)


def test_half_a_line_of_a_killed_worker_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(line_of(measured(1)) + "\n" + line_of(measured(2))[:50])
    recorder(tmp_path)(measured(2))
    whole = [event_of(line).step for line in lines_in(tmp_path) if line.endswith("}")]
    assert whole == [1, 2]
    assert len(lines_in(tmp_path)) == 3


def test_a_resumed_run_goes_on_in_the_same_record(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (2, 3, 4)):
        record = recorder(tmp_path)
        for step in steps:
            record(measured(step))
    assert steps_in(tmp_path) == [1, 2, 3, 2, 3, 4]


def test_a_worker_that_does_not_speak_writes_nothing_until_it_does(tmp_path: Path) -> None:
    speaks = [False]
    record = Recorder(tmp_path, lambda: speaks[0], lambda text: None)
    record(measured(1))
    assert not (tmp_path / FILE).exists()
    speaks[0] = True
    record(measured(2))
    assert steps_in(tmp_path) == [2]


def test_the_record_stays_in_the_run_folder_when_the_script_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    record = recorder(Path("run"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    record(measured(1))
    assert steps_in(tmp_path / "run") == [1]


def test_a_run_folder_that_is_gone_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    record = recorder(tmp_path / "gone", said)
    record(measured(1))
    (tmp_path / "gone").mkdir()
    record(measured(2))
    assert len(said) == 1
    assert "step 1" in said[0]
    assert "No such file or directory" in said[0]
    assert not (tmp_path / "gone" / FILE).exists()


def test_a_link_is_not_followed_out_of_the_run_folder(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).symlink_to(tmp_path / "other")
    recorder(tmp_path / "run", said)(measured(1))
    assert len(said) == 1
    assert not (tmp_path / "other").exists()


def _record_on_a_small_disk(folder: str) -> list[Any]:
    how = small_disk(folder)
    said: list[str] = []
    record = recorder(Path(folder), said)
    for step in range(500):
        record(measured(step))
    readable = [event_of(line).step for line in lines_in(Path(folder)) if line.endswith(("}}", "null}"))]
    return [how, said, readable]


def test_a_full_disk_is_told_once_and_what_was_written_before_can_be_read(tmp_path: Path) -> None:
    ((how, said, readable),) = on_workers(1, _record_on_a_small_disk, str(tmp_path))
    assert len(said) == 1
    assert how in said[0]
    assert f"the noise of step {len(readable)} could not be written" in said[0]
    assert readable == list(range(len(readable)))
    assert len(readable) > 50


def _emit(run: lockstep.Run, step: int) -> None:
    event = measured(step)
    run._events.emit(NoiseMeasured, event.num_lanes, event.optimizer, event.plain, event.preconditioned, step=step)


def _measure_in_a_run(folder: str) -> None:
    os.environ["LOCKSTEP_RUN_DIR"] = folder
    run = lockstep.start(lanes=4)
    for step in range(1, 4):
        _emit(run, step)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_run_records_each_measurement_once_on_any_number_of_workers(tmp_path: Path, num_workers: int) -> None:
    on_workers(num_workers, _measure_in_a_run, str(tmp_path))
    assert steps_in(tmp_path) == [1, 2, 3]


def _measure_where_worker_0_dies(folder: str) -> int:
    os.environ["LOCKSTEP_RUN_DIR"] = folder
    run = lockstep.start(lanes=4)
    founder = run.rank == 0
    model = run.replicate(nn.Linear(2, 1))
    for step in range(1, 6):
        for x in run.lanes(torch.ones(8, 2)):
            if founder and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(model(x).sum())
        _emit(run, step)
    return run.rank


def test_when_the_worker_that_records_is_lost_another_goes_on_with_the_record(tmp_path: Path) -> None:
    killed, other = outcomes(2, _measure_where_worker_0_dies, str(tmp_path))
    assert killed.killed_by == signal.SIGKILL
    assert other.value == 0, other.message
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]


def _measure_without_a_run_folder(folder: str) -> list[str]:
    os.chdir(folder)
    run = lockstep.start(lanes=4)
    _emit(run, 1)
    return os.listdir(folder)


def test_without_a_run_folder_nothing_is_written(tmp_path: Path) -> None:
    assert on_workers(1, _measure_without_a_run_folder, str(tmp_path)) == [[]]
