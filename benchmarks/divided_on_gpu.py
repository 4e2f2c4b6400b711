"""Time and GPU memory of a step under the sharded strategies, of workers that share a GPU: a GPT with AdamW.

    python benchmarks/divided_on_gpu.py [WORKERS] [ROUNDS] [SAMPLES]

In each round (3) it starts `lockstep run -n WORKERS` (4) under each strategy, in turn, with batches of SAMPLES (8)
short texts: more of them need more memory for activations. It prints medians over all rounds: a step and its update
in ms, what a worker's tensors take at most, and what the GPU holds in all. The digests must be equal. DDP with
ZeroRedundancyOptimizer and FSDP2 are in `lockstep bench step --device cuda --strategy`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 14, 4
STRATEGIES = ("replicated", "sharded:optimizer", "sharded:gradients", "sharded:parameters")


def train(folder: Path, samples: int) -> None:
    """What each worker runs: it leaves what it has measured."""
    import torch

    import lockstep
    from lockstep.programs.models import count_parameters, gpt50m

    run = lockstep.start(seed=0)
    workload = gpt50m(samples)
    torch.manual_seed(0)
    model, batch = workload.make_model(), workload.make_batch(torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    run.replicate(model, optimizer)
    steps_ms, updates_ms, used_bytes = [], [], 0
    for number in range(STEPS):
        if number == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        began_s = time.perf_counter()
        for lane in run.lanes(batch):
            run.backward(workload.loss(model, lane))
        torch.cuda.synchronize()
        computed_s = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        updated_s = time.perf_counter()
        optimizer.zero_grad()
        free, total = torch.cuda.mem_get_info()
        if number >= WARM_UP:
            steps_ms.append(1e3 * (updated_s - began_s))
            updates_ms.append(1e3 * (updated_s - computed_s))
            used_bytes = max(used_bytes, total - free)
    found = {
        "parameters": count_parameters(model), "step_ms": statistics.median(steps_ms),
        "update_ms": statistics.median(updates_ms), "worker_bytes": torch.cuda.max_memory_allocated(),
        "gpu_bytes": used_bytes, "digest": run.digest(),
    }  # fmt: skip
    (folder / f"{run.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def measure(strategy: str, workers: int, samples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        words = ("run", "-n", str(workers), "--strategy", strategy, "--run-dir", f"{name}/run", __file__)
        command = [sys.executable, "-m", "lockstep", *words, "--train", name, str(samples)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        found = [json.loads((Path(name) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]
    return {key: max(one[key] for one in found) for key in found[0]}


def main(workers: int, rounds: int, samples: int) -> None:
    rows: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(rounds):
        for strategy in STRATEGIES:
            rows[strategy].append(measure(strategy, workers, samples))
    if len({row["digest"] for each in rows.values() for row in each}) != 1:
        sys.exit("the strategies disagree: nothing is compared")
    print(f"{rows['replicated'][0]['parameters'] / 1e6:.1f} million parameters, AdamW, {workers} workers on one GPU")
    for strategy, each in rows.items():
        middle = {key: statistics.median(row[key] for row in each) for key in each[0] if key != "digest"}
        worker, gpu = (middle[name] / 2**20 for name in ("worker_bytes", "gpu_bytes"))
        print(f"{strategy:20} step {middle['step_ms']:6.1f} ms, its update {middle['update_ms']:5.1f} ms, ", end="")
        print(f"a worker's tensors {worker:6.0f} MiB, the GPU {gpu:6.0f} MiB")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        given = [int(word) for word in sys.argv[1:4]]
        main(*(given + [4, 3, 8][len(given) :]))
