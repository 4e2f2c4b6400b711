"""What looking after a run's health costs: ways to fingerprint 25 MiB of state, and to see that gradients are finite.

    python benchmarks/fingerprint.py

One process, one thread. All ways of a table take turns; a ratio is that of one round, way ÷ first way of the table:
median of the rounds, and quartiles. The best time of all rounds stands beside it: others may use the cores.
"""

import math
import statistics
import time
from collections.abc import Callable

import torch

from lockstep.gradients.fingerprint import MOST_PARTS, fingerprints
from lockstep.gradients.finite import first_bad
from lockstep.programs.bench.report import quantile

MiB = 2**20
NUM_BYTES = 25 * MiB
ROUNDS = 25
SMALL = 1000

Ways = dict[str, Callable[[], object]]


def ways_to_fingerprint(state: torch.Tensor) -> Ways:
    words, halves = state.view(torch.int64), state.view(torch.int32)
    copy = torch.empty_like(state)
    ways: Ways = {
        "int64 sum, one part": words.sum,
        f"int64 sums of {MOST_PARTS} parts": lambda: words.view(MOST_PARTS, -1).sum(1),
        f"int64 sums of {MOST_PARTS} columns": lambda: words.view(-1, MOST_PARTS).sum(0),
        "int32 sum in int32": lambda: halves.sum(dtype=torch.int32),
        "int32 sum in int64": halves.sum,
        "copy": lambda: copy.copy_(state),
        "fingerprints, one tensor": lambda: fingerprints({"state": state}),
    }
    if hasattr(torch, "hash_tensor"):
        ways["torch.hash_tensor, int64"] = lambda: torch.hash_tensor(words)
        ways["torch.hash_tensor, float32"] = lambda: torch.hash_tensor(state)
    return ways


def ways_with_many_tensors(state: torch.Tensor) -> Ways:
    """The same bytes in many tensors: what each tensor costs beside its bytes."""
    named = {f"{number:04}": piece.clone() for number, piece in enumerate(state.chunk(SMALL))}
    return {
        "int64 sum, one part": lambda: [piece.view(torch.int64).sum() for piece in named.values()],
        "fingerprints": lambda: fingerprints(named),
        "first_bad": lambda: first_bad(named),
    }


def ways_to_see_finite(gradient: torch.Tensor) -> Ways:
    return {
        "sum": gradient.sum,
        "aminmax": lambda: torch.aminmax(gradient),
        "_foreach_norm, 2": lambda: torch._foreach_norm([gradient], 2),
        "_foreach_norm, inf": lambda: torch._foreach_norm([gradient], math.inf),
        "isfinite().all()": lambda: torch.isfinite(gradient).all(),
        "first_bad": lambda: first_bad({"gradient": gradient}),
    }


def time_rounds(ways: Ways) -> dict[str, list[float]]:
    """Milliseconds of every way in every round; the order turns around from round to round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            ways[name]()  # what the way before left in the caches is not this one's cost
            began = time.perf_counter()
            ways[name]()
            times[name].append(1000 * (time.perf_counter() - began))
    return {name: found[1:] for name, found in times.items()}  # the first round warms up


def print_table(title: str, ways: Ways) -> None:
    times = time_rounds(ways)
    first = next(iter(times.values()))
    print(f"\n{title}\n")
    print("| way | best ms | ratio |\n| --- | --: | --: |")
    for name, found in times.items():
        ratios = [mine / base for mine, base in zip(found, first, strict=True)]
        low, middle, high = quantile(ratios, 0.25), statistics.median(ratios), quantile(ratios, 0.75)
        print(f"| {name} | {min(found):.2f} | {middle:.2f} ({low:.2f}–{high:.2f}) |", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    state = torch.randn(NUM_BYTES // 4)
    print_table("25 MiB of float32, fingerprint", ways_to_fingerprint(state))
    print_table(f"25 MiB of float32 in {SMALL} tensors", ways_with_many_tensors(state))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gradient = torch.randn(NUM_BYTES // dtype.itemsize).to(dtype)
        print_table(f"25 MiB of {str(dtype).removeprefix('torch.')}, finite?", ways_to_see_finite(gradient))


if __name__ == "__main__":
    main()
