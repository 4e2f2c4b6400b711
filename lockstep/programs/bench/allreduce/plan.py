"""What an all-reduce benchmark measures, and the report that it makes from the times. Without torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import BadArgument
from lockstep.programs.bench.allreduce.sizes import named
from lockstep.programs.bench.launch import bench_launched
from lockstep.programs.bench.plan import CPU, BenchRecord
from lockstep.programs.bench.report import machine_line, ratios, spread, times_of
from lockstep.programs.bench.rounds import Follow
from lockstep.programs.tables import Columns, show_notes, show_table

if TYPE_CHECKING:
    from rich.console import Console

WORKER = "lockstep.programs.bench.allreduce.worker"

LOCKSTEP, GLOO, FLOOR = "lockstep", "gloo", "floor"
SIDES = (LOCKSTEP, GLOO, FLOOR)

SHARED = "shared"
"""What a run on one host uses: in place, in shared memory. All others are schedules of the catalogue, over Gloo."""

USUAL_SIZES = {"cpu": "4KiB..128MiB", "cuda": "64KiB..256MiB"}
"""By device. On a GPU, below 64 KiB, a reduction takes as long as starting its kernels."""

TENSORS = 4  # what each worker holds of one size: one for each side, and what the copy is made from


@dataclass(frozen=True)
class AllreducePlan(BenchRecord):
    """All sizes on one number of workers: one launch. Every round has one block of each side."""

    workers: int
    sizes: tuple[int, ...]
    algorithm: str
    rounds: int
    device: str = CPU

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise BadArgument(f"an all-reduce needs 2 workers or more, not {self.workers}")
        if self.device != CPU and self.algorithm != SHARED:
            raise BadArgument(
                f"--algorithm {self.algorithm} is for the CPU: leave it out, and the wire between GPUs is measured"
            )


def title_of(num_bytes: int, workers: int) -> str:
    return f"{named(num_bytes)} on {workers} workers"


def parse_algorithm(text: str) -> str:
    """The algorithm's name as the catalogue has it; refuses another with the names there are."""
    name = text.strip().replace("_", "-")
    if name == SHARED:
        return name
    from lockstep.programs.explain.schedules.catalogue import CATALOGUE  # takes seconds, and is seldom needed

    known = (SHARED, *CATALOGUE["all_reduce"])
    if name not in known:
        raise BadArgument(f"there is no algorithm {text!r}: choose one of {', '.join(known)}")
    return name


def make_plans(
    workers: Sequence[int], sizes: Sequence[int], algorithm: str, rounds: int, device: str = CPU
) -> tuple[AllreducePlan, ...]:
    """A plan for every number of workers, each with every size, each once; raises before anything runs."""
    each = tuple(dict.fromkeys(sizes))
    return tuple(AllreducePlan(count, each, algorithm, rounds, device) for count in dict.fromkeys(workers))


def check_memory(plans: Sequence[AllreducePlan], left_bytes: int | None) -> None:
    """Raises if the tensors of some size would not fit into the memory that is left, where that is known."""
    for plan in plans:
        largest = max(plan.sizes)
        needed = plan.workers * TENSORS * largest
        if left_bytes is not None and needed > left_bytes:
            raise BadArgument(
                f"--sizes {named(largest)} needs {needed / 2**30:.1f} GiB on {plan.workers} workers, {TENSORS} tensors "
                f"each, and {left_bytes / 2**30:.1f} GiB are free: give smaller sizes, or fewer workers"
            )


def crowding(plans: Sequence[AllreducePlan], num_cores: int) -> str | None:
    """The warning that some plan has more workers than there are cores, or None."""
    crowded = [str(plan.workers) for plan in plans if plan.workers > num_cores]
    if not crowded:
        return None
    return (
        f"! {' and '.join(crowded)} workers share {num_cores} cores: they wait for each other's turn, and the times "
        "say little about a machine with a core for each"
    )


def bench_allreduce(
    plans: Sequence[AllreducePlan], follow: Follow, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Measures every plan, one after the other; returns the report. `variables` are for workers. Main thread only."""
    measured = bench_launched(plans, WORKER, follow, threads=1, environment=variables or {}, is_run=False)
    about = {"algorithm": plans[0].algorithm, "device": plans[0].device, "mps": bool(variables)}
    return {"bench": "allreduce", **measured, **about}


def make_row(
    workers: int,
    num_bytes: int,
    rounds: Sequence[Mapping[str, float]],
    p95: Mapping[str, float],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    """One size: medians over rounds, ratios, and the rounds themselves, in ms per operation and of the slowest worker.

    `p95` is of each side's single operations, and `counts` how many of them a block has.
    """
    row = {"workers": workers, "bytes": num_bytes, "rounds": len(rounds), **times_of(rounds, SIDES)}
    times = row["rounds_ms"]
    return {
        **row,
        "lockstep_p95_ms": p95[LOCKSTEP],
        "gloo_p95_ms": p95[GLOO],
        "bandwidth_gb_per_s": num_bytes / row["lockstep_ms"] / 1e6,  # whatever had to be moved for it
        "gloo_bandwidth_gb_per_s": num_bytes / row["gloo_ms"] / 1e6,
        **spread("ratio_to_gloo", ratios(times[GLOO], times[LOCKSTEP]), low=0.25, high=0.75),
        "ratio_to_floor": row["lockstep_ms"] / row["floor_ms"],
        "repetitions": counts,
    }


def short(value: float) -> str:
    """Three digits that matter, as far as five decimals hold them, and no exponent: 0.00123, 1.23, 12.3, 1,234."""
    decimals = 2 - math.floor(math.log10(value))
    return f"{value:,.{min(5, max(0, decimals))}f}"


def _ratio_cell(row: dict[str, Any]) -> str:
    middle, low, high = (short(row[f"ratio_to_gloo{end}"]) for end in ("", "_low", "_high"))
    return f"{middle} [dim]({low}–{high})[/dim]"


COLUMNS: Columns = (
    ("workers", lambda row: str(row["workers"])),
    ("size", lambda row: named(row["bytes"])),
    ("lockstep\nms", lambda row: short(row["lockstep_ms"])),
    ("\np95", lambda row: short(row["lockstep_p95_ms"])),
    ("Gloo\nms", lambda row: short(row["gloo_ms"])),
    ("\np95", lambda row: short(row["gloo_p95_ms"])),
    ("floor\nms", lambda row: short(row["floor_ms"])),
    ("\nGB/s", lambda row: short(row["bandwidth_gb_per_s"])),
    ("Gloo ÷ lockstep\n(quartiles)", _ratio_cell),
    ("lockstep\n÷ floor", lambda row: short(row["ratio_to_floor"])),
)
MEANING = (
    "All-reduce of float32 in place, algorithm {algorithm}. Milliseconds of the slowest worker:\n"
    "medians over rounds, and p95 of single operations. Gloo ÷ lockstep, made within rounds, says how\n"
    "many times faster. Floor: every worker copies as many bytes, at the same time. GB/s is lockstep's.\n"
)
MEANING_ON_GPU = (
    "All-reduce of float32 in place on the GPU, back to back. Milliseconds of one, on the slowest worker:\n"
    "medians over blocks, and p95 of blocks. Gloo ÷ lockstep, made within rounds, says how many times\n"
    "faster. Floor: 2·W·P bytes at the speed of a copy of 1 GiB. GB/s is lockstep's.\n"
)


def show(report: dict[str, Any], console: "Console") -> None:
    show_table(COLUMNS, report["rows"], console)
    machine = report["machine"]
    if "gpu" in machine:
        meaning = f"{MEANING_ON_GPU}{machine['gpu']}, CUDA {machine['cuda']},\n"
    else:
        meaning = MEANING.format(algorithm=report["algorithm"])
    show_notes(meaning + machine_line(machine), console)
