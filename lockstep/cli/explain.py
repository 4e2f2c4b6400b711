"""`lockstep explain`: how a collective works, where the time of a run's steps went, what a training takes of memory."""

import json
from pathlib import Path
from typing import Any

import click

from lockstep.cli.run import ParsedOption, StrategyName
from lockstep.errors import BadArgument
from lockstep.settings.environment import STRATEGIES
from lockstep.settings.limits import as_whole

COLLECTIVES = {
    "allreduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "broadcast": "broadcast",
}


def parse_hosts(text: str) -> tuple[int, ...]:
    """The number of workers on each host: "2,2"."""
    sizes = [as_whole(word) for word in text.split(",")]
    if not all(sizes):
        raise ValueError(f'{text[:60]!r} is not allowed: give the workers of each host, such as "2,2"')
    return tuple(size for size in sizes if size)


HOSTS = ParsedOption("sizes", parse_hosts)


@click.group(name="explain")
def command() -> None:
    """Show how a collective works, where the time of a run's steps went, or what a training takes of memory."""


def of_collective(name: str) -> click.Command:
    """The command that explains one collective."""

    @click.command(name=name, short_help=f"How {name} works, round by round.")
    @click.option("--algorithm", metavar="NAME", help="How to do it; a name that does not exist lists those that do.")
    @click.option("-n", "--workers", "num_workers", type=click.IntRange(1, 64), help="Workers, 1 to 64.  [default: 4]")
    @click.option("--lanes", "num_lanes", type=click.IntRange(1, 512), help="Lanes, for exact ones. [default: workers]")
    @click.option("--hosts", "workers_per_host", type=HOSTS, help='Workers of each host, such as "2,2".')
    @click.option("--source", type=click.IntRange(0, 63), help="The worker that broadcasts.  [default: 0]")
    @click.option("--chunks", "num_chunks", type=click.IntRange(1, 64), help="Chunks that follow each other in a tree.")
    @click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw it into this file.")
    @click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of the rounds.")
    def explain(svg: Path | None, wants_json: bool, **options: Any) -> None:
        """Show how the collective works, round by round: who sends what to whom, and what everyone then has.

        What is shown was proved first: every contribution arrives exactly once, and the cost is counted.
        """
        explain_collective(COLLECTIVES[name], svg, wants_json, options)

    return explain


for collective in COLLECTIVES:
    command.add_command(of_collective(collective))


@command.command(name="step")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--step", type=click.IntRange(0), help="This step alone.  [default: all that were recorded]")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of the lines.")
def step(run_dir: Path, step: int | None, wants_json: bool) -> None:
    """Say where the time of the steps of the run in RUN_DIR went, by its timeline, and what would help."""
    from lockstep.observe.timeline.account import make_account
    from lockstep.observe.timeline.account_lines import account_lines, as_json
    from lockstep.observe.timeline.file import parts_of

    account = make_account(parts_of(run_dir), step)
    if account is None:
        which = "has no whole step yet" if step is None else f"does not show step {step} as a whole"
        raise BadArgument(f"the timeline of {run_dir} {which}: a step is whole when the one before it is there too")
    name = run_dir.resolve().name
    click.echo(json.dumps(as_json(account, name)) if wants_json else "\n".join(account_lines(account, name)))


@command.command(name="memory")
@click.option("--model", required=True, help="mlp, wide, gpt, cnn, gpt50m, or FILE.py:NAME, which makes a module.")
@click.option(
    "-n", "--workers", type=click.IntRange(1, 4096), default=4, show_default=True, help="Workers, on one host."
)
@click.option("--lanes", type=click.IntRange(1), help="Lanes of the run.  [default: workers]")
@click.option(
    "--strategy", type=StrategyName(), metavar="|".join(STRATEGIES), help="This one beside replicated.  [default: all]"
)
@click.option(
    "--optimizer", default="adamw", show_default=True, help="Its name; one that does not exist lists those that do."
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="cuda: what is on each worker's GPU, and in the memory of the host.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of the table.")
def memory(
    model: str, workers: int, lanes: int | None, strategy: str | None, optimizer: str, device: str, wants_json: bool
) -> None:  # fmt: skip
    """Say before a run what its workers will hold in memory, part by part, under each strategy."""
    from lockstep.programs.memory import account, table
    from lockstep.programs.memory.sizes import base_memory, sizes_of

    base, sizes = base_memory(), sizes_of(model, optimizer)
    on_host = account.WorkersOnHost(workers, lanes or workers)
    names = account.STRATEGIES if strategy is None else dict.fromkeys((account.REPLICATED, strategy))
    accounts = [
        account.make_account(sizes, on_host, name, base)
        if device == "cpu"
        else account.make_gpu_account(sizes, on_host, name)
        for name in names
    ]
    if wants_json:
        click.echo(json.dumps(table.as_json(accounts)))
        return
    from rich.console import Console

    count = sum(spec.num_elements for spec in sizes.specs)
    title = f"{model}: {count / 1e6:.1f} million parameters, {optimizer}, {workers} workers, {on_host.num_lanes} lanes"
    table.show(accounts, title, Console())


def explain_collective(collective: str, svg: Path | None, wants_json: bool, options: dict[str, Any]) -> None:
    from rich.console import Console

    from lockstep.programs.explain.picture import picture
    from lockstep.programs.explain.screen import show
    from lockstep.programs.explain.story import as_json, make_story

    if svg is not None and svg.suffix != ".svg":
        raise BadArgument(f"--svg must be a file that ends in .svg, not {svg}")
    if svg is not None and not svg.parent.is_dir():
        raise BadArgument(f"--svg {svg} cannot be written: there is no folder {svg.parent}")
    story = make_story(collective, **options)  # type: ignore[arg-type]
    if svg is not None:
        try:
            svg.write_text(picture(story), encoding="utf-8")
        except OSError as error:
            raise BadArgument(f"--svg {svg} cannot be written: {error.strerror}") from error
    if wants_json:
        click.echo(json.dumps(as_json(story)))
    elif svg is not None:
        click.echo(f"Drawn: {svg}")
    else:
        show(story, Console())
