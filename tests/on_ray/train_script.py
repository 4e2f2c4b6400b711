"""A script of Ray Train whose function is a lockstep run: `python train_script.py '{"address": ..., ...}'`."""

import json
import os
import select
import sys
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from lockstep.ray import LockstepConfig


def train(config: dict[str, Any]) -> None:
    """Trains a fixed number of steps: slowly, so that it can be disturbed, until the test wants it to end."""
    from training import Job, loader_of, make, train_step

    import lockstep

    print("here is", os.environ["LOCKSTEP_SLOT"], "process", os.getpid(), flush=True)
    run = lockstep.start(lanes=8, seed=3)
    job = Job(model="conv")
    model, optimizer = make(job)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(job))
    for _ in run.epochs(config["epochs"]):
        for batch in loader:
            train_step(run, job, model, optimizer, batch)
            if not os.path.exists(f"{config['folder']}/hurry"):
                select.select([], [], [], config["pause_s"])
            run.print("step", run.step, "workers", run.size, flush=True)
    run.print("digest", run.digest(), run.step, flush=True)


def main() -> None:
    config = json.loads(sys.argv[1])
    ray.init(config["address"], runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
    every = "2 steps" if config["checkpoints"] else None
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=LockstepConfig(checkpoints=config["checkpoints"], checkpoint_every=every),
        scaling_config=ScalingConfig(num_workers=config["num_workers"]),
        run_config=RunConfig(storage_path=config["folder"], name="train", failure_config=FailureConfig(max_failures=4)),
    )
    print("fit has returned:", trainer.fit().error, flush=True)


if __name__ == "__main__":
    main()
