"""A script that takes checkpoints by itself, run by launchers that start everything again when a worker dies.

`python hosts_resuming.py FOLDER`: at step STEP worker 1 kills itself, once, as soon as there is a checkpoint. At its
end worker 0 writes digest and number of steps, and the step at which it began, to FOLDER/end.json.
"""

import json
import os
import signal
import sys
from pathlib import Path

from training import Job, loader_of, make, train_step

import lockstep

JOB = Job("conv", epochs=3)
STEP = 7
EVERY_STEPS = 3


def main(folder: Path) -> None:
    run = lockstep.start(lanes=8, seed=3)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(JOB))
    begun = run.checkpoints(folder / "checkpoints", every_steps=EVERY_STEPS, resume="auto")
    for _ in run.epochs(JOB.epochs):
        for batch in loader:
            if run.rank == 1 and run.step == STEP:
                die_once(folder)
            train_step(run, JOB, model, optimizer, batch)
    end = {"digest": run.digest(), "step": run.step, "begun": begun, "size": run.size}
    if run.rank == 0:
        (folder / "end.json").write_text(json.dumps(end))


def die_once(folder: Path) -> None:
    mark = folder / "died"
    if mark.exists():
        return
    while not list((folder / "checkpoints").glob("step-*")):  # the others wait for this worker, and worker 0 writes
        pass
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
