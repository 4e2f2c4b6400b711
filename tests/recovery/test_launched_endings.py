"""How whole runs under the launcher end, and start, when one worker goes its own way."""

import pytest
from launched import launched_script

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
    script = training("if rank == 1 and run.step == 12: sys.exit(3)")
    line = 1 + script.splitlines().index("    if rank == 1 and run.step == 12: sys.exit(3)")
    with launched_script(tmp_path, script, "-n", "3") as run:
        run.process.wait(60)
        told = run.wait_for("^✗ ")
        assert run.process.returncode == 1, run.shown()
    story = [line for _, line in run.lines[told:]]
    assert story[0] == f"✗ worker 1 called sys.exit(3) at train.py:{line}, step 12"
    assert story[-1].startswith("  2 other workers were fine. Full log: ")
