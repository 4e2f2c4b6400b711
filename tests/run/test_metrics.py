"""What run.log is given is written once for every step, whoever is the first worker, to the file and to sinks."""

import json
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import launch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument, LockstepError
from lockstep.events import Events, GenerationFormed
from lockstep.observe import json_lines
from lockstep.observe.json_lines import append_line, newest_first
from lockstep.observe.metrics import FILE, MetricsLog, Written, cut_off, end_of, line_of
from lockstep.state.run_state import StepState

NUM_STEPS = 6


class FileSink:
    """As wandb: log(values, step=). Its file has the number of the worker that made it in its name."""

    def __init__(self, folder: Path, worker: int) -> None:
        self.path = folder / f"sink-{worker}"
        self.path.touch()

    def log(self, values: dict[str, float], step: int) -> None:
        with self.path.open("a") as file:
            print(step, *values.items(), file=file)

    def finish(self) -> None:
        with self.path.open("a") as file:
            print("finished", file=file)


def _train(folder: str, dies: str = "", steps: int = NUM_STEPS, resume: str = "", save: str = "") -> str:
    """Trains and logs twice after each step; worker 0 is killed in step 3, `dies` says where."""
    os.environ["LOCKSTEP_RUN_DIR"] = folder
    run = lockstep.start(lanes=4, seed=1)
    me, founder = run.guard.formation.own_slot, run.guard.formation.own_slot == 0

    def reach(moment: str) -> None:
        if founder and run._loop.step == 3 and dies == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    run.log_to(lambda: FileSink(Path(folder), me))
    if resume:
        run.resume(resume)
    data = torch.arange(24.0).view(8, 3) / 10
    for step in range(run.step, steps):
        if step == 0:
            run.log({"norm": model.weight.norm()})
        for x in run.lanes(data + step):
            run.backward(model(x).square().mean())
            reach("in the last lane")
        reach("before the call")
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": run.loss, "step squared": run.step**2})
        reach("between the calls")
        run.log({"norm": model.weight.norm()})
        reach("after the calls")
        if save and run.step == 4:
            run.save(save)
    return run.digest()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the file holds after a run of one worker that nothing disturbs."""
    folder = tmp_path_factory.mktemp("calm")
    on_workers(1, _train, str(folder))
    return (folder / FILE).read_text()


def _in_sinks(folder: Path) -> list[str]:
    lines = [line for path in folder.glob("sink-*") for line in path.read_text().splitlines()]
    return sorted(line for line in lines if line != "finished")


def _as_in_a_sink(text: str) -> list[str]:
    entries = [json.loads(line) for line in text.splitlines()]
    return sorted(" ".join(map(str, [entry.pop("step"), *entry.items()])) for entry in entries)


def test_every_call_is_a_line_under_the_number_of_steps_done(calm: str) -> None:
    entries = [json.loads(line) for line in calm.splitlines()]
    assert [entry["step"] for entry in entries] == [0, *sorted([*range(1, NUM_STEPS + 1)] * 2)]
    assert set(entries[0]) == {"step", "norm"}
    assert [entry["step squared"] for entry in entries if "loss" in entry] == [1, 4, 9, 16, 25, 36]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_file_is_the_same_on_any_number_of_workers_and_one_sink_is_made(
    tmp_path: Path, calm: str, num_workers: int
) -> None:
    on_workers(num_workers, _train, str(tmp_path))
    assert (tmp_path / FILE).read_text() == calm
    assert [path.name for path in tmp_path.glob("sink-*")] == ["sink-0"]
    assert _in_sinks(tmp_path) == _as_in_a_sink(calm)
    assert (tmp_path / "sink-0").read_text().endswith("finished\n")


@pytest.mark.parametrize("dies", ["in the last lane", "before the call", "between the calls", "after the calls"])
def test_when_the_worker_that_writes_is_killed_the_next_goes_on_and_nothing_is_there_twice(
    tmp_path: Path, calm: str, dies: str
) -> None:
    killed, *others = outcomes(3, _train, str(tmp_path), dies)
    assert killed.killed_by == signal.SIGKILL
    assert all(other.error is None for other in others), others
    assert (tmp_path / FILE).read_text() == calm
    assert sorted(path.name for path in tmp_path.glob("sink-*")) == ["sink-0", "sink-1"]
    assert _in_sinks(tmp_path) == _as_in_a_sink(calm)


def test_steps_that_a_resumed_run_trains_again_are_there_once(tmp_path: Path, calm: str) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    on_workers(2, _train, str(tmp_path), steps=5, save=checkpoint)
    before = (tmp_path / FILE).read_text()
    assert calm.startswith(before)
    assert json.loads(before.splitlines()[-1])["step"] == 5
    (tmp_path / FILE).write_text(before + line_of(9, {"loss": 0.5}) + "\n")
    on_workers(3, _train, str(tmp_path), resume=checkpoint)
    assert (tmp_path / FILE).read_text() == calm


EPOCHS_LOGGED = 3


def _train_and_log(folder: str, resume: str = "", save: int | None = None, last_step: int | None = None) -> None:
    """Logs at its top, at the head of each epoch, in the body, at the end of each epoch, and behind them."""
    os.environ["LOCKSTEP_RUN_DIR"] = folder
    run = lockstep.start(lanes=4, seed=1)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    loader = run.shard(DataLoader(TensorDataset(torch.arange(96.0).view(32, 3) / 50), batch_size=8, shuffle=True))
    if resume:
        run.resume(resume)
    run.log({"parameters": 4})
    for epoch in run.epochs(EPOCHS_LOGGED):
        run.log({"epoch": epoch})
        run.log({"again": epoch})
        for batch in loader:
            if run.step == last_step:
                run.close()
                return
            for (x,) in run.lanes(batch):
                run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": run.loss})
            if run.step == save and save % len(loader):
                run.save(f"{folder}/checkpoint")
        run.log({"done": epoch})
        if run.step == save:
            run.save(f"{folder}/checkpoint")
    if run.step != last_step:
        run.log({"test": 1.0})
    run.close()


@pytest.mark.parametrize(("saved", "reached"), [(2, 3), (4, 4), (4, 6), (6, 7), (12, 12), (12, None)])
def test_what_a_resumed_script_logs_again_is_there_once_and_what_it_logs_anew_is_there(
    tmp_path: Path, saved: int, reached: int | None
) -> None:
    """Of four steps an epoch, a checkpoint in the middle of one, at the end of one, or of the last one."""
    calm, folder = tmp_path / "calm", tmp_path / "run"
    on_workers(1, _train_and_log, str(calm))
    on_workers(2, _train_and_log, str(folder), save=saved, last_step=reached)
    on_workers(3, _train_and_log, str(folder), resume=str(folder / "checkpoint"))
    assert (folder / FILE).read_text() == (calm / FILE).read_text()


def _resume_and_log(folder: str, checkpoint: str) -> None:
    os.environ["LOCKSTEP_RUN_DIR"] = folder
    with lockstep.start(lanes=4, seed=1) as run:
        model = nn.Linear(3, 1)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1))
        run.resume(checkpoint)
        run.log({"resumed": 1})


def test_what_a_script_without_epochs_logs_where_it_was_resumed_is_written(tmp_path: Path) -> None:
    """Nothing shows that it does what it did before."""
    checkpoint = str(tmp_path / "checkpoint")
    on_workers(1, _train, str(tmp_path), steps=4, save=checkpoint)
    before = (tmp_path / FILE).read_text()
    on_workers(1, _resume_and_log, str(tmp_path), checkpoint)
    assert (tmp_path / FILE).read_text() == before + line_of(4, {"resumed": 1}) + "\n"


def test_a_run_that_begins_anew_in_the_same_folder_begins_a_new_file(tmp_path: Path, calm: str) -> None:
    (tmp_path / FILE).write_text(line_of(0, {"loss": 7.0}) + "\n" + line_of(3, {"loss": 7.0}) + "\n")
    on_workers(1, _train, str(tmp_path))
    assert (tmp_path / FILE).read_text() == calm


# -- under the launcher, where lost workers are replaced ----------------------------------------------------------

LAUNCHED = """
import os, signal
import torch
import lockstep
from torch.utils.data import DataLoader, TensorDataset

run = lockstep.start(lanes=4, seed=1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(TensorDataset(torch.arange(96.0).view(32, 3) / 50), batch_size=8, shuffle=True))

class Sink:
    def add_scalar(self, name, value, step):
        with open(f"sink-{os.getpid()}", "a") as file:
            print(step, (name, value), file=file)

run.log_to(Sink)
for epoch in run.epochs(5):
    run.log({"epoch": epoch})
    for batch in loader:
        for (x,) in run.lanes(batch):
            run.backward(model(x).square().mean())
            if run.is_first and run.step in DEATHS and not os.path.exists(f"died-{run.step}"):
                open(f"died-{run.step}", "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        run.log({"loss": run.loss})
"""


@pytest.mark.parametrize("how", ["--no-copies", "--copies"])
def test_replacements_go_on_with_the_metrics_where_those_before_were_killed(tmp_path: Path, how: str) -> None:
    written = {}
    for deaths in ((), (5, 11)):
        folder = tmp_path / str(len(deaths))
        with launch(folder, LAUNCHED.replace("DEATHS", str(deaths)), "-n", "3", how) as run:
            assert run.finish() == 0, run.shown()
        assert sorted(path.name for path in folder.glob("died-*")) == sorted(f"died-{step}" for step in deaths)
        written[deaths] = (run.run_dir / FILE).read_text()
        assert _in_sinks(folder) == _as_in_a_sink(written[deaths])
    assert written[()] == written[5, 11]
    assert len(written[()].splitlines()) == 5 + 20


# -- what is refused ----------------------------------------------------------------------------------------------


class Tracker:
    def track(self, value: float, name: str, step: int) -> None:
        seen.append((name, value, step))


class Metrics:
    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        seen.extend((name, value, step) for name, value in metrics.items())


class Failing:
    def add_scalar(self, name: str, value: float, step: int) -> None:
        raise ConnectionError("no network")


seen: list[tuple[str, float, int]] = []


@pytest.mark.parametrize("sink", [Tracker(), Metrics, lambda: Metrics()])
def test_a_sink_is_known_by_its_method(sink: Any) -> None:
    seen.clear()
    with lockstep.start() as run:
        run.log_to(sink)
        run.log({"loss": torch.tensor(0.5), "count": 3, "ok": True})
    assert seen == [("loss", 0.5, 0), ("count", 3, 0), ("ok", 1, 0)]


@pytest.mark.parametrize("sink", [logging.getLogger("here"), object(), None, "tensorboard"])
def test_what_is_no_sink_is_refused_with_what_is_one(sink: Any) -> None:
    with lockstep.start() as run, pytest.raises(BadArgument, match=r"add_scalar\(name, value, step\)"):
        run.log_to(sink)


def test_a_sink_that_fails_is_named_once_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with lockstep.start() as run:
        run.log_to(Failing())
        run.log_to(lambda: 5)
        run.log({"loss": 1.0})
        run.log({"loss": 2.0})
    result = capsys.readouterr().err
    assert result.count("could not be written to a Failing: ConnectionError: no network") == 1
    assert result.count("it has made a int") == 1


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"loss": None}, r"write run\.backward\(loss\)"),
        ({"loss": torch.zeros(2)}, r"a tensor \[2\]"),
        ({"loss": "low"}, "is 'low'"),
        ({"loss": [1.0]}, "is a list"),
        ({"step": 1}, 'not "step"'),
        ({1: 1}, "names"),
        (0.5, "takes a dict"),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(values: Any, why: str) -> None:
    with lockstep.start() as run, pytest.raises(BadArgument, match=why):
        run.log(values)


def test_a_lane_logs_nothing() -> None:
    with lockstep.start(lanes=2) as run:
        model = run.replicate(nn.Linear(1, 1))
        with pytest.raises(LockstepError, match=r"run\.log inside of run\.lanes"):
            for x in run.lanes(torch.ones(2, 1)):
                model(x).sum().backward()
                run.log({"loss": 1.0})


# -- the file by itself -------------------------------------------------------------------------------------------


@dataclass
class Someone:
    is_first: bool = False
    is_present: bool = True
    is_member: bool = True


def test_what_a_newcomer_logs_on_its_way_is_never_written(tmp_path: Path) -> None:
    """It has run the script from the top, and the others have logged that before."""
    events, newcomer = Events(), Someone(is_present=False)
    log = MetricsLog(tmp_path, newcomer, events, StepState(seed=0, num_lanes=1))
    log.log(8, {"epoch": 2})
    newcomer.is_present = newcomer.is_first = True  # the worker before it is lost in its first step
    events.emit(GenerationFormed, 3, (1,), (0,), (), (), (), (), False, "", 0.1, step=8)
    assert not (tmp_path / FILE).exists()
    log.log(9, {"loss": 0.5})
    assert (tmp_path / FILE).read_text() == '{"step": 9, "loss": 0.5}\n'


def _lines(path: Path, *steps: int) -> None:
    for step in steps:
        append_line(path, line_of(step, {"loss": float(step)}))


def test_the_end_of_the_file_is_its_last_step_and_how_many_lines_it_has(tmp_path: Path) -> None:
    path = tmp_path / FILE
    assert end_of(path) == Written()
    _lines(path, 1, 2, 2, 2)
    assert end_of(path) == Written(2, 3)
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert end_of(path) == Written(2, 3)
    _lines(path, 3)
    assert end_of(path) == Written(3, 1)


@pytest.mark.parametrize("block", [3, 40, 1 << 16])
def test_what_comes_after_a_call_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", block)
    path = tmp_path / FILE
    _lines(path, *range(50), 50, 50)
    some = ((60, 0, 52), (50, 2, 52), (50, 1, 51), (50, 0, 50), (49, 1, 50), (7, 9, 8), (7, 0, 7), (0, 0, 0))
    for step, calls, left in some:
        cut_off(path, Written(step, calls))
        assert [entry["step"] for _, entry in newest_first(path)] == [*range(50), 50, 50][:left][::-1]


def test_what_is_not_finite_is_null_in_the_file() -> None:
    assert (
        line_of(3, {"a": float("nan"), "b": float("-inf"), "c": 1.5}) == '{"step": 3, "a": null, "b": null, "c": 1.5}'
    )


def test_a_folder_that_is_gone_is_named_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_RUN_DIR", str(tmp_path / "run"))
    with lockstep.start() as run:
        (tmp_path / "run" / "finished.json").unlink(missing_ok=True)
        (tmp_path / "run").rmdir()
        run.log({"loss": 1.0})
        run.log({"loss": 2.0})
        (tmp_path / "run").mkdir()
    assert capsys.readouterr().err.count("the metrics of step 0 could not be written: No such file") == 1
