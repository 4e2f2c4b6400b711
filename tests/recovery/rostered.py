"""What workers of the tests of rosters run: one training, each in a process of its own that nobody launches.

The folder that is given says when to end (`stop`, a step), and shows where each worker is (`at-SLOT`). A worker may be
of another version (OTHER_VERSION), have a clock that is wrong (CLOCK_AHEAD_S), and be impatient (PATIENCE_S).
"""

import os
import sys
import time
from pathlib import Path

import torch
from training import Job, loader_of, make, train_step

import lockstep
from lockstep.elastic.roster import roster
from lockstep.run import terms

PACE_S = 0.03
BEYOND = 15
"""How many steps later than the present one a training may be asked to end: all workers learn of it before."""


def main(folder: Path, checkpoints: str | None) -> None:
    run = lockstep.start(lanes=6, seed=3)
    job, slot = Job(model="conv"), os.environ["LOCKSTEP_SLOT"]
    model, optimizer = make(job)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(job))
    if checkpoints is not None:
        run.checkpoints(checkpoints, every_steps=5)
    stop = None
    for _ in run.epochs(1_000_000):
        for batch in loader:
            train_step(run, job, model, optimizer, batch)
            here = folder / f"at-{slot}"
            here.with_suffix(".new").write_text(f"{run.step} {run.size}")
            here.with_suffix(".new").rename(here)
            stop = int(text) if (folder / "stop").exists() and (text := (folder / "stop").read_text()) else None
            if stop is None:
                time.sleep(PACE_S)
            if stop is not None and run.step >= stop:
                break
        if stop is not None and run.step >= stop:
            break
    (folder / f"digest-{slot}").write_text(f"{run.step} {run.digest()}")
    run.close()


def pretend() -> None:
    """This worker is of another version, or has another time, if a variable says so."""
    terms.VERSION = os.environ.get("OTHER_VERSION", terms.VERSION)
    ahead_s, right = float(os.environ.get("CLOCK_AHEAD_S", "0")), time.time
    time.time = lambda: right() + ahead_s
    roster.PATIENCE_S = float(os.environ.get("PATIENCE_S", roster.PATIENCE_S))


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend()
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
