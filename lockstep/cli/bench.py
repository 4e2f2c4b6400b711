"""`lockstep bench`: measures steps, collectives and recoveries on this machine."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.run import ParsedOption, StrategyName, Whole, WorkerCounts
from lockstep.errors import BadArgument
from lockstep.programs.bench.allreduce import plan as allreduces
from lockstep.programs.bench.allreduce.sizes import parse_sizes
from lockstep.programs.bench.gpu import plan as gpu
from lockstep.programs.bench.launch import BenchStopped
from lockstep.programs.bench.mps import multi_process_service
from lockstep.programs.bench.plan import CPU, CUDA, REFERENCES, refuse_unless_gpu, require_gpu
from lockstep.programs.bench.recovery import plan as recoveries
from lockstep.programs.bench.rounds import Follow, show_progress
from lockstep.programs.bench.step import plan as steps_on_cpu
from lockstep.settings.environment import STRATEGIES

if TYPE_CHECKING:
    from rich.console import Console

Report = dict[str, Any]


def parse_svg_file(text: str) -> Path:
    """An .svg file that can be written, in a folder that exists."""
    path = Path(text)
    if path.suffix.lower() != ".svg" or path.is_dir():
        raise BadArgument(f"{text!r} is not allowed: name a file that ends in .svg")
    if not path.parent.is_dir():
        raise BadArgument(f"there is no folder {path.parent}: make it first, or name another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadArgument(f"{text!r} cannot be written: name another place")
    return path


@click.group(name="bench")
def command() -> None:
    """Measure steps, collectives and recoveries on this machine."""


on_device = click.option(
    "--device", type=click.Choice((CPU, CUDA)), default=CPU, show_default=True, help="Where the workers compute."
)
under_mps = click.option("--mps", is_flag=True, help="On a GPU: let workers share it by NVIDIA's MPS.")
in_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


def report_on(
    num_rounds: int, measure: Callable[[Follow], Report], show: Callable[[Report, "Console"], None], as_json: bool
) -> Report:
    """Measures with its progress on standard error, and prints the report. Exits if it was stopped."""
    from rich.console import Console

    try:
        with show_progress(Console(stderr=True), num_rounds) as follow:
            report = measure(follow)
    except BenchStopped as stopped:
        click.echo(str(stopped), err=True)
        sys.exit(stopped.exit_code)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())
    return report


def flattened(workers: Sequence[tuple[int, ...]]) -> list[int]:
    return [count for counts in workers for count in counts]


@command.command()
@click.option(
    "--model",
    "models",
    type=click.Choice([*REFERENCES, "all", *(name for name in gpu.GPU_REFERENCES if name not in REFERENCES)]),
    multiple=True,
    default=("all",),
    show_default=True,
    help="What to train; may be given several times. The last four are for a GPU, which also takes mlp.",
)
@click.option(
    "-n",
    "--workers",
    type=WorkerCounts(1),
    multiple=True,
    help='Workers, one process each: "2,4"; may be given several times.  [default: 2, on a GPU 1]',
)
@on_device
@click.option(
    "--sides",
    type=ParsedOption("names", gpu.parse_sides),
    help='On a GPU: what to measure, such as "plain fused,ddp,lockstep".  [default: all]',
)
@under_mps
@click.option(
    "--lanes",
    type=WorkerCounts(1),
    multiple=True,
    help='On a GPU: lanes of each worker, "1,4,8"; may be given several times.  [default: 1]',
)
@click.option(
    "--ranks-share-gpu",
    is_flag=True,
    help="On a GPU: let workers that share it add by NCCL, over sockets. It shows that NCCL works, not how fast it is.",
)
@click.option(
    "--strategy",
    type=StrategyName(),
    metavar="|".join(STRATEGIES),
    default="replicated",
    show_default=True,
    help="What a step of lockstep's side means; on a GPU, that of a side beside it.",
)
@click.option(
    "--steps", type=Whole(1), help="Timed steps in a block.  [default: about a second's worth, on a GPU less]"
)
@click.option(
    "--rounds", type=Whole(1), help=f"Blocks of each side.  [default: {steps_on_cpu.ROUNDS}, on a GPU {gpu.ROUNDS}]"
)
@in_json
def step(
    models: tuple[str, ...],
    workers: tuple[tuple[int, ...], ...],
    device: str,
    sides: tuple[str, ...] | None,
    mps: bool,
    lanes: tuple[tuple[int, ...], ...],
    ranks_share_gpu: bool,
    strategy: str,
    steps: int | None,
    rounds: int | None,
    as_json: bool,
) -> None:
    """Time a training step: lockstep, DDP and a plain loop, and on a GPU CUDA graphs too, side by side.

    The sides are first shown to compute the same. All models take several minutes, in which the machine
    should do nothing else.
    """
    counts = flattened(workers)
    if device == CUDA:
        num_gpus = 1
        if max(counts, default=1) > 1 and sides is None:
            from lockstep.settings.device import count_gpus  # loads torch

            num_gpus = count_gpus()
        on_gpu = gpu.make_plans(
            models, counts or [1], sides, flattened(lanes) or [1],
            steps=steps, rounds=rounds or gpu.ROUNDS, ranks_share_gpu=ranks_share_gpu, strategy=strategy,
            num_gpus=num_gpus,
        )  # fmt: skip
        step_on_gpu(on_gpu, mps, as_json)
        return
    refuse_unless_gpu(device, sides=sides is not None, mps=mps, lanes=bool(lanes), ranks_share_gpu=ranks_share_gpu)
    plans = steps_on_cpu.make_plans(models, counts or [2], steps, rounds or steps_on_cpu.ROUNDS, strategy)
    report_on(
        sum(plan.rounds for plan in plans),
        lambda follow: steps_on_cpu.bench_steps(plans, follow),
        steps_on_cpu.show,
        as_json,
    )


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, from `timeout` say, is Ctrl-C. Main thread only."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def step_on_gpu(plans: tuple[gpu.GpuStepPlan, ...], mps: bool, as_json: bool) -> None:
    """Exits with 1 if a side failed or was refused; the report has the others. Ctrl-C keeps what was measured."""
    from rich.console import Console

    from lockstep.programs.bench.gpu.turns import bench_gpu_steps

    require_gpu()
    gpu.require_packages(plans)
    console = Console()

    def measure(follow: Follow) -> Report:
        take = (lambda row: None) if as_json else (lambda row: gpu.show_row(row, console))
        return bench_gpu_steps(plans, follow, take, variables)

    with sigterm_as_interrupt(), multi_process_service(mps) as variables:
        report = report_on(sum(plan.rounds for plan in plans), measure, gpu.show_machine, as_json)
    if report["stopped"]:
        click.echo("✗ stopped; all processes have ended", err=True)
        sys.exit(130)
    sys.exit(0 if gpu.is_whole(report) else 1)


@command.command()
@click.option(
    "-n",
    "--workers",
    type=WorkerCounts(2),
    multiple=True,
    default=("2",),
    show_default=True,
    help='Workers, one process with one thread each: "2,4"; may be given several times.',
)
@on_device
@under_mps
@click.option(
    "--sizes",
    type=ParsedOption("sizes", parse_sizes),
    help='Bytes of the tensor: "4KiB,1MiB", or a range.  '
    f"[default: {allreduces.USUAL_SIZES[CPU]}, on a GPU {allreduces.USUAL_SIZES[CUDA]}]",
)
@click.option(
    "--algorithm",
    type=ParsedOption("name", allreduces.parse_algorithm),
    default=allreduces.SHARED,
    show_default=True,
    help="How lockstep adds: in shared memory, or over Gloo by the schedule of this name (ring, direct, ...).",
)
@click.option("--rounds", type=Whole(1), default=9, show_default=True, help="Blocks of each side.")
@click.option(
    "--svg", "picture", type=ParsedOption("file", parse_svg_file), help="Also draw times over sizes into this file."
)
@in_json
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
    from lockstep.launch.host.resources import free_bytes
    from lockstep.programs.bench.allreduce.plot import draw

    refuse_unless_gpu(device, mps=mps)
    each = sizes or parse_sizes(allreduces.USUAL_SIZES[device])
    plans = allreduces.make_plans(flattened(workers), each, algorithm, rounds, device)
    if device == CPU:
        allreduces.check_memory(plans, free_bytes())
        if warning := allreduces.crowding(plans, num_cores=len(os.sched_getaffinity(0))):
            click.echo(warning, err=True)
    else:
        require_gpu()
    with multi_process_service(mps) as variables:
        measure = lambda follow: allreduces.bench_allreduce(plans, follow, variables)  # noqa: E731
        report = report_on(rounds * len(plans) * len(plans[0].sizes), measure, allreduces.show, as_json)
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
@in_json
def recovery(model: str, workers: int, lanes: int | None, kills: int, baseline: bool, as_json: bool) -> None:
    """Time what a killed worker costs: lockstep, lockstep with a spare, and torchrun restarting DDP, in turn.

    The bits of every disturbed run are compared with those of an undisturbed one. Every kill has a run of its own;
    all together take ten minutes or more, in which the machine should do nothing else.
    """
    from lockstep.programs.bench.recovery.trial import bench_recovery

    plan = recoveries.make_plan(model, workers, lanes, kills, baseline)
    report_on(plan.rounds, lambda follow: bench_recovery(plan, follow), recoveries.show, as_json)
