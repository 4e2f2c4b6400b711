"""How whole runs under the launcher end, and start, when one worker goes its own way."""

import os
import re
import shlex
import signal
import time

import pytest
from launched import launched, launched_command, launched_script

pytestmark = pytest.mark.timeout(120)

# Trains on a batch of its own, step by step. `at(step)` is what a test puts in the way.
TRAINING = """
import os, signal, sys, time
import torch
import lockstep
rank = int(os.environ["LOCKSTEP_RANK"])
{at_first}
run = lockstep.start(lanes=4)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.replicate(model, optimizer)
while run.step < {steps}:
    {at_each_step}
    for x in run.lanes(torch.ones(8, 2)):
        model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
run.print("digest", run.digest(), flush=True)
"""


def training(at_each_step: str = "pass", at_first: str = "", steps: int = 20) -> str:
    return TRAINING.format(at_each_step=at_each_step, at_first=at_first, steps=steps)


def test_a_worker_that_calls_exit_in_the_middle_of_training_is_the_one_that_is_told(tmp_path):
    script = training("if rank == 1 and run.step == 12: sys.exit(3)", steps=10**6)
    line = 1 + script.splitlines().index("    if rank == 1 and run.step == 12: sys.exit(3)")
    with launched_script(tmp_path, script, "-n", "3") as run:
        run.process.wait(60)
        result = run.wait_for("^✗ ")
        assert run.process.returncode == 1, run.shown()
    story = [line for _, line in run.lines[result:]]
    assert story[0] == f"✗ worker 1 called sys.exit(3) at train.py:{line}, step 12"
    assert story[-1].startswith("  2 other workers were fine. Full log: ")


def test_a_worker_that_exits_with_code_0_in_the_middle_of_training_is_lost_and_replaced(tmp_path):
    script = training(
        "if rank == 1 and run.step == 5 and not os.path.exists('left'): open('left', 'x').close(); os._exit(0)"
    )
    with launched_script(tmp_path, script, "-n", "3") as run:
        assert run.process.wait(60) == 0
        digest = run.lines[run.wait_for("^digest ")][1]
    assert "! worker 1 exited with code 0 at step 5, without closing its run" in run.shown()
    with launched_script(tmp_path, training(), "-n", "2") as calm:
        assert calm.lines[calm.wait_for("^digest ")][1] == digest


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_while_the_others_import_start_or_replicate_makes_all_start_again(tmp_path, victim):
    moments = ("before start", "in start", "in replicate")
    at_first = f"""
import lockstep.run.run, lockstep.run.start
from lockstep.run.start import gather_founders
def reach(moment):
    mark = os.path.join({str(tmp_path)!r}, "died " + moment)
    if rank == {victim} and not os.path.exists(mark):
        open(mark, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
def in_start(*given):
    reach("in start")
    return gather_founders(*given)
reach("before start")
lockstep.run.start.gather_founders = in_start
joined = lockstep.run.run.join
lockstep.run.run.join = lambda *given: reach("in replicate") or joined(*given)
"""
    with launched_script(tmp_path, training(at_first=at_first), "-n", "3") as run:
        run.process.wait(100)
        run.wait_for("^digest ")
        assert run.process.returncode == 0, run.shown()
    assert {path.name for path in tmp_path.glob("died *")} == {f"died {moment}" for moment in moments}
    assert run.shown().count("  no step was made yet: all 3 workers start again") == 3, run.shown()


def test_a_worker_that_others_wait_for_in_start_or_in_total_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.launch.supervision.hangs.PLACE_S", 2.0)  # in the launcher too, which is forked
    os.mkfifo(tmp_path / "orders")
    wait = "rank == 1 and open('orders').read()"
    script = training(at_first=wait, at_each_step=f"if run.step == 2: {wait}; run.total(1)", steps=3)
    with launched_script(tmp_path, script, "-n", "2") as run:
        in_start = run.wait_for("is late: ", within_s=60)
        (tmp_path / "orders").write_text("go on")
        in_total = run.wait_for("is late: ", after=in_start + 1, within_s=60)
        (tmp_path / "orders").write_text("go on")
        run.wait_for("^digest ")
    result = [line for _, line in run.lines]
    assert re.fullmatch(r"! lockstep.start is late: \d\.\d s", result[in_start])
    assert re.fullmatch(
        r"    waiting: 0 \(lockstep.start\)    missing: 1 \(sleeping, state S, has not called lockstep.start; "
        r"train.py:\d+ rank == 1 and open\('orders'\).read\(\)\)",
        result[in_start + 1],
    )
    assert re.fullmatch(r"! run.total at step 2 is late: \d\.\d s", result[in_total])
    assert re.match(
        r"    waiting: 0 \(run.total\)    missing: 1 \(sleeping, .*; train.py:\d+ if run", result[in_total + 1]
    )


def test_a_run_that_a_signal_ends_where_it_cannot_be_saved_says_so(tmp_path):
    script = training("run.step == 5 and run.print('at step 5', flush=True)", steps=10**9)
    with launched_script(tmp_path, script, "-n", "2") as run:
        run.wait_for("at step 5")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(30) == 130
        run.wait_for("nothing was saved: the script has come to no moment at which it could be")
    assert not any("to go on: " in line for _, line in run.lines)


def test_a_second_ctrl_c_ends_at_once_and_names_the_command_that_goes_on_from_the_newest_checkpoint(tmp_path):
    waits = "    if epoch == 6: run.print('in epoch 6', flush=True); time.sleep(60)"
    script = training().replace(
        "while run.step < 20:", f"run.checkpoints(every_steps=1)\nfor epoch in run.epochs(20):\n{waits}"
    )
    assert waits in script
    with launched_script(tmp_path, script, "-n", "2", "--checkpoints", "saved") as run:
        run.wait_for("in epoch 6")
        while not list((tmp_path / "saved").glob("step-*")):
            time.sleep(0.01)
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two signals that come together are one
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(30) == 130
        run.wait_for("nothing was saved: the second signal has ended the workers at once")
        run.wait_for("to go on from the newest checkpoint: lockstep run -n 2 --checkpoints saved .*--resume auto")


def test_the_command_that_ctrl_c_ends_with_goes_on_with_the_run_although_no_folder_was_named(tmp_path):
    with launched(tmp_path, "-n", "2", epochs=1000) as run:
        run.wait_for("^step 5 ")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(30) == 130
        result = run.wait_for("to go on: lockstep run ")
        assert re.search(r"saved as \S+$", run.lines[run.wait_for("saved as")][1])
    _, *words = shlex.split(run.lines[result][1].partition("to go on: ")[2])
    with launched_command(tmp_path, *words) as again:
        again.wait_for("going on from step-")
        first = again.wait_for("^step ")
        assert int(again.lines[first][1].split()[1]) > 5


def test_a_signal_in_an_epoch_whose_head_changes_a_teacher_says_that_it_cannot_go_on_from_there(tmp_path):
    script = f"""{training().partition("while")[0]}
from torch.utils.data import DataLoader, TensorDataset
teacher = run.replicate(torch.nn.Linear(2, 1))
loader = run.shard(DataLoader(TensorDataset(torch.ones(80, 2)), batch_size=8))
for epoch in run.epochs(1000):
    teacher.load_state_dict(model.state_dict())
    for batch in loader:
        for x, in run.lanes(batch):
            (model(x) - teacher(x)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and run.step == 15:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.01)
"""
    with launched_script(tmp_path, script, "-n", "2") as run:
        assert run.process.wait(60) == 130
        run.wait_for("saved as ")
        run.wait_for("the script changes the weights of model2 at the head of an epoch's body: a run that goes on from")
        _, *words = shlex.split(run.lines[run.wait_for("to go on: lockstep run ")][1].partition("to go on: ")[2])
    with launched_command(tmp_path, *words) as again:
        again.wait_for("the script has changed .*, which was restored")
