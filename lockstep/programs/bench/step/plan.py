"""What a step benchmark measures, and the report that it makes from the times. Without torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.launch.supervision.messages import count
from lockstep.programs.bench.launch import bench_launched
from lockstep.programs.bench.plan import REFERENCES, BenchRecord, models_named, refuse_unequal_shares
from lockstep.programs.bench.report import machine_line, ratios, spread, spread_cell, times_of
from lockstep.programs.bench.rounds import Follow
from lockstep.programs.tables import Columns, show_notes, show_table

if TYPE_CHECKING:
    from rich.console import Console

WORKER = "lockstep.programs.bench.step.worker"

LOCKSTEP, DDP, ON_BACKEND = "lockstep", "ddp", "ddp_on_lockstep"
ZERO, FSDP = "ddp_zero", "fsdp2"
ONE_THREAD, ALL_THREADS = "plain_one_thread", "plain_all_threads"
HEADINGS = {
    LOCKSTEP: "lockstep", DDP: "DDP", ZERO: "DDP +\nZeRO", FSDP: "FSDP2", ON_BACKEND: "DDP on\nlockstep",
    ONE_THREAD: "plain,\n1 thread", ALL_THREADS: "plain,\nall threads", "base": "Python\nand torch",
}  # fmt: skip
SIDES = tuple(name for name in HEADINGS if name != "base")
ROUNDS = 2 * len(SIDES)
"""In so many rounds every side stands twice in every place of the order."""

RATIOS = {
    "speedup_over_ddp": (DDP, LOCKSTEP, "DDP ÷\nlockstep"),
    "speedup_over_ddp_zero": (ZERO, LOCKSTEP, "DDP + ZeRO\n÷ lockstep"),
    "speedup_over_fsdp2": (FSDP, LOCKSTEP, "FSDP2 ÷\nlockstep"),
    "speedup_of_ddp_on_lockstep": (DDP, ON_BACKEND, "DDP ÷\nDDP on it"),
    "lockstep_over_plain_one_thread": (LOCKSTEP, ONE_THREAD, "lockstep ÷\n1 thread"),
    "lockstep_over_plain_all_threads": (LOCKSTEP, ALL_THREADS, "lockstep ÷\nall threads"),
}
"""By key: which side's time is divided by which, and the heading."""


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
        return f"{self.model} on {count(self.workers, 'worker')}{how}"


def make_plans(
    models: Sequence[str], workers: Sequence[int], steps: int | None, rounds: int, strategy: str = "replicated"
) -> tuple[CpuStepPlan, ...]:
    """A plan for every model on every number of workers, each once; raises before anything runs."""
    return tuple(
        CpuStepPlan(name, count, steps or REFERENCES[name].steps, rounds, strategy)
        for name in models_named(models, REFERENCES, "with --device cpu")
        for count in dict.fromkeys(workers)
    )


def bench_steps(plans: Sequence[CpuStepPlan], follow: Follow) -> dict[str, Any]:
    """Measures every plan, one after the other; returns the report. Main thread only."""
    on_this_host = {"GLOO_SOCKET_IFNAME": "lo"}  # DDP's own connections too
    return {"bench": "step", **bench_launched(plans, WORKER, follow, environment=on_this_host)}


def make_row(
    plan: CpuStepPlan, rounds: Sequence[Mapping[str, float]], parameters: int, differences: Mapping[str, Any],
    memory: Mapping[str, Sequence[int]],
) -> dict[str, Any]:  # fmt: skip
    """Medians over rounds, ratios with their range, and the rounds themselves, in ms per step.

    `memory`: what each worker holds for each side, and as its "base", by rank.
    """
    about = {"parameters": parameters, "batch_size": REFERENCES[plan.model].batch_size}
    row = {**asdict(plan), **about, "difference_from_lockstep": differences, **times_of(rounds, SIDES)}
    row["memory"] = {side: {"worker_bytes": max(each), "host_bytes": sum(each)} for side, each in memory.items()}
    for name, (above, below, _) in RATIOS.items():
        row |= spread(name, ratios(row["rounds_ms"][above], row["rounds_ms"][below]))
    return row


SUBJECT: Columns = (("model", lambda row: row["model"]), ("workers", lambda row: str(row["workers"])))
RATIO_COLUMNS: Columns = [
    (heading, partial(spread_cell, name=name, decimals=2, between="\n{}")) for name, (_, _, heading) in RATIOS.items()
]


def memory_cell(row: Mapping[str, Any], side: str) -> str:
    """MiB of the worker that has the most, and of the host."""
    found = row["memory"][side]
    return f"{found['worker_bytes'] / 2**20:,.0f}\n[dim]{found['host_bytes'] / 2**20:,.0f}[/dim]"


def columns(cell: Callable[..., str], sides: Iterable[str]) -> Columns:
    return (*SUBJECT, *((HEADINGS[side], partial(cell, side=side)) for side in sides))


def show(report: dict[str, Any], console: "Console") -> None:
    rows = report["rows"]
    show_table(columns(lambda row, side: f"{row[f'{side}_ms']:.1f}", SIDES), rows, console)
    console.print()
    show_table((*SUBJECT, *RATIO_COLUMNS), rows, console)
    for strategy in sorted({row["strategy"] for row in rows} - {"replicated"}):
        console.print(f"lockstep's side has the strategy {strategy}.")
    console.print()
    show_table(columns(memory_cell, ("base", *SIDES)), rows, console)
    show_notes("MiB that a side needs beside Python and torch at most: of a worker, and of the host below it.", console)
    meaning = "Milliseconds per step, medians over rounds.\nRatios, made within rounds: median, lowest–highest."
    show_notes(f"{meaning}\n{machine_line(report['machine'], 'processor')}", console)
