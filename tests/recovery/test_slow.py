"""Real workers of which one is slow: it is named with its cause, nobody is ended, and the bits are the same.

The short tests look at forked workers with a lookout whose windows are short. Those marked `soak` are whole launches.
"""

import os
import re
import select
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import Job, data, make
from workers import _place as take_place
from workers import all_values, fork, gather, on_workers

import lockstep
from lockstep.run.environments.lockstep_run import SLOT, STATUS_FD
from lockstep.run.launching.lookout import Lookout
from lockstep.run.launching.slowness import Slowness
from lockstep.run.launching.status import StatusPage

pytestmark = pytest.mark.timeout(170)

CAUSES = ["data", "compute", "other"]
LIMIT_S = 45.0
LOOK_S = 0.05
PAUSE_S = 0.03
"""How much longer the slow worker takes for a step."""


class Slowed(TensorDataset):
    """A data set that takes its time, once in each batch or so."""

    pause_s = 0.0

    def __getitem__(self, index: int) -> tuple:
        pause(self.pause_s / 16)  # the samples of a worker in a batch of 52, cut into 6 lanes for 3 workers
        return super().__getitem__(index)


def train(epochs: int, slow_in: str = "", lane_s: float = 0.0) -> str:
    """Trains 4 steps an epoch; gives the digest. Every lane takes `lane_s` longer than it needs."""
    job = Job(model="dropout")
    run = lockstep.start(lanes=6, seed=3)
    model, optimizer = make(job)
    run.replicate(model, optimizer)
    samples = Slowed(*data())
    samples.pause_s = PAUSE_S if slow_in == "data" else 0.0
    loader = run.shard(DataLoader(samples, batch_size=job.batch, shuffle=True))
    for _ in run.epochs(epochs):
        for batch in loader:
            for x, y in run.lanes(batch):
                pause(lane_s)
                burn(PAUSE_S / 2 if slow_in == "compute" else 0.0)
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            pause(PAUSE_S if slow_in == "other" else 0.0)
    return run.digest()


def pause(seconds: float) -> None:
    if seconds:
        select.select([], [], [], seconds)


def burn(seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def watched(epochs: int, slow_in: str = "", lane_s: float = 0.0, window_steps: int = 10) -> tuple[list[str], list[str]]:
    """Trains on three workers, of which worker 1 may be slow; gives their digests, and what the lookout said."""
    said: list[str] = []
    with StatusPage() as page:
        workers = founders(page, epochs, slow_in, lane_s)
        crew = SimpleNamespace(
            running={slot: SimpleNamespace(pid=pid, group=pid) for slot, (pid, _) in enumerate(workers)}, row=page.row
        )
        lookout = Lookout(crew, Path(), said.append, Slowness(window_steps, window_s=0.2))
        readers = [reader for _, reader in workers]
        try:
            while not select.select(readers, [], [], LOOK_S)[0]:  # until the first has done its job
                assert lookout.look(time.monotonic()) == []
        finally:
            outcomes = gather(workers, LIMIT_S)
    return all_values(outcomes), said


def founders(page: StatusPage, epochs: int, slow_in: str, lane_s: float) -> list[tuple[int, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return [
            fork(
                partial(stand, slot, listener, page), LIMIT_S, train, (epochs, slow_in if slot == 1 else "", lane_s), {}
            )
            for slot in range(3)
        ]


def stand(slot: int, listener: socket.socket, page: StatusPage) -> None:
    take_place(slot, 3, listener)
    os.environ |= {SLOT: str(slot), STATUS_FD: str(page.fd)}


@pytest.fixture(scope="module")
def undisturbed():
    return on_workers(1, train, 15)[0]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_slow_worker_is_named_with_its_cause_and_the_bits_stay_the_same(cause, undisturbed):
    digests, said = watched(15, slow_in=cause)
    (told,) = said
    assert re.match(rf"! worker 1 is slow: [\d.]+ times the others for \d+ steps, in {cause} \(", told)
    assert digests == [undisturbed] * 3


def test_a_run_without_a_slow_worker_says_nothing(undisturbed):
    digests, said = watched(15, lane_s=PAUSE_S / 4, window_steps=15)
    assert said == []
    assert digests == [undisturbed] * 3


# -- whole launches ------------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys
sys.path[:0] = {paths!r}
import test_slow
slow = os.environ["LOCKSTEP_SLOT"] == "1"
print("digest", test_slow.train({epochs}, {cause!r} if slow else "", test_slow.PAUSE_S / 4), flush=True)
"""
TESTS = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'lockstep'; from lockstep.cli.main import main; main()"]


def launch(folder: Path, epochs: int, cause: str) -> str:
    """All that a launch of three workers shows."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(paths=[str(TESTS), str(TESTS / "recovery")], epochs=epochs, cause=cause))
    shown = subprocess.run(
        [*COMMAND, "run", "-n", "3", str(script)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(TESTS.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=160,
        check=True,
    )
    return shown.stdout


@pytest.mark.soak
@pytest.mark.parametrize("cause", ["", *CAUSES])
def test_a_launch_tells_of_its_slow_worker_alone(tmp_path, cause):
    shown = launch(tmp_path, 150, cause)
    assert f"digest {on_workers(1, train, 150)[0]}\n" in shown
    warnings = [line for line in shown.splitlines() if line.startswith("!")]
    if cause:
        (told,) = warnings
        assert re.match(rf"! worker 1 is slow: [\d.]+ times the others for \d+ steps, in {cause} \(", told)
    else:
        assert warnings == []
