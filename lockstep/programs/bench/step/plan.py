"""What a step benchmark measures, and the report that it makes from the times. Without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.programs.bench.launch import bench_launched
from lockstep.programs.bench.plan import REFERENCES, BenchRecord, count_of, models_named, refuse_unequal_shares
from lockstep.programs.bench.rounds import Follow
from lockstep.programs.bench.spread import by_side, medians, ratios, spread
from lockstep.programs.bench.table import Columns, machine_line, show_notes, show_table, spread_cell

if TYPE_CHECKING:
    from rich.console import Console

WORKER = "lockstep.programs.bench.step.worker"

LOCKSTEP, DDP, ON_BACKEND = "lockstep", "ddp", "ddp_on_lockstep"
ONE_THREAD, ALL_THREADS = "plain_one_thread", "plain_all_threads"
SIDES = (LOCKSTEP, DDP, ON_BACKEND, ONE_THREAD, ALL_THREADS)

RATIOS = {
    "speedup_over_ddp": (DDP, LOCKSTEP),
    "speedup_of_ddp_on_lockstep": (DDP, ON_BACKEND),
    "lockstep_over_plain_one_thread": (LOCKSTEP, ONE_THREAD),
    "lockstep_over_plain_all_threads": (LOCKSTEP, ALL_THREADS),
}


@dataclass(frozen=True)
class CpuStepPlan(BenchRecord):
    """One model on one number of workers; every round has one block of `steps` timed steps for each side."""

    model: str
    workers: int
    steps: int
    rounds: int
    strategy: str = "replicated"

    def __post_init__(self) -> None:
        batch_size = REFERENCES[self.model].batch_size
        *most, last = [str(count) for count in range(1, batch_size + 1) if batch_size % count == 0]
        refuse_unequal_shares(self.model, batch_size, self.workers, f"{', '.join(most)} or {last} workers")

    @property
    def title(self) -> str:
        how = "" if self.strategy == "replicated" else f", {self.strategy}"
        return f"{self.model} on {count_of(self.workers)}{how}"

    @property
    def parts(self) -> tuple["CpuStepPlan"]:
        return (self,)


def make_plans(
    models: Sequence[str], workers: Sequence[int], steps: int | None, rounds: int, strategy: str = "replicated"
) -> tuple[CpuStepPlan, ...]:
    """A plan for every model on every number of workers, each once; raises before anything runs."""
    return tuple(
        CpuStepPlan(name, count, steps or REFERENCES[name].steps, rounds, strategy)
        for name in models_named(models, REFERENCES)
        for count in dict.fromkeys(workers)
    )


def bench_steps(plans: Sequence[CpuStepPlan], follow: Follow) -> dict[str, Any]:
    """Measures every plan, one after the other; returns the report. Main thread only."""
    on_this_host = {"GLOO_SOCKET_IFNAME": "lo"}  # DDP's own connections too
    return {"bench": "step", **bench_launched(plans, WORKER, follow, environment=on_this_host)}


def make_row(
    plan: CpuStepPlan, rounds: Sequence[Mapping[str, float]], parameters: int, differences: Mapping[str, Any]
) -> dict[str, Any]:
    """Medians over rounds, ratios with their range, and the rounds themselves, in ms per step."""
    times = by_side(rounds, SIDES)
    about = {"parameters": parameters, "batch_size": REFERENCES[plan.model].batch_size}
    row = {**asdict(plan), **about, "difference_from_lockstep": differences, "rounds_ms": times, **medians(times)}
    for name, (above, below) in RATIOS.items():
        row |= spread(name, ratios(times[above], times[below]))
    return row


COLUMNS: Columns = (
    ("model", lambda row: row["model"]),
    ("workers", lambda row: str(row["workers"])),
    ("lockstep", lambda row: f"{row['lockstep_ms']:.1f}"),
    ("DDP", lambda row: f"{row['ddp_ms']:.1f}"),
    ("DDP on\nlockstep", lambda row: f"{row['ddp_on_lockstep_ms']:.1f}"),
    ("plain,\n1 thread", lambda row: f"{row['plain_one_thread_ms']:.1f}"),
    ("plain,\nall threads", lambda row: f"{row['plain_all_threads_ms']:.1f}"),
    ("DDP ÷\nlockstep", lambda row: spread_cell(row, "speedup_over_ddp", 2, "\n{}")),
    ("DDP ÷\nDDP on it", lambda row: spread_cell(row, "speedup_of_ddp_on_lockstep", 2, "\n{}")),
    ("lockstep ÷\n1 thread", lambda row: spread_cell(row, "lockstep_over_plain_one_thread", 2, "\n{}")),
)


def show(report: dict[str, Any], console: "Console") -> None:
    show_table(COLUMNS, report["rows"], console)
    strategies = {row["strategy"] for row in report["rows"]} - {"replicated"}
    for strategy in sorted(strategies):
        console.print(f"lockstep's side has the strategy {strategy}.")
    meaning = "Milliseconds per step, medians over rounds.\nRatios, made within rounds: median, lowest–highest."
    show_notes(f"{meaning}\n{machine_line(report['machine'], 'processor')}", console)
