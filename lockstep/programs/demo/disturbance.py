"""A run of the demo whose workers are killed one after the other, beside the same run in peace."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from lockstep.errors import BadArgument
from lockstep.launch.launch import launch
from lockstep.observe.progress import show_progress
from lockstep.programs.demo.kills import STEPS_PER_KILL, Kill, Killer, Plan
from lockstep.programs.demo.members import living_members
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.result import Reader, Result, Verdict, judge_disturbed
from lockstep.programs.demo.training import finished, job_of, show_step

SPARES = 1
MORE_LOSSES = 4
"""So many are borne beyond the plan's: what else goes wrong on a busy host need not end the demo."""


@dataclass(frozen=True)
class Disturbed:
    """The run whose workers were killed, the one in peace on as many workers, and what the two show."""

    undisturbed: Result
    result: Result
    kills: tuple[Kill, ...]
    verdict: Verdict

    @property
    def longest_pause_s(self) -> float:
        """The longest time from a kill to the next step that was done without the victim."""
        return max((kill.pause_s for kill in self.kills if kill.pause_s is not None), default=0.0)


def disturb(recipe: Recipe, undisturbed: Result, run_dir: Path, console: Console) -> Disturbed:
    """Trains once more as `undisturbed` was, with kills by SIGKILL, each shown as it happens, to the end."""
    plan = Plan(recipe.steps, undisturbed.num_workers, recipe.seed)
    job = job_of(recipe, undisturbed.num_workers, run_dir)
    job = replace(job, spares=SPARES, fault_budget=plan.num_kills + MORE_LOSSES)
    result = Result(undisturbed.num_workers, recipe.tokens_per_step)
    with show_progress(console, "with kills", recipe.steps) as shown:
        killer = Killer(plan, living_members, _kill, time.monotonic, shown.say)

        def stepped(now: Result) -> None:
            show_step(shown, now)
            killer.stepped(len(now.losses))

        def other(line: str) -> None:
            shown.say(line)
            killer.heard(line)

        outcome = launch(job, show=Reader(result, time.monotonic, stepped, other), say=shown.say)
    finished(result, outcome)
    verdict = judge_disturbed(undisturbed, result, len(killer.kills))
    return Disturbed(undisturbed, result, tuple(killer.kills), verdict)


def check_kill(recipe: Recipe, worker_counts: Sequence[int]) -> None:
    """Raises unless somebody is there to go on when one is killed, and there is time for it."""
    if max(worker_counts) < 2:
        raise BadArgument("--kill needs a run on 2 workers or more, for somebody has to go on: give --workers 1,2")
    if recipe.steps < STEPS_PER_KILL:
        raise BadArgument(f"--kill needs {STEPS_PER_KILL} steps or more, not {recipe.steps}")


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
