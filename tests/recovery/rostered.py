"""What workers of the tests of rosters run: one training, each in a process of its own that nobody launches.

The folder that is given says when to end (`stop`, a step), and shows where each worker is (`at-SLOT`).
"""

import os
import sys
import time
from pathlib import Path

import torch
from training import Job, loader_of, make, train_step

import lockstep

PACE_S = 0.01
BEYOND = 40
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
    while stop is None or run.step < stop:
        for _ in run.epochs(1_000_000):
            for batch in loader:
                train_step(run, job, model, optimizer, batch)
                here = folder / f"at-{slot}"
                here.with_suffix(".new").write_text(f"{run.step} {run.size}")
                here.with_suffix(".new").rename(here)
                time.sleep(PACE_S)
                stop = int(text) if (folder / "stop").exists() and (text := (folder / "stop").read_text()) else None
                if stop is not None and run.step >= stop:
                    break
            if stop is not None and run.step >= stop:
                break
    (folder / f"digest-{slot}").write_text(f"{run.step} {run.digest()}")
    run.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
