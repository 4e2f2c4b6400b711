"""A whole run, with a worker killed and replaced in the middle of it: nothing is unpickled, nothing listens outside."""

import os
import re

import psutil
import pytest
from launches import REPOSITORY, end_launch, start_lockstep

SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch
import lockstep
from training import Job, loader_of, make, train_step

unpickled = []
sys.addaudithook(lambda event, args: unpickled.append(args) if event.startswith("pickle.") else None)
run = lockstep.start(lanes=8, seed=3)
job = Job(model="conv")
model, optimizer = make(job)
run.replicate(model, optimizer)
loader = run.shard(loader_of(job))
run.checkpoints({folder!r}, every_steps=5)
killed = {folder!r} + ".killed"
for epoch in run.epochs(100000):
    for batch in loader:
        train_step(run, job, model, optimizer, batch)
        if run.step == 12 and run.rank == 1 and not os.path.exists(killed):
            open(killed, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    if os.path.exists(killed) and run.size == 3 and run.epoch > 20:
        print("ready", flush=True)
        break
if run.rank == 0:
    sys.stdin = open({go!r})
    sys.stdin.readline()
print("unpickled", len(unpickled), unpickled[:3], flush=True)
"""


@pytest.mark.timeout(120)
def test_a_run_with_a_replaced_worker_unpickles_nothing_and_listens_on_loopback_only(tmp_path):
    go = tmp_path / "go"
    os.mkfifo(go)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(REPOSITORY / "tests"), folder=str(tmp_path / "kept"), go=str(go)))
    words = ["run", "-n", "3", "--spares", "1", "--run-dir", str(tmp_path / "run"), str(script)]
    launcher = start_lockstep(*words, cwd=tmp_path)
    try:
        shown = ""
        assert launcher.stdout is not None
        while "ready" not in shown:
            shown += launcher.stdout.readline() or pytest.fail(f"the run ended early: {shown}")
        listening = _listening(psutil.Process(launcher.pid))
        go.write_text("\n")
        rest, _ = launcher.communicate(timeout=60)
    finally:
        end_launch(launcher)
    assert launcher.returncode == 0
    logs = "".join(log.read_text() for log in (tmp_path / "run").glob("worker-*.log"))
    assert re.findall(r"unpickled (\d+)", logs) == ["0"] * 3, logs + rest
    assert listening, "somebody must listen, or this test sees nothing"
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def _listening(launcher: psutil.Process) -> list[str]:
    processes = [launcher, *launcher.children(recursive=True)]
    found = [entry for process in processes for entry in process.net_connections(kind="inet")]
    return [entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN]
