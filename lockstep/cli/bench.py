"""`lockstep bench`: what this machine does, measured."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lockstep.cli.run import Whole
from lockstep.errors import BadArgument
from lockstep.launch.status import MAX_SLOTS
from lockstep.programs.bench.allreduce.algorithms import SHARED, parse_algorithm
from lockstep.programs.bench.allreduce.gpu.plan import SIZES_ON_GPU
from lockstep.programs.bench.allreduce.plan import check_memory, crowding
from lockstep.programs.bench.allreduce.plan import make_plans as make_allreduce_plans
from lockstep.programs.bench.allreduce.sizes import parse_sizes
from lockstep.programs.bench.devices import CPU, CUDA, DEVICES, refuse_unless_gpu, refuse_unless_on, require_gpu
from lockstep.programs.bench.gpu import plan as gpu
from lockstep.programs.bench.plan import REFERENCES, Plan, make_plans
from lockstep.programs.bench.recovery.plan import make_plan as make_recovery_plan

SIZES = "4KiB..128MiB"


class Counts(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers from `least` on, with commas between them: "2,4"."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self.each = Whole(least, MAX_SLOTS)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return tuple(self.each.convert(word.strip(), param, ctx) for word in value.split(","))


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """What a function makes of a word; what it refuses is told with the option's name."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value)
        except BadArgument as error:
            self.fail(str(error), param, ctx)


class Picture(click.ParamType):  # type: ignore[type-arg]
    """An .svg file that can be written, in a folder that exists."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.suffix.lower() != ".svg" or path.is_dir():
            self.fail(f"{value!r} is not allowed: name a file that ends in .svg", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}: make it first, or name another", param, ctx)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{value!r} cannot be written: name another place", param, ctx)
        return path


@click.group(name="bench")
def command() -> None:
    """Measure steps, collectives and recoveries on this machine."""


on_device = click.option(
    "--device", type=click.Choice(DEVICES), default=CPU, show_default=True, help="Where the workers compute."
)
under_mps = click.option("--mps", is_flag=True, help="On a GPU: let workers share it by NVIDIA's MPS.")


@command.command()
@click.option(
    "--model",
    "models",
    type=click.Choice([*REFERENCES, "all", *(name for name in gpu.REFERENCES if name not in REFERENCES)]),
    multiple=True,
    default=("all",),
    show_default=True,
    help="What to train; may be given several times. The last four are for a GPU, which also takes mlp.",
)
@click.option(
    "-n",
    "--workers",
    type=Counts(1),
    multiple=True,
    help='Workers, one process each: "2,4"; may be given several times.  [default: 2, on a GPU 1]',
)
@on_device
@click.option(
    "--sides",
    type=Parsed("names", gpu.parse_sides),
    help='On a GPU: what to measure, such as "plain fused,ddp,lockstep".  [default: all]',
)
@under_mps
@click.option(
    "--steps", type=Whole(1), help="Timed steps in a block.  [default: about a second's worth, on a GPU less]"
)
@click.option("--rounds", type=Whole(1), help=f"Blocks of each side.  [default: 10, on a GPU {gpu.ROUNDS}]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def step(
    models: tuple[str, ...],
    workers: tuple[tuple[int, ...], ...],
    device: str,
    sides: tuple[str, ...] | None,
    mps: bool,
    steps: int | None,
    rounds: int | None,
    as_json: bool,
) -> None:
    """Time a training step: lockstep, DDP and a plain loop, and on a GPU CUDA graphs too, side by side.

    The sides are first shown to compute the same. All models take several minutes, in which the machine
    should do nothing else.
    """
    counts = [count for counts in workers for count in counts]
    if device == CUDA:
        step_on_gpu(gpu.make_plans(models, counts or [1], sides, steps, rounds or gpu.ROUNDS), mps, as_json)
        return
    refuse_unless_gpu(device, sides=sides is not None, mps=mps)
    refuse_unless_on(device, models, [*REFERENCES, "all"])
    step_on_cpu(make_plans(models, counts or [2], steps, rounds or 10), as_json)


def step_on_cpu(plans: tuple[Plan, ...], as_json: bool) -> None:
    from rich.console import Console

    from lockstep.programs.bench.following import following
    from lockstep.programs.bench.launching import Stopped
    from lockstep.programs.bench.step import bench_steps
    from lockstep.programs.bench.table import show

    try:
        with following(Console(stderr=True), plans) as follow:
            report = bench_steps(plans, follow)
    except Stopped as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, from `timeout` say, is Ctrl-C. Main thread only."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def step_on_gpu(plans: tuple[gpu.Plan, ...], mps: bool, as_json: bool) -> None:
    """Exits with 1 if a side failed or was refused; the report has the others. Ctrl-C keeps what was measured."""
    from rich.console import Console

    from lockstep.programs.bench.following import following
    from lockstep.programs.bench.gpu.measuring import bench_gpu_steps
    from lockstep.programs.bench.gpu.rows import is_whole
    from lockstep.programs.bench.gpu.table import show_machine, show_row
    from lockstep.programs.bench.mps import multi_process_service

    require_gpu()
    gpu.require_packages(plans)
    console = Console()

    def take(row: dict[str, Any]) -> None:
        if not as_json:
            show_row(row, console)

    progress = following(Console(stderr=True), plans)
    with sigterm_as_interrupt(), multi_process_service(mps) as variables, progress as follow:
        report = bench_gpu_steps(plans, follow, take, variables)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    elif report["rows"]:
        show_machine(report, console)
    if report["stopped"]:
        click.echo("✗ stopped; all processes have ended", err=True)
        sys.exit(130)
    sys.exit(0 if is_whole(report) else 1)


@command.command()
@click.option(
    "-n",
    "--workers",
    type=Counts(2),
    multiple=True,
    default=("2",),
    show_default=True,
    help='Workers, one process with one thread each: "2,4"; may be given several times.',
)
@on_device
@under_mps
@click.option(
    "--sizes",
    type=Parsed("sizes", parse_sizes),
    help=f'Bytes of the tensor: "4KiB,1MiB", or a range.  [default: {SIZES}, on a GPU {SIZES_ON_GPU}]',
)
@click.option(
    "--algorithm",
    type=Parsed("name", parse_algorithm),
    default=SHARED,
    show_default=True,
    help="How lockstep adds: in shared memory, or over Gloo by the schedule of this name (ring, direct, ...).",
)
@click.option("--rounds", type=Whole(1), default=9, show_default=True, help="Blocks of each side.")
@click.option("--svg", "picture", type=Picture(), help="Also draw times over sizes into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def allreduce(
    workers: tuple[tuple[int, ...], ...],
    device: str,
    mps: bool,
    sizes: tuple[int, ...] | None,
    algorithm: str,
    rounds: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Time an all-reduce: lockstep and Gloo, and a copy of the same bytes, side by side in the same processes.

    The sums are first shown to be right. All sizes take about half a minute for each number of workers, in which the
    machine should do nothing else.
    """
    from rich.console import Console

    from lockstep.programs.bench.allreduce.measuring import bench_allreduce
    from lockstep.programs.bench.allreduce.plot import draw
    from lockstep.programs.bench.allreduce.table import show
    from lockstep.programs.bench.following import following
    from lockstep.programs.bench.launching import Stopped
    from lockstep.programs.bench.mps import multi_process_service
    from lockstep.programs.doctor.control_groups import ControlGroups
    from lockstep.programs.doctor.machine import memory

    refuse_unless_gpu(device, mps=mps)
    usual = parse_sizes(SIZES if device == CPU else SIZES_ON_GPU)
    counts = [count for counts in workers for count in counts]
    plans = make_allreduce_plans(counts, sizes or usual, algorithm, rounds, device)
    if device == CPU:
        check_memory(plans, memory(ControlGroups.of_this_process()).left_bytes)
    if device == CUDA:
        require_gpu()
    elif warning := crowding(plans, num_cores=len(os.sched_getaffinity(0))):
        click.echo(warning, err=True)
    parts = [part for plan in plans for part in plan.parts]
    try:
        with multi_process_service(mps) as variables, following(Console(stderr=True), parts) as follow:
            report = bench_allreduce(plans, follow, variables)
    except Stopped as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())
    if picture is not None:
        picture.write_text(draw(report), encoding="utf-8")


@command.command()
@click.option("--model", type=click.Choice([*REFERENCES]), default="mlp", show_default=True, help="What to train.")
@click.option(
    "-n",
    "--workers",
    type=Whole(2),
    default=3,
    show_default=True,
    help="Workers, one process with one thread each; one of them is killed.",
)
@click.option("--lanes", type=Whole(1), help="Lanes of the run.  [default: twice the workers]")
@click.option("--kills", type=Whole(1), default=10, show_default=True, help="Kills of each side.")
@click.option("--baseline/--no-baseline", default=True, help="Whether torchrun is measured too.  [default: yes]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def recovery(model: str, workers: int, lanes: int | None, kills: int, baseline: bool, as_json: bool) -> None:
    """Time what a killed worker costs: lockstep, lockstep with a spare, and torchrun restarting DDP, in turn.

    The bits of every disturbed run are compared with those of an undisturbed one. Every kill has a run of its own;
    all together take ten minutes or more, in which the machine should do nothing else.
    """
    from rich.console import Console

    from lockstep.observe.progress import show_progress
    from lockstep.programs.bench.launching import Stopped
    from lockstep.programs.bench.recovery.measuring import bench_recovery
    from lockstep.programs.bench.recovery.table import show

    plan = make_recovery_plan(model, workers, lanes, kills, baseline)
    try:
        with show_progress(Console(stderr=True), plan.title, plan.num_runs) as progress:
            report = bench_recovery(plan, progress.at)
    except Stopped as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())
