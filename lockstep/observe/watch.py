"""A run in the terminal, live: its numbers, its workers, and what happened."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"lost": "red", "joined": "green", "left": "yellow", "slow": "yellow", "restart": "magenta"}
_PARTS = (("compute", "blue"), ("waiting", "red"), ("data", "green"), ("other", "yellow"))


def picture(view: dict[str, Any], width: int, num_happenings: int = 8) -> RenderableType:
    """The view of a run, to be printed; names and messages of the run are shown as they are, not as markup."""
    now = view["now"]
    head = Text.assemble((view["name"], "bold"), f" · {view['program']} · {view['state']}")
    numbers = Text(
        f"step {_short(now['step'])} · loss {_short(now['loss'])} · {_short(now['samples_per_s'])} samples/s · "
        f"{now['num_workers']} workers · {now['num_lanes']} lanes"
    )
    return Group(
        Panel(Group(head, numbers, *_curves(view, width - 4)), expand=True),
        _workers(view),
        *_happened(view, num_happenings),
    )


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The values as a line of bars, at most so many; a value that is missing is a space."""
    kept = _last_of_stretches(values, max(width, 1))
    known = [value for value in kept if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return "".join(" " if value is None else BARS[_level(value, low, high)] for value in kept)


def _last_of_stretches(values: Sequence[float | None], number: int) -> list[float | None]:
    if len(values) <= number:
        return list(values)
    return [values[len(values) * (place + 1) // number - 1] for place in range(number)]


def _level(value: float, low: float, high: float) -> int:
    return 0 if high == low else min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)


def _curves(view: dict[str, Any], width: int) -> list[Text]:
    steps, parts = view["steps"], view["parts"]
    lines = []
    for name, values in (("loss", steps["loss"]), ("samples/s", steps["samples_per_s"])):
        if bars := sparkline(values, width - 11):
            lines.append(Text.assemble(f"{name:<10} ", (bars, "cyan")))
    newest = {name: parts[name][-1] for name, _ in _PARTS if parts[name]}
    total = sum(newest.values())
    if total:
        lines.append(_bar(newest, total, width - 13))  # each part may be rounded up
    return lines


def _bar(seconds: dict[str, float], total_s: float, width: int) -> Text:
    """A step's time by part, as a bar, and in words below."""
    bar = Text("a step     ")
    for name, colour in _PARTS:
        bar.append("█" * round(seconds[name] / total_s * width), colour)
    bar.append("\n           ")
    for name, colour in _PARTS:
        bar.append(f"{name} {seconds[name] * 1e3:.3g} ms  ", colour)
    return bar


def _workers(view: dict[str, Any]) -> Table:
    table = Table(expand=True, box=None, pad_edge=False)
    for name in ("worker", "phase", "step", "lanes", "memory"):
        table.add_column(name)
    for slot, now in view["workers"]["now"].items():
        phase = str(now["phase"]) if view["is_running"] else "ended"
        memory = f"{(now['memory'] or 0) / 2**20:.0f} MiB"
        table.add_row(Text(slot), Text(phase), Text(_short(now["step"])), Text(_short(now["lanes"])), Text(memory))
    return table


def _happened(view: dict[str, Any], number: int) -> list[Text]:
    newest = view["happenings"][-number:]
    return [
        Text.assemble((f"{one['t']:8.1f} s  ", "dim"), (one["text"].replace("\n", " "), _STYLES.get(one["kind"], "")))
        for one in newest
    ]


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"
