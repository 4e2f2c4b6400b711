"""What a recovery benchmark kills, and when, and the report that it makes from the times. Without torch."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lockstep.errors import BadArgument, LockstepError
from lockstep.programs.bench.plan import NUM_BATCHES, REFERENCES
from lockstep.programs.bench.recovery.log import CommitEntry, last_step
from lockstep.programs.bench.report import NONE, machine_line, quantile, ratios, spread, spread_cell
from lockstep.programs.tables import Columns, show_notes, show_table

if TYPE_CHECKING:
    from rich.console import Console

BEFORE = 5
WINDOW = 10  # a worker is killed after BEFORE steps at least, in any of the WINDOW steps that follow
AFTER = 10  # so many steps follow at least
AFTER_S = 6.0  # a run of lockstep goes on for about so long after the kill, so that the replacement can join
PROBE_STEPS = 16  # the usual time of a step is measured over so many


@dataclass(frozen=True)
class RecoverySide:
    """A way to survive the loss: lockstep, with copies or `spares`; or torchrun, which saves every `save_every` steps.

    `most_s`: what lockstep claims of the median time until the next step.
    """

    name: str
    title: str
    copies: bool = True
    spares: int = 0
    save_every: int | None = None
    most_s: float | None = None

    @property
    def is_lockstep(self) -> bool:
        return self.save_every is None


SURVIVORS = RecoverySide("survivors", "lockstep", most_s=1.0)
ANEW = RecoverySide("anew", "lockstep --no-copies", copies=False)
SPARE = RecoverySide("spare", "lockstep --no-copies --spares 1", copies=False, spares=1, most_s=2.0)
RESTART = RecoverySide("restart", "torchrun, saved every step", save_every=1)
RESTART_10 = RecoverySide("restart_10", "torchrun, saved every 10", save_every=10)
SIDES = (SURVIVORS, ANEW, SPARE, RESTART, RESTART_10)


@dataclass(frozen=True)
class RecoveryPlan:
    """`kills` kills of each side, on one model; every kill has a run of its own."""

    model: str
    workers: int
    lanes: int
    kills: int
    baseline: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise BadArgument(f"{self.workers} worker is too few: 2 or more are needed, so that one is left to go on")
        batch_size = REFERENCES[self.model].batch_size
        if self.lanes < self.workers:
            raise BadArgument(f"{self.lanes} lanes leave some of {self.workers} workers idle: give as many or more")
        if self.lanes > batch_size:
            raise BadArgument(
                f"a batch of {self.model} has {batch_size} samples, too few for {self.lanes} lanes: "
                f"use {batch_size} or fewer, and no more workers than lanes"
            )

    @property
    def sides(self) -> tuple[RecoverySide, ...]:
        return tuple(side for side in SIDES if side.is_lockstep or self.baseline)

    @property
    def title(self) -> str:
        return f"{self.model} on {self.workers} workers"

    @property
    def rounds(self) -> int:
        """Of progress, which are runs: the probe, one undisturbed run of each kind, then all rounds, one untimed."""
        undisturbed = 2 if self.baseline else 1
        return 1 + undisturbed + (self.kills + 1) * len(self.sides)


@dataclass(frozen=True)
class PlannedKill:
    """Worker `victim` gets SIGKILL once `step` is committed, when `fraction` of the next step's usual time is over.

    Every side suffers it in turn, in this order.
    """

    victim: int
    step: int
    fraction: float
    order: tuple[RecoverySide, ...] = ()


def make_plan(model: str, workers: int, lanes: int | None, kills: int, baseline: bool = True) -> RecoveryPlan:
    """Raises before anything runs."""
    return RecoveryPlan(model, workers, default_lanes(model, workers) if lanes is None else lanes, kills, baseline)


def default_lanes(model: str, workers: int) -> int:
    """Two for each worker, so that a lost worker's can go to different ones, as far as there are samples."""
    return max(workers, min(2 * workers, REFERENCES[model].batch_size))


def make_rounds(plan: RecoveryPlan) -> list[PlannedKill]:
    """All rounds, the untimed one first: victims, moments and orders by lot, the same ones for the same seed."""
    lots, rounds = random.Random(plan.seed), []
    for _ in range(plan.kills + 1):
        victim, step, fraction = lots.randrange(plan.workers), lots.randrange(BEFORE, BEFORE + WINDOW), lots.random()
        rounds.append(PlannedKill(victim, step, fraction, tuple(lots.sample(plan.sides, len(plan.sides)))))
    return rounds


def num_steps(side: RecoverySide, step_s: float) -> int:
    """How long a run of the side is, in whole epochs.

    A replacement takes seconds to come, during which lockstep goes on; the baseline goes on only when all are there.
    """
    after = max(AFTER, math.ceil(AFTER_S / step_s)) if side.is_lockstep else AFTER
    return NUM_BATCHES * math.ceil((BEFORE + WINDOW + after) / NUM_BATCHES)


# -- from the log to times --------------------------------------------------------------------------------------


class NotRecovered(LockstepError):  # noqa: N818
    """No step was committed after the kill."""


@dataclass(frozen=True)
class RecoveryTimes:
    """Seconds from the kill until the next step was committed, and until one was by as many workers as before.

    `whole_s` is None if the run ended first. `steps_lost` had been committed and were computed again.
    """

    next_s: float
    whole_s: float | None
    steps_lost: int


def recovery_from(commits: Sequence[CommitEntry], killed_s: float, num_workers: int) -> RecoveryTimes:
    """docs/bench.md says which step counts as the next one; the worker with rank 0 reads the clock."""
    old = max(commit.generation for commit in commits if commit.time_s <= killed_s)
    done = last_step(commit for commit in commits if commit.generation <= old)
    after = [commit for commit in commits if commit.generation > old and commit.rank == 0]
    new = [commit for commit in after if commit.step > done]
    if not new:
        raise NotRecovered(f"no step after step {done} was committed when a worker had been killed")
    whole = [commit for commit in new if commit.size == num_workers]
    return RecoveryTimes(
        next_s=min(commit.time_s for commit in new) - killed_s,
        whole_s=min(commit.time_s for commit in whole) - killed_s if whole else None,
        steps_lost=max(0, done + 1 - min(commit.step for commit in after)),
    )


def usual_step_s(commits: Sequence[CommitEntry]) -> float:
    """The median time between two commits of the worker with rank 0; 0 as long as there are not two."""
    times = [commit.time_s for commit in commits if commit.rank == 0]
    return statistics.median([later - earlier for earlier, later in pairwise(times)] or [0.0])


# -- the report -------------------------------------------------------------------------------------------------

Measured = dict[str, RecoveryTimes]  # the recovery of every side in one round, by name


def make_report(
    plan: RecoveryPlan,
    rounds: Sequence[PlannedKill],
    measured: Sequence[Measured],
    steps: dict[str, int],
    baseline_agrees: bool | None,
    machine: dict[str, Any],
) -> dict[str, Any]:
    """`baseline_agrees`: whether its disturbed runs all ended with the bits of an undisturbed one; None if not run."""
    rows = [make_row(side, measured, steps[side.name]) for side in plan.sides]
    claims = [
        {"side": side.name, "title": side.title, "most_s": side.most_s, "median_s": row["next_median_s"],
         "holds": row["next_median_s"] <= side.most_s}
        for side, row in zip(plan.sides, rows, strict=True)
        if side.most_s is not None
    ]  # fmt: skip
    killed = [
        {"victim": each.victim, "step": each.step, "order": [side.name for side in each.order],
         "recoveries": {name: asdict(recovery) for name, recovery in times.items()}}
        for each, times in zip(rounds, measured, strict=True)
    ]  # fmt: skip
    return {
        "bench": "recovery",
        "machine": machine,
        **{name: getattr(plan, name) for name in ("model", "workers", "lanes", "kills")},
        "rows": rows,
        "claims": claims,
        "lockstep_bits_agree": True,  # or there would be no report
        "baseline_bits_agree": baseline_agrees,
        "rounds": killed,
    }


def make_row(side: RecoverySide, measured: Sequence[Measured], steps: int) -> dict[str, Any]:
    """One side: seconds until the next step and until all were back, steps lost, and how many times DDP's time."""
    own = [times[side.name] for times in measured]
    whole = [recovery.whole_s for recovery in own if recovery.whole_s is not None]
    lost = [recovery.steps_lost for recovery in own]
    restart = [times[RESTART.name].next_s for times in measured if RESTART.name in times]
    return {
        "side": side.name,
        "title": side.title,
        "steps": steps,
        **_quantiles("next", [recovery.next_s for recovery in own]),
        **_quantiles("whole", whole),
        "whole_reached": len(whole),
        "steps_lost": sum(lost),
        "steps_lost_median": statistics.median(lost),
        **spread("restart_ratio", ratios(restart, [recovery.next_s for recovery in own])),
    }


def _quantiles(name: str, times_s: Sequence[float]) -> dict[str, float | None]:
    """Median, nine in ten, and the longest; None where there is no time."""
    fractions = {"median": 0.5, "p90": 0.9, "max": 1.0}
    return {f"{name}_{word}_s": quantile(times_s, each) if times_s else None for word, each in fractions.items()}


def all_back(row: dict[str, Any]) -> str:
    """The median, and of how many if some runs ended before all workers were back."""
    if row["whole_median_s"] is None:
        return NONE
    few = "" if row["whole_reached"] == row["kills"] else f" ({row['whole_reached']}/{row['kills']})"
    return f"{row['whole_median_s']:.2f}{few}"


COLUMNS: Columns = (
    ("", lambda row: row["title"]),
    ("next step\nmedian, s", lambda row: f"{row['next_median_s']:.2f}"),
    ("\np90", lambda row: f"{row['next_p90_s']:.2f}"),
    ("\nmax", lambda row: f"{row['next_max_s']:.2f}"),
    ("all back\nmedian, s", all_back),
    ("steps\nlost", lambda row: str(row["steps_lost"])),
    ("restart ÷ this\n(range)", lambda row: spread_cell(row, "restart_ratio", 1) or NONE),
)


def show(report: dict[str, Any], console: "Console") -> None:
    show_table(COLUMNS, [{**row, "kills": report["kills"]} for row in report["rows"]], console)
    console.print("\n".join([*map(claim_line, report["claims"]), *agreement_lines(report)]), highlight=False)
    counts = " · ".join(f"{report[name]} {name}" for name in ("workers", "lanes", "kills"))
    show_notes(
        "Seconds from SIGKILL until the next new step was committed, and until one was by as many workers as\n"
        f"before ({NONE}: the run ended first). Steps lost are those of all kills; they were computed again.\n"
        f"{report['model']} · {counts} of each side, in turn\n{machine_line(report['machine'])}",
        console,
    )


def claim_line(claim: dict[str, Any]) -> str:
    holds = "holds" if claim["holds"] else "does not hold"
    median_s = f"{claim['median_s']:.2f} s"
    return f"{claim['title']}: a median of {claim['most_s']:.0f} s or less is claimed, {median_s} measured: {holds}"


def agreement_lines(report: dict[str, Any]) -> list[str]:
    lines = ["lockstep: every disturbed run ended with the bits of an undisturbed one"]
    if report["baseline_bits_agree"] is not None:
        did = "did too" if report["baseline_bits_agree"] else "did not always"
        lines.append(f"torchrun: its runs {did}")
    return lines
