"""The results of a demo: a page with its picture, a table for the terminal, and JSON."""

import os
import platform
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from lockstep.errors import BadEnvironment
from lockstep.programs.demo.curves import LossCurve, draw
from lockstep.programs.demo.demonstration import Demonstration, Disturbed
from lockstep.programs.demo.kills import KillRecord
from lockstep.programs.demo.result import DemoResult, DemoVerdict, listed, workers
from lockstep.version import VERSION

PICTURE, PAGE = "loss.svg", "report.md"
HEADS = ("", "undisturbed", "disturbed")
COLUMNS = ("workers", "seconds", "tokens/s", "loss", "held-out", "digest")
"""`loss` is that of the first step and that of the last; `held-out` that on text the model has not seen."""


def write_report(demo: Demonstration, out: Path) -> Path:
    """Puts the page and its picture into `out`; returns the page's path."""
    _put(out / PICTURE, picture(demo))
    _put(out / PAGE, page(demo))
    return out / PAGE


def show_report(demo: Demonstration, console: Console) -> None:
    """The tables, the verdicts and what the model writes, on the terminal."""
    colour = "green" if demo.verdict.equal else "red"
    table = Table(*(Column(name, justify="right") for name in COLUMNS))
    for result in demo.results:
        *numbers, digest = row(result)
        table.add_row(*numbers, f"[{colour}]{digest[:16]}…[/]")
    console.print()
    console.print(table)
    if demo.disturbed is not None:
        _show_disturbed(demo.disturbed, console)
    for verdict in demo.verdicts:
        _show_verdict(verdict, console)
    console.print(f"\nAfter {demo.recipe.steps} steps {_each(demo)} writes:\n", highlight=False)
    console.print(Padding(Text(readable(demo.results[0].written), style="cyan"), (0, 0, 1, 4)))


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


def page(demo: Demonstration) -> str:
    recipe, first = demo.recipe, demo.results[0]
    about = first.about
    return f"""# lockstep demo: {_counts(demo)} workers

{_sentences(demo)}

A GPT with {about["parameters"]:,} parameters learned the text of Python's standard library, byte by byte:
{recipe.steps} steps of {recipe.batch_size} windows with {recipe.context} bytes each, {recipe.lanes} lanes,
seed {recipe.seed}, one thread per worker.

{_markdown_table(demo.results)}

Seconds count the whole run, with starting its processes; tokens/s count training alone. The loss is that of
the first and the last step, held-out that on text not seen. More workers than cores bring no speed.

![The loss on {_counts(demo)} workers]({PICTURE})

## Digests

SHA-256 over all parameters and the optimizer's state after the last step:

{_digests(demo.results)}
{"" if demo.disturbed is None else _section(demo.disturbed)}
## What the model writes

{textwrap.indent(readable(first.written), "    ")}

## Machine

{_facts(machine(first))}
"""


def picture(demo: Demonstration) -> str:
    curves = [LossCurve(workers(result.num_workers), result.losses) for result in demo.results]
    kills = () if demo.disturbed is None else demo.disturbed.kills
    if demo.disturbed is not None:
        label = f"{workers(demo.disturbed.result.num_workers)}, {len(kills)} killed"
        curves.append(LossCurve(label, demo.disturbed.result.losses))
    together = "All curves lie on one another, bit for bit." if demo.equal else "The runs differ."
    marks = [kill.victim.step for kill in kills]
    return draw(curves, f"Training loss on {_counts(demo)} workers", together, "loss (nats per byte)", marks)


def row(result: DemoResult) -> tuple[str, ...]:
    return (
        str(result.num_workers),
        f"{result.seconds:.1f}",
        f"{result.tokens_per_s:,.0f}",
        f"{result.losses[0]:.3f} → {result.losses[-1]:.3f}",
        f"{result.held_out_loss:.3f}",
        result.digest,
    )


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


def readable(text: str) -> str:
    """The text without what could move a terminal's cursor; lines stay lines."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "�" for letter in text)


def _show_verdict(verdict: DemoVerdict, console: Console) -> None:
    mark, colour = ("✓", "green") if verdict.equal else ("✗", "red")
    console.print(f"[bold {colour}]{mark} {escape(verdict.sentence)}[/]", highlight=False)


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


def _counts(demo: Demonstration) -> str:
    return listed([str(result.num_workers) for result in demo.results])


def _each(demo: Demonstration) -> str:
    compared = len(demo.results) > 1 or demo.disturbed is not None
    return "each of them" if compared and demo.equal else "the first"


def _markdown_table(results: Sequence[DemoResult]) -> str:
    lines = [COLUMNS, ("---:",) * (len(COLUMNS) - 1) + ("---",)]
    lines += [(*row(result)[:-1], f"`{result.digest[:16]}…`") for result in results]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _sentences(demo: Demonstration) -> str:
    return "\n".join(f"**{verdict.sentence}**" for verdict in demo.verdicts)


def _digests(results: Sequence[DemoResult]) -> str:
    return "\n".join(f"- {workers(result.num_workers)}: `{result.digest}`" for result in results)


def _facts(facts: dict[str, str | int]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _show_disturbed(disturbed: Disturbed, console: Console) -> None:
    table = Table(HEADS[0], *(Column(head, justify="right") for head in HEADS[1:]))
    for name, *cells in _rows(disturbed):
        table.add_row(name, *cells)
    console.print()
    console.print(table, highlight=False)


def _rows(disturbed: Disturbed) -> list[tuple[str, str, str]]:
    """Each fact of the two runs: its name, without and with kills."""
    calm, killed = disturbed.undisturbed, disturbed.result
    return [
        ("workers", str(calm.num_workers), str(killed.num_workers)),
        ("steps", _steps(calm), _steps(killed)),
        ("kills", "0", str(len(disturbed.kills))),
        ("longest pause after a kill", "", f"{disturbed.longest_pause_s:.2f} s"),
        ("steps lost", str(calm.lost_steps), str(killed.lost_steps)),
        ("loss", f"{calm.losses[-1]:.6f}", f"{killed.losses[-1]:.6f}"),
        ("held-out", f"{calm.held_out_loss:.6f}", f"{killed.held_out_loss:.6f}"),
        ("digest", f"{calm.digest[:16]}…", f"{killed.digest[:16]}…"),
        ("equal", "", "yes" if disturbed.verdict.equal else "no"),
    ]


def _section(disturbed: Disturbed) -> str:
    lines = [HEADS, ("---", "---:", "---:"), *_rows(disturbed)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    kills = "\n".join(f"- {_sentence(kill)}" for kill in disturbed.kills)
    return f"""
## With workers killed

{table}

The pause is the time from a kill to the next step that was done without the victim. The digest of the disturbed run
is `{disturbed.result.digest}`. By SIGKILL ended:

{kills}
"""


def _sentence(kill: KillRecord) -> str:
    victim = kill.victim
    pause = "" if kill.pause_s is None else f"; the next step was done {kill.pause_s:.2f} s later"
    return f"worker {victim.slot} (pid {victim.pid}) at step {victim.step}{pause}"


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
        "kills": [_kill_as_json(kill) for kill in disturbed.kills],
        "final_loss": result.losses[-1],
        "held_out_loss": result.held_out_loss,
        "digest": result.digest,
        "undisturbed_digest": disturbed.undisturbed.digest,
        "losses": [None if step in result.unreported else loss for step, loss in enumerate(result.losses, start=1)],
    }


def _kill_as_json(kill: KillRecord) -> dict[str, Any]:
    victim = kill.victim
    return {"worker": victim.slot, "pid": victim.pid, "step": victim.step, "pause_s": kill.pause_s}


def _steps(result: DemoResult) -> str:
    return str(result.end["steps"])


def _put(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that a link at `path` is replaced, not followed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise BadEnvironment(f"the demo has run, but {path} cannot be written: {error.strerror}") from error
