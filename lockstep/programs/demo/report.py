"""The results of a demo: tables and sentences for the terminal, and JSON."""

import os
import platform
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from lockstep.programs.demo.demonstration import Demonstration, Disturbed
from lockstep.programs.demo.result import DemoResult
from lockstep.version import VERSION

COLUMNS = ("workers", "seconds", "tokens/s", "loss", "held-out", "digest")
"""`loss` is that of the first step and that of the last; `held-out` that on text the model has not seen."""


def show_report(demo: Demonstration, console: Console) -> None:
    """The tables, the verdicts and what the model writes, on the terminal."""
    colour = "green" if demo.verdict.equal else "red"
    table = Table(*(Column(name, justify="right") for name in COLUMNS))
    for result in demo.results:
        table.add_row(
            str(result.num_workers),
            f"{result.seconds:.1f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.losses[0]:.3f} → {result.losses[-1]:.3f}",
            f"{result.held_out_loss:.3f}",
            f"[{colour}]{_short(result)}[/]",
        )
    console.print()
    console.print(table)
    if demo.disturbed is not None:
        _show_disturbed(demo.disturbed, console)
    for verdict in demo.verdicts:
        mark, colour = ("✓", "green") if verdict.equal else ("✗", "red")
        console.print(f"[bold {colour}]{mark} {escape(verdict.sentence)}[/]", highlight=False)
    who = "each of them" if demo.equal and len(demo.results) + (demo.disturbed is not None) > 1 else "the first"
    console.print(f"\nAfter {demo.recipe.steps} steps {who} writes:\n", highlight=False)
    console.print(Padding(Text(readable(demo.results[0].written), style="cyan"), (0, 0, 1, 4)))


def _show_disturbed(disturbed: Disturbed, console: Console) -> None:
    """Each fact of the two runs, without and with kills."""
    calm, killed = disturbed.undisturbed, disturbed.result
    table = Table("", Column("undisturbed", justify="right"), Column("disturbed", justify="right"))
    table.add_row("workers", str(calm.num_workers), str(killed.num_workers))
    table.add_row("steps", str(calm.end["steps"]), str(killed.end["steps"]))
    table.add_row("kills", "0", str(len(disturbed.kills)))
    table.add_row("longest pause after a kill", "", f"{disturbed.longest_pause_s:.2f} s")
    table.add_row("steps lost", str(calm.lost_steps), str(killed.lost_steps))
    table.add_row("loss", f"{calm.losses[-1]:.6f}", f"{killed.losses[-1]:.6f}")
    table.add_row("held-out", f"{calm.held_out_loss:.6f}", f"{killed.held_out_loss:.6f}")
    table.add_row("digest", _short(calm), _short(killed))
    table.add_row("equal", "", "yes" if disturbed.verdict.equal else "no")
    console.print()
    console.print(table, highlight=False)


def _short(result: DemoResult) -> str:
    return f"{result.digest[:16]}…"


def readable(text: str) -> str:
    """The text without what could move a terminal's cursor; lines stay lines."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in text)


# -- as JSON --------------------------------------------------------------------------------------------------


def as_json(demo: Demonstration) -> dict[str, Any]:
    recipe = demo.recipe
    return {
        "equal": demo.equal,
        "sentence": " ".join(verdict.sentence for verdict in demo.verdicts),
        "steps": recipe.steps,
        "lanes": recipe.lanes,
        "seed": recipe.seed,
        "machine": machine(demo.results[0]),
        "runs": [_run_as_json(result) for result in demo.results],
        **({} if demo.disturbed is None else {"disturbed": _disturbed_as_json(demo.disturbed)}),
    }


def machine(result: DemoResult) -> dict[str, str | int]:
    """Where the demo ran, as far as it matters for its numbers."""
    return {
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(result.about["torch"]),
        "lockstep": VERSION,
    }


def _run_as_json(result: DemoResult) -> dict[str, Any]:
    return {
        "workers": result.num_workers,
        "seconds": round(result.seconds, 3),
        "tokens_per_s": round(result.tokens_per_s, 1),
        "final_loss": result.losses[-1],
        "held_out_loss": result.held_out_loss,
        "digest": result.digest,
        "written": result.written,
        "losses": result.losses,
    }


def _disturbed_as_json(disturbed: Disturbed) -> dict[str, Any]:
    """Everything that was measured, as JSON values. The loss of an unreported step is null."""
    result = disturbed.result
    return {
        "equal": disturbed.verdict.equal,
        "sentence": disturbed.verdict.sentence,
        "workers": result.num_workers,
        "seconds": round(result.seconds, 3),
        "steps": result.end["steps"],
        "steps_lost": result.lost_steps,
        "kills": [
            {"worker": kill.victim.slot, "pid": kill.victim.pid, "step": kill.victim.step, "pause_s": kill.pause_s}
            for kill in disturbed.kills
        ],
        "final_loss": result.losses[-1],
        "held_out_loss": result.held_out_loss,
        "digest": result.digest,
        "undisturbed_digest": disturbed.undisturbed.digest,
        "losses": [None if step in result.unreported else loss for step, loss in enumerate(result.losses, start=1)],
    }
