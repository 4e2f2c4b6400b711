"""Replacement by a copy: what is written once, and what stands against it."""

from pathlib import Path

import pytest
from launches import launch

SCRIPT = """
import gc
import torch
from torch import nn
import lockstep

run = lockstep.start(lanes=3, seed=0)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.replicate(model, optimizer)
begun = open(f"begun-{{run.size}}", "a")
begun.write("before the training\\n")  # stands in a buffer
{then}
while run.step < 8:
    for x in run.lanes(torch.ones(6, 4)):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
begun.close()
"""


FOR_PROFILERS = """
import atexit, os
path = f"/tmp/perf-{os.getpid()}.map"
atexit.register(os.unlink, path)
told = open(path, "w+")
"""


@pytest.mark.parametrize(
    "then", ["", "gc.collect(); gc.freeze()", FOR_PROFILERS], ids=["plainly", "frozen", "for profilers"]
)
def test_what_stands_in_a_buffer_when_a_process_is_copied_is_written_once(tmp_path: Path, then: str) -> None:
    with launch(tmp_path, SCRIPT.format(then=then), "-n", "3", LOCKSTEP_FAULT="kill 1 at 3") as run:
        assert run.finish() == 0, run.shown()
    assert "worker 1 is new at step" in run.shown()
    assert "cannot be copied" not in run.shown()
    assert (tmp_path / "begun-3").read_text().splitlines() == ["before the training"] * 2, run.shown()


THREADS_AT_ONCE = """
import threading
outcomes, all_are_there = [], threading.Barrier(24)
def compute():
    all_are_there.wait()
    outcomes.append(torch.ones(100_000).sum().item())
computing = [threading.Thread(target=compute) for _ in range(24)]
for thread in computing: thread.start()
for thread in computing: thread.join()
assert outcomes == [100_000.0] * 24
"""

RENEWED = """
import os
asked, set_num_threads = [], torch.set_num_threads
def noted(number):
    asked.append(os.getpid())
    set_num_threads(number)
torch.set_num_threads = noted
original = os.getpid()
"""


def test_threads_of_a_copy_may_compute_at_once(tmp_path: Path) -> None:
    """torch fails in some of them (one time in twenty, so the second half is what shows it) without a new pool."""
    script = SCRIPT.format(then=RENEWED) + THREADS_AT_ONCE + "assert original == os.getpid() or os.getpid() in asked\n"
    with launch(tmp_path, script, "-n", "3", LOCKSTEP_FAULT="kill 1 at 3") as run:
        assert run.finish() == 0, run.shown()
    assert "worker 1 is new at step" in run.shown()
    assert "cannot be copied" not in run.shown()


OBSTACLES = {
    # A fork of a process that has computed with threads may hang in its first step with two (seen in the tests' own).
    "torch.set_num_threads(2)": "it computes with 2 threads",
    "import threading\nthreading.Thread(target=threading.Event().wait, name='mine', daemon=True).start()": (
        "it has a thread of its own, 'mine'"
    ),
    "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])": "it has a child process (sleep 1000)",
    "import socket\nends = socket.socketpair()": "it has a network connection of its own",
    "both = open('both', 'w+')": "it reads and writes ",
}


@pytest.mark.parametrize("then", OBSTACLES)
def test_what_stands_against_a_copy_is_named_and_a_new_process_takes_the_place(tmp_path: Path, then: str) -> None:
    with launch(tmp_path, SCRIPT.format(then=then), "-n", "2", LOCKSTEP_FAULT="kill 1 at 3") as run:
        assert run.finish() == 0, run.shown()
    assert f"worker 0 cannot be copied ({OBSTACLES[then]}" in run.shown()
    assert "a new process takes the place of one lost" in run.shown()
