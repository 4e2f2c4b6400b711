"""What it brings to take all tensors together: LARS and LAMB with foreach and tensor by tensor, on 300 small tensors.

    python benchmarks/optimizers.py [--json]

Both sides take turns in one process, after it is shown that they agree. The ratio is loop ÷ foreach: median of the
rounds, and quartiles. torch's AdamW and SGD, which have the same two sides, stand beside them for scale.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from lockstep.optim.lamb import LAMB
from lockstep.optim.lars import LARS
from lockstep.programs.bench.report import quantile

NUM_TENSORS = 300
ROUNDS = 40
STEPS = 3

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LARS": lambda params, foreach: LARS(params, 0.1, weight_decay=1e-4, foreach=foreach),
    "LAMB": lambda params, foreach: LAMB(params, 1e-3, weight_decay=1e-2, foreach=foreach),
    "torch AdamW": lambda params, foreach: torch.optim.AdamW(params, 1e-3, weight_decay=1e-2, foreach=foreach),
    "torch SGD": lambda params, foreach: torch.optim.SGD(params, 1e-3, 0.9, weight_decay=1e-4, foreach=foreach),
}


def small_tensors(device: str) -> list[torch.Tensor]:
    """Weights of 16 × 16 and biases of 16, with gradients; the same at every call."""
    chance = torch.Generator().manual_seed(0)
    params = []
    for number in range(NUM_TENSORS):
        shape = (16, 16) if number % 2 else (16,)
        params.append(torch.randn(shape, generator=chance).to(device).requires_grad_())
        params[-1].grad = torch.randn(shape, generator=chance).to(device)
    return params


def sides_of(make: Callable[..., torch.optim.Optimizer], device: str) -> dict[str, torch.optim.Optimizer]:
    return {"foreach": make(small_tensors(device), True), "loop": make(small_tensors(device), False)}


def check_agreement(name: str, make: Callable[..., torch.optim.Optimizer], device: str) -> None:
    """Ten steps of both sides lead to the same place, to rounding."""
    sides = sides_of(make, device)
    for side in sides.values():
        for _ in range(10):
            side.step()
    ends = [side.param_groups[0]["params"] for side in sides.values()]
    if not all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(*ends, strict=True)):
        raise SystemExit(f"{name}: foreach and the loop disagree; nothing was timed")


def time_ms(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Milliseconds for a step, the work on the device included."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        optimizer.step()
    if device != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - begin) / STEPS * 1000


def compare(name: str, make: Callable[..., torch.optim.Optimizer], device: str) -> dict[str, Any]:
    """Median times of both sides, and the ratio with its quartiles."""
    check_agreement(name, make, device)
    sides = sides_of(make, device)
    for side in sides.values():
        time_ms(side, device)
    rounds = []
    for number in range(ROUNDS):
        order = list(sides) if number % 2 else list(sides)[::-1]
        rounds.append({side: time_ms(sides[side], device) for side in order})
    ratios = [times["loop"] / times["foreach"] for times in rounds]
    return {
        "optimizer": name,
        "device": device,
        "foreach_ms": statistics.median(times["foreach"] for times in rounds),
        "loop_ms": statistics.median(times["loop"] for times in rounds),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quantile(ratios, 0.25), quantile(ratios, 0.75)],
    }


def sentence(found: dict[str, Any]) -> str:
    low, high = found["ratio_quartiles"]
    return (
        f"{found['optimizer']:12} foreach {found['foreach_ms']:7.2f} ms  loop {found['loop_ms']:7.2f} ms  "
        f"ratio {found['ratio']:.2f}  ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="LARS and LAMB: all tensors together against one by one.")
    parser.add_argument("--device", default="cpu", help="cpu, or a device of torch such as cuda")
    parser.add_argument("--json", action="store_true", help="one JSON object for each optimizer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, make in OPTIMIZERS.items():
        found = compare(name, make, arguments.device)
        print(json.dumps(found) if arguments.json else sentence(found), flush=True)


if __name__ == "__main__":
    main()
