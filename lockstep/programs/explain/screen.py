"""A story on the terminal."""

import re

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.launch.supervision.messages import count
from lockstep.programs.explain.schedules.catalogue import CATALOGUE
from lockstep.programs.explain.story import EXAMPLE_BYTES, RoundMessage, Scene, Story, spans

MOST_CELLS = 16
MOST_MESSAGES = 4
VARIABLES = {
    "W": "workers",
    "P": "bytes of the message",
    "N": "chunks",
    "K": "roots of the worker with most",
    "H": "hosts",
    "C": "workers of the largest host (bytes: if all hosts are as large)",
    "G": "sums of the host with most",
}


def show(story: Story, console: Console) -> None:
    """Prints the rounds, then what they cost."""
    schedule = story.schedule
    title = f"{schedule.collective.replace('_', '-')}, {story.name}, {count(schedule.num_workers, 'worker')}"
    console.print(Text(title, style="bold").append(f": {story.algorithm.summary}", style="not bold"), highlight=False)
    console.print()
    console.print(_rows(story, "before", None, story.at_first), highlight=False)
    for number, scene in enumerate(story.scenes, start=1):
        console.print()
        console.print(_rows(story, f"round {number}", scene, scene.held), highlight=False)
    for line in _summary(story):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _rows(story: Story, title: str, scene: Scene | None, held: tuple[tuple[int, ...], ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold cyan", box=None, padding=(0, 2, 0, 0))
    table.add_column("worker", justify="right", style="bold")
    if scene is not None:
        table.add_column("sends")
    table.add_column("then holds" if scene else "holds", no_wrap=True)
    for rank, counts in enumerate(held):
        sent = [] if scene is None else [_sent(story, [msg for msg in scene.messages if msg.source == rank])]
        table.add_row(str(rank), *sent, _cells(counts, story.whole))
    return table


def _sent(story: Story, messages: list[RoundMessage]) -> Text:
    """Arrows to the first few targets, and how many more there are."""
    words = Text()
    for message in messages[:MOST_MESSAGES]:
        color = "yellow" if message.is_summand else "green"
        words.append("   " if words else "").append("──▶ ", style=color).append(str(message.target), style="bold")
        parts = "all" if len(message.parts) == story.schedule.num_parts else f"part {spans(message.parts)}"
        roots = f" of {message.num_roots} roots" if message.num_roots > 1 else ""
        words.append(f" {parts}{roots}{' (+)' if message.is_summand else ''}", style=color)
    if len(messages) > MOST_MESSAGES:
        words.append(f"   and to {len(messages) - MOST_MESSAGES} more", style="dim")
    return words or Text("·", style="dim")


def _cells(counts: tuple[int, ...], whole: int) -> Text:
    """One number for each part: contributions held of it; complete ones stand out."""
    if len(counts) > MOST_CELLS:
        return _bar(counts, whole)
    cells = Text()
    for held in counts:
        word = "·" if held == 0 else str(held)
        cells.append(f"{word:>{len(str(whole))}} ", style=_style(held, whole))
    return cells.append(f"of {whole}", style="dim") if whole > 1 else cells


def _bar(counts: tuple[int, ...], whole: int) -> Text:
    """Many parts: one sign for each, or for each group of neighbours, as full as the emptiest of them."""
    group = -(-len(counts) // (2 * MOST_CELLS))
    bar = Text()
    for first in range(0, len(counts), group):
        least = min(counts[first : first + group])
        bar.append("·▁▂▃▄▅▆▇█"[-(-8 * least // whole)], style=_style(least, whole))
    complete = sum(held == whole for held in counts)
    return bar.append(f" {complete} of {count(len(counts), 'part')} complete", style="dim")


def _style(held: int, whole: int) -> str:
    return "bold green" if held == whole else "yellow" if held else "dim"


def _summary(story: Story) -> list[str]:
    share, cost = story.proof.most_bytes_sent(EXAMPLE_BYTES) / EXAMPLE_BYTES, str(story.algorithm.cost)
    letters = set(re.findall(r"[^\W_]+", cost))
    lines = [
        f"Rounds: {story.proof.rounds}. The busiest worker sends {share:.2f} MiB of a 1 MiB message.",
        f"Cost: {cost}",
        f"      {', '.join(f'{letter} = {meaning}' for letter, meaning in VARIABLES.items() if letter in letters)}",
    ]
    if story.brackets is not None and story.algorithm.exact:
        lines.append(f"Exact, in the brackets of the summation tree over the lanes: {story.brackets}")
    elif story.brackets is not None:
        lines.append(f"Not exact: the brackets depend on the number of workers. Those of part 0: {story.brackets}")
    if story.brackets:
        lines.append("(+) is added up by the target, the rest is copied.")
    others = [name for name in CATALOGUE[story.schedule.collective] if name != story.name]
    return ["", *lines, f"Others: {', '.join(others)}."]
