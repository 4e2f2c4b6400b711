"""The memory of a host under each strategy, in PSS: a GPT of 50 million parameters with AdamW. Shared pages count once.

    python benchmarks/held_once.py [WORKERS]

For each strategy it starts `lockstep run -n WORKERS` (4), trains a few steps, and prints what all workers hold
together, with the ratio to `replicated`. DDP is not there: on one host it holds what `replicated` holds.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

STEPS = 4


def train(folder: Path) -> None:
    """What each worker runs: it leaves its memory after the last step."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import lockstep

    run = lockstep.start(seed=0, device="cpu")
    torch.manual_seed(0)
    width = 640
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(8192, width), nn.TransformerEncoder(block, 8), nn.Linear(width, 8192))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    run.replicate(model, optimizer)
    text = torch.randint(0, 8192, (8, 33))
    for _ in range(STEPS):
        for lane in run.lanes(text):
            run.backward(F.cross_entropy(model(lane[:, :-1]).flatten(0, 1), lane[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    memory = psutil.Process().memory_full_info()
    found = {"parameters": parameters, "pss_bytes": memory.pss, "digest": run.digest()}
    (folder / f"{run.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    run.total(0)  # the memory of all workers is there while each is measured


def measure(strategy: str, workers: int) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "--strategy", strategy]
        command += ["--run-dir", str(folder / "run"), __file__, "--train", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        found = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]
    return {**found[0], "pss_bytes": sum(one["pss_bytes"] for one in found)}


def main(workers: int) -> None:
    rows = {strategy: measure(strategy, workers) for strategy in ("replicated", "sharded:parameters")}
    if len({row["digest"] for row in rows.values()}) != 1:
        sys.exit("the strategies disagree: nothing is compared")
    whole = float(rows["replicated"]["pss_bytes"])
    print(f"{float(rows['replicated']['parameters']) / 1e6:.1f} million parameters, AdamW, {workers} workers")
    for strategy, row in rows.items():
        print(f"{strategy:20} {float(row['pss_bytes']) / 2**20:8.0f} MiB  {float(row['pss_bytes']) / whole:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
