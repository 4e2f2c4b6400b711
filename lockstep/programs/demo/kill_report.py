"""What is told of the run whose workers were killed, beside the one in peace: on the terminal, the page, as JSON."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from lockstep.programs.demo.disturbance import Disturbed
from lockstep.programs.demo.kills import Kill
from lockstep.programs.demo.result import Result

HEADS = ("", "undisturbed", "disturbed")


def show_disturbed(disturbed: Disturbed, console: Console) -> None:
    """The table on the terminal."""
    table = Table(HEADS[0], *(Column(head, justify="right") for head in HEADS[1:]))
    for name, *cells in rows(disturbed):
        table.add_row(name, *cells)
    console.print()
    console.print(table, highlight=False)


def rows(disturbed: Disturbed) -> list[tuple[str, str, str]]:
    """Each fact of the two runs: its name, in peace, with kills."""
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


def section(disturbed: Disturbed) -> str:
    """The part of the page on this run."""
    lines = [HEADS, ("---", "---:", "---:"), *rows(disturbed)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    kills = "\n".join(f"- {told(kill)}" for kill in disturbed.kills)
    return f"""
## With workers killed

{table}

The pause is the time from a kill to the next step that was done without the victim. The digest of the disturbed run
is `{disturbed.result.digest}`. By SIGKILL ended:

{kills}
"""


def told(kill: Kill) -> str:
    victim = kill.victim
    pause = "" if kill.pause_s is None else f"; the next step was done {kill.pause_s:.2f} s later"
    return f"worker {victim.slot} (pid {victim.pid}) at step {victim.step}{pause}"


def as_json(disturbed: Disturbed) -> dict[str, Any]:
    """Everything that was measured, as JSON values. The loss of a step that nobody told is null."""
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
        "losses": [None if step in result.untold else loss for step, loss in enumerate(result.losses, start=1)],
    }


def _kill_as_json(kill: Kill) -> dict[str, Any]:
    victim = kill.victim
    return {"worker": victim.slot, "pid": victim.pid, "step": victim.step, "pause_s": kill.pause_s}


def _steps(result: Result) -> str:
    return str(result.end["steps"])
