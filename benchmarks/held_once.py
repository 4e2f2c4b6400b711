"""The memory of a host under each strategy, in PSS: a GPT of 50 million parameters with AdamW. Shared pages count once.

    python benchmarks/held_once.py [WORKERS]

For each strategy it starts `lockstep run -n WORKERS` (4), trains a few steps, and prints what all workers hold
together at the end of a forward pass, with the ratio to `replicated`, beside what `lockstep explain memory` says
before. Freed memory that the C library keeps is returned first. DDP is not there: on one host it holds what
`replicated` holds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

MODEL = "gpt50m"
STEPS = 3
RETURNED = {"MIMALLOC_PURGE_DELAY": "0"}
"""The allocator of torch on Arm, which cannot be asked to return memory later."""


def train(folder: Path) -> None:
    """What each worker runs: it leaves its memory after the last step."""
    import torch

    import lockstep
    from lockstep.programs.models import count_parameters, gpt50m
    from lockstep.wire.shared.once import return_freed_memory

    run = lockstep.start(seed=0, device="cpu")
    workload = gpt50m()
    torch.manual_seed(0)
    model, batch = workload.make_model(), workload.make_batch(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    run.replicate(model, optimizer)
    pss_bytes = 0
    for step in range(STEPS):
        for lane in run.lanes(batch):
            loss = workload.loss(model, lane)
            if step == STEPS - 1:
                return_freed_memory()
                pss_bytes = psutil.Process().memory_full_info().pss
            run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    found = {"parameters": count_parameters(model), "pss_bytes": pss_bytes, "digest": run.digest()}
    (folder / f"{run.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def measure(strategy: str, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run("run", "-n", str(workers), "--strategy", strategy, "--run-dir", str(folder), __file__, "--train", name)
        found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]
    return {**found[0], "pss_bytes": sum(one["pss_bytes"] for one in found)}


def predict(strategy: str, workers: int) -> int:
    """What all workers will hold together when gradients have not begun to arrive."""
    words = ("explain", "memory", "--model", MODEL, "-n", str(workers), "--strategy", strategy, "--json")
    account = json.loads(_run(*words))[strategy]
    arriving = next(part for part in account["parts"] if part["name"] == "gradients that arrive")
    return int(account["host_bytes"]) - workers * int(arriving["each_bytes"])


def _run(*words: str) -> str:
    command = [sys.executable, "-m", "lockstep", *words]
    done = subprocess.run(command, env=os.environ | RETURNED, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def main(workers: int) -> None:
    names = ("replicated", "sharded:optimizer", "sharded:gradients", "sharded:parameters")
    rows = {strategy: measure(strategy, workers) for strategy in names}
    if len({row["digest"] for row in rows.values()}) != 1:
        sys.exit("the strategies disagree: nothing is compared")
    whole = rows["replicated"]["pss_bytes"]
    print(f"{rows['replicated']['parameters'] / 1e6:.1f} million parameters, AdamW, {workers} workers")
    for strategy, row in rows.items():
        held, said = row["pss_bytes"], predict(strategy, workers)
        print(f"{strategy:20} {held / 2**20:6.0f} MiB  {held / whole:.2f}", end="   ")
        print(f"explained {said / 2**20:6.0f} MiB  {said / held:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
