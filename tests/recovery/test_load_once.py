"""Workers that are forked from the first one, which has loaded torch: see Note [Loaded once] in worker/load_once.py."""

import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import Launched, launched_command, launched_script
from launches import FORKING, IMPORTABLE

from lockstep.cli.run import continuation
from lockstep.launch.channels.control import Control, ControlLine
from lockstep.launch.host.signals import LauncherSignals
from lockstep.launch.job import Job
from lockstep.launch.pools import process
from lockstep.launch.pools.local_pool import LocalPool

pytestmark = pytest.mark.timeout(120)

# Each worker leaves the memory that it has written to, or has to itself, after a few steps.
TRAINING = """
import gc, os, sys
{at_first}
import torch
import lockstep
run = lockstep.start(lanes=3, seed=5)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
run.replicate(model, optimizer)
for number in range(5):
    for x in run.lanes(torch.randn(6, 8)):
        run.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    {at_each_step}
gc.collect()  # as Python does from time to time in a long run
lines = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
with open("own-" + os.environ["LOCKSTEP_SLOT"], "w") as file:
    file.write(lines["Private_Dirty"].split()[0])
run.print("digest", run.digest(), flush=True)
"""


def training(at_first: str = "", at_each_step: str = "pass") -> str:
    return TRAINING.format(at_first=at_first, at_each_step=at_each_step)


@contextmanager
def started_afresh(folder: Path, *options: str) -> Iterator[Launched]:
    """`lockstep run` of a script in the folder, in processes that are started and load torch, as a user's are."""
    (folder / "train.py").write_text(training())
    words = ("run", *options, "train.py")
    with launched_command(folder, *words, popen=subprocess.Popen, PYTHONPATH=IMPORTABLE) as run:
        yield run


def digest_of(run: Launched) -> str:
    assert run.process.wait(100) == 0, run.shown()
    return str(run.lines[run.wait_for("^digest ")][1])


def own_mib(folder: Path) -> list[int]:
    return [int(path.read_text()) // 1024 for path in sorted(folder.glob("own-*"))]


def test_workers_share_what_is_loaded_and_have_the_bits_of_those_that_load_it_each(tmp_path):
    with started_afresh(tmp_path, "-n", "3") as run:
        each, alone = digest_of(run), own_mib(tmp_path)
    with started_afresh(tmp_path, "-n", "3", "--strategy", "sharded:gradients") as run:
        once, forked = digest_of(run), own_mib(tmp_path)
    assert once == each
    assert len(alone) == len(forked) == 3
    assert max(forked) < 0.25 * min(alone), (forked, alone)


def test_a_worker_that_is_killed_while_it_loads_for_the_others_makes_all_start_again(tmp_path):
    with started_afresh(tmp_path, "-n", "3", "--load-once") as run:
        _worker_of(run).kill()
        digest_of(run)
    assert "no step was made yet: all 3 workers start again" in run.shown()
    assert len(own_mib(tmp_path)) == 3


def test_ctrl_c_while_torch_is_loaded_ends_the_run_and_no_process_is_left(tmp_path):
    with started_afresh(tmp_path, "-n", "3", "--load-once") as run:
        worker, began_s = _worker_of(run), time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(20) == 130, run.shown()
        assert not worker.is_running()
    assert own_mib(tmp_path) == []
    assert time.monotonic() - began_s < 20


def _worker_of(run: Launched) -> psutil.Process:
    """The only worker, which loads torch now."""
    launcher = psutil.Process(run.process.pid)
    while True:
        workers = [child for child in launcher.children() if "lockstep.launch.worker" in child.cmdline()]
        if len(workers) == 1 and any("libtorch" in mapped.path for mapped in workers[0].memory_maps()):
            return workers[0]
        time.sleep(0.02)


def test_a_variable_that_the_script_sets_after_torch_was_loaded_is_named(tmp_path):
    script = training(at_first="os.environ['TORCH_LOGS'] = '+dynamo'; os.environ['MY_OWN'] = '1'")
    with launched_script(tmp_path, script, "-n", "2", "--load-once") as run:
        run.wait_for("^digest ")
    assert "note: the script has set TORCH_LOGS after torch was loaded, which may be too late: set it" in run.shown()
    with launched_script(tmp_path, script, "-n", "2", "--no-load-once") as run:
        run.wait_for("^digest ")
    assert "too late" not in run.shown()


def test_what_lanes_keep_in_a_module_of_the_script_is_noted(tmp_path):
    """Modules that were loaded before the script are not looked at."""
    (tmp_path / "store.py").write_text("seen = 0\ndef count(loss):\n    global seen\n    seen = seen + 1\n")
    script = training(at_first="import store").replace("run.backward(", "store.count(x); run.backward(")
    with launched_script(tmp_path, script, "-n", "2", "--load-once") as run:
        run.wait_for("^digest ")
    assert "a lane keeps something for the next one, by `seen = seen + 1` (line 4) of store.py" in run.shown()


def test_where_loading_has_started_a_thread_each_worker_is_started_and_the_reason_is_said_once(tmp_path, monkeypatch):
    def load() -> None:
        import threading

        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()

    monkeypatch.setattr("lockstep.launch.worker.load_once.load", load)  # in the workers too, which are forked
    with launched_script(tmp_path, training(), "-n", "3", "--load-once") as run:
        assert run.process.wait(60) == 0
    said = "each worker loads torch for itself: 2 threads were there when torch was loaded"
    assert run.shown().count(said) == 1, run.shown()
    assert len(list(tmp_path.rglob("own-*"))) == 3


class OneFork:
    """The module os of a system that allows one process more; its first fork succeeds, and no other."""

    def __init__(self) -> None:
        self._has_forked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fork(self) -> int:
        if self._has_forked:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self._has_forked = True
        return os.fork()


def test_where_no_process_can_be_forked_each_worker_is_started(tmp_path, monkeypatch):
    """For worker 1 the process in between has no child; for worker 2 there is none in between."""
    monkeypatch.setattr("lockstep.launch.worker.fork.os", OneFork())  # in the workers too, which are forked
    with launched_script(tmp_path, training(), "-n", "3", "--load-once") as run:
        run.wait_for("^digest ")
        assert run.process.wait(60) == 0
    assert run.shown().count("each worker loads torch for itself: there may be no more processes") == 1, run.shown()
    assert "Traceback" not in (tmp_path / "runs" / "train-1" / "worker-0.log").read_text()
    assert len(own_mib(tmp_path)) == 3


def test_no_worker_is_started_for_one_that_the_lost_first_worker_had_to_fork(tmp_path, monkeypatch):
    """All start again then, or none."""
    monkeypatch.setattr(process, "subprocess", FORKING)
    # in the worker, which is forked
    monkeypatch.setattr("lockstep.launch.worker.load_once.load", lambda: time.sleep(60))
    (tmp_path / "train.py").write_text("")
    job = Job(str(tmp_path / "train.py"), tmp_path, num_workers=3, load_once=True)
    with LauncherSignals() as signals, LocalPool(job, lambda output: None, lambda text: None, signals) as pool:
        pool.start(3)
        pool.send(0, signal.SIGKILL)
        events = []
        while not events:
            events = pool.wait(1.0)
        for _ in range(5):
            assert pool.wait(0.1) == []
        assert [event.slot for event in events] == [0]
        assert dict(pool.running) == {}


def test_a_worker_that_cannot_be_forked_from_is_not_copied_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.launch.worker.fork.os", OneFork())
    mark = tmp_path / "died"
    at_each_step = (
        f"if number == 2 and run.rank == 1 and not os.path.exists({str(mark)!r}): "
        f"open({str(mark)!r}, 'x').close(); os.kill(os.getpid(), 9)"
    )
    with launched_script(tmp_path, training(at_each_step=at_each_step), "-n", "3") as run:
        killed = run.lines[run.wait_for("^digest ")][1]
        assert run.process.wait(60) == 0
    assert "cannot be copied (there may be no more processes): a new process takes" in run.shown()
    with launched_script(tmp_path, training(), "-n", "3") as run:
        assert run.lines[run.wait_for("^digest ")][1] == killed


@pytest.mark.parametrize(
    ("given", "strategy", "is_once"),
    [
        (None, None, False), (None, "replicated", False), (None, "sharded:optimizer", True), (True, None, True),
        (False, "sharded:optimizer", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_variable", [False, True])
def test_torch_is_loaded_once_under_a_sharded_strategy_or_where_it_is_asked_for(given, strategy, is_once, by_variable):
    inherited = {"LOCKSTEP_STRATEGY": strategy} if by_variable and strategy else {}
    job = Job("train.py", Path("runs"), strategy=None if by_variable else strategy, load_once=given)
    assert job.loads_once(inherited) is is_once
    words = {"--load-once", "--no-load-once"} & set(continuation(job).split())
    assert words == {None: set(), True: {"--load-once"}, False: {"--no-load-once"}}[given]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_that_is_killed_in_training_is_replaced_by_a_copy_as_others_are(tmp_path, victim):
    mark = tmp_path / "died"
    at_each_step = (
        f"if number == 2 and run.rank == {victim} and not os.path.exists({str(mark)!r}): "
        f"open({str(mark)!r}, 'x').close(); os.kill(os.getpid(), 9)"
    )
    with launched_script(tmp_path, training(at_each_step=at_each_step), "-n", "3", "--load-once") as run:
        killed = run.lines[run.wait_for("^digest ")][1]
    assert mark.exists()
    assert re.search(rf"worker {victim} \(pid \d+\) was killed by SIGKILL", run.shown())
    with launched_script(tmp_path, training(), "-n", "3") as run:
        assert run.lines[run.wait_for("^digest ")][1] == killed


def test_a_script_sees_the_variables_of_its_own_worker_alone(tmp_path):
    names = ("SLOT", "FORKS", "LISTEN_FD")
    show = f"print([os.environ.get('LOCKSTEP_' + name) for name in {names}], os.getsid(0) == os.getpid(), flush=True)"
    with launched_script(tmp_path, training(at_first=show), "-n", "2", "--load-once", "--run-dir", "run") as run:
        run.wait_for("^digest ")
    (line,) = [line for line in (tmp_path / "run" / "worker-1.log").read_text().splitlines() if "None" in line]
    assert line == "['1', None, None] True"


def test_a_worker_that_is_being_forked_when_all_are_ended_is_ended_too(tmp_path, monkeypatch):
    """Whether it has reported itself, or is about to."""
    monkeypatch.setattr(process, "subprocess", FORKING)
    monkeypatch.setattr("lockstep.launch.worker.load_once.load", lambda: None)  # in the worker, which is forked
    report = Control.report_started
    pids = tmp_path / "pids"

    def report_late(control: Control) -> None:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        report(control)

    monkeypatch.setattr(Control, "report_started", report_late)
    (tmp_path / "train.py").write_text("import time; time.sleep(60)")
    job = Job(str(tmp_path / "train.py"), tmp_path, num_workers=3, load_once=True)
    with LauncherSignals() as signals, LocalPool(job, lambda output: None, lambda text: None, signals) as pool:
        pool.start(3)
        while not pids.exists() or not pids.read_text().endswith("\n"):
            pool.wait(0.01)
    assert [pid for pid in pids.read_text().split() if psutil.pid_exists(int(pid))] == []


def test_a_forked_worker_that_nobody_follows_ends(tmp_path):
    line = ControlLine()
    control = Control(os.dup(line.worker_fd))
    line.close()
    pid = os.fork()
    if pid == 0:
        control.report_started()
        os._exit(0)
    control.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
