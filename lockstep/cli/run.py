"""`lockstep run`: a script on one or more workers, of this host or of a cluster."""

import difflib
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from lockstep.cli.streams import complain, discard_output
from lockstep.errors import BadArgument, BadEnvironment, LockstepError
from lockstep.events import Subscriber
from lockstep.lanes import Assignment
from lockstep.launch.channels.exits import AT_ONCE, CTRL_C, NO_MOMENT, TERMINATED
from lockstep.launch.channels.status import MAX_SLOTS
from lockstep.launch.host.folder import name_from, new_run_folder
from lockstep.launch.job import FAULT_BUDGET, HANG_S, write_assignment
from lockstep.launch.launch import Job, launch
from lockstep.launch.pool import OpenPool
from lockstep.launch.pools.local_pool import LocalPool
from lockstep.launch.supervision.messages import count
from lockstep.observe.history import WorkerHistory
from lockstep.observe.journal import Journal
from lockstep.observe.json_lines import only_first
from lockstep.observe.timeline.file import has_timeline, write_trace
from lockstep.settings.environment import (
    STRATEGIES,
    parse_assignment,
    parse_device,
    parse_strategy,
    process_environment,
)
from lockstep.settings.faults import FAULT, FaultKind
from lockstep.settings.limits import MOST_LANES, MOST_SEED, MOST_THREADS, as_whole
from lockstep.state.checkpoints.plan import parse_every


class Whole(click.ParamType):  # type: ignore[type-arg]
    """A whole number from `least` on, up to `most`."""

    name = "number"

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number = as_whole(str(value))
        if number is None or number < self.least or (self.most is not None and number > self.most):
            allowed = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
            self.fail(f"{str(value)[:60]!r} is not allowed: give a whole number, {allowed}", param, ctx)
        return number


class WorkerCounts(click.ParamType):  # type: ignore[type-arg]
    """Numbers of workers from `least` on: "1,2,3", "1-4", or both mixed; each once, in the order given."""

    name = "counts"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(dict.fromkeys(n for part in value.split(",") for n in self._span(part.strip(), param, ctx)))

    def _span(self, part: str, param: click.Parameter | None, ctx: click.Context | None) -> range:
        first, dash, last = (end.strip() for end in part.partition("-"))
        low, high = map(as_whole, [first, last] if dash else [first, first])
        if low is None or high is None or not self._least <= low <= high <= MAX_SLOTS:
            allowed = f"{self._least} to {MAX_SLOTS}: write 1,2,3 or 1-4"
            self.fail(f"{part[:60]!r} is not a number of workers, {allowed}", param, ctx)
        return range(low, high + 1)


class ParsedOption(click.ParamType):  # type: ignore[type-arg]
    """An option that `parse` parses; the text of its ValueError lists what is allowed."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_folder(text: str | Path) -> Path:
    if not str(text):
        raise ValueError("an empty name is not allowed: give a folder, or leave the option out")
    return Path(text)


FOLDER = ParsedOption("path", parse_folder)


def parse_amount(text: str | float) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise ValueError(f"{text!r} is not allowed: give a number, 0 or more")
    return amount


def parse_seconds(text: str | float) -> float:
    try:
        seconds = parse_amount(text)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise ValueError(f"{text!r} is not allowed: give seconds, more than 0")
    return seconds


def parse_resume(text: str) -> str:
    """ "auto", "never", or the whole path of a checkpoint that exists."""
    if text in ("auto", "never"):
        return text
    if not Path(text).exists():
        raise ValueError(f"there is no checkpoint {text}: give auto, never, or the path of one")
    if within := sorted(path.name for path in Path(text).glob("step-*")):
        raise ValueError(
            f"{text} is a folder of checkpoints: name one of them, such as {Path(text) / within[-1]}, or write "
            f"--checkpoints {text} --resume auto"
        )
    return str(Path(text).absolute())


Device = partial(ParsedOption, "device", parse_device)
StrategyName = partial(ParsedOption, "strategy", parse_strategy)


class Screen:
    """Worker 0's output and the launcher's messages on one terminal, each on lines of its own."""

    def __init__(self) -> None:
        self._in_line = False

    def show(self, output: bytes) -> None:
        try:
            sys.stdout.buffer.write(output)
            sys.stdout.buffer.flush()
        except OSError:
            discard_output()
            raise
        self._in_line = not output.endswith(b"\n")

    def say(self, text: str) -> None:
        complain("\n" * self._in_line + text)
        self._in_line = False


@click.command(name="run", context_settings={"allow_interspersed_args": False})
@click.option(
    "-n", "--workers", type=Whole(1), default=1, show_default=True, help="Workers to start, one process each."
)
@click.option("--lanes", type=Whole(1, MOST_LANES), help="Lanes of the run, over the script's own word.")
@click.option("--seed", type=Whole(0, MOST_SEED), help="Seed of the run, over the script's own word.")
@click.option(
    "--threads", type=Whole(1, MOST_THREADS), help="Threads per worker, over the script's own word.  [default: 1]"
)
@click.option(
    "--device",
    type=Device(),
    metavar="cpu|cuda|cuda:K",
    help="Where workers compute, over the script's own word.  [default: each its own GPU, the CPU where there is none]",
)
@click.option(
    "--strategy",
    type=StrategyName(),
    metavar="|".join(STRATEGIES),
    help="What a step means, over the script's own word.  [default: replicated]",
)
@click.option(
    "--assignment",
    type=ParsedOption("lanes", lambda text: Assignment(parse_assignment(text))),
    help='Lanes of each worker, such as "0,1;2,3". Even by default.',
)
@click.option("--run-dir", type=FOLDER, help="Folder for logs and reports.  [default: runs/NAME-K]")
@click.option(
    "--copies/--no-copies",
    default=True,
    show_default=True,
    help="Replace a lost worker by a copy of one that lives, where that can be done; else by a new process.",
)
@click.option(
    "--load-once/--no-load-once",
    default=None,
    help="Load torch once and fork the workers from that process: each further one then holds about 200 MiB less.  "
    "[default: with --strategy sharded:...]",
)
@click.option(
    "--spares",
    type=Whole(0),
    default=0,
    show_default=True,
    help="Processes that stand by, with torch loaded, to take a lost worker's place at once.",
)
@click.option(
    "--fault-budget",
    type=Whole(0),
    default=FAULT_BUDGET,
    show_default=True,
    help="Lost workers that are borne without progress; one more ends the run with exit code 4. Each new step gives "
    "one back.",
)
@click.option(
    "--hang-s",
    type=ParsedOption("seconds", parse_seconds),
    default=HANG_S,
    show_default=True,
    help="A worker that keeps others waiting and shows no sign of work for so long is ended and replaced. More if the "
    "run has waited longer before.",
)
@click.option(
    "--resume",
    type=ParsedOption("resume", parse_resume),
    metavar="auto|never|PATH",
    help="Go on from the newest good checkpoint, from none, or from this one. With --run-dir of an earlier run, "
    "auto continues it.  [default: the script's word, else never]",
)
@click.option("--checkpoints", type=FOLDER, help="Folder for checkpoints.  [default: RUN_DIR/checkpoints]")
@click.option(
    "--checkpoint-every", metavar="TEXT", help='How often to save: "100 steps", "10 min", or "100 steps, 10 min".'
)
@click.option("--checkpoint-keep", type=Whole(1), help="Newest checkpoints to keep.")
@click.option(
    "--torch-distributed",
    is_flag=True,
    help="For scripts that open a process group of torch.distributed themselves: set RANK, WORLD_SIZE, MASTER_ADDR "
    "and the like.",
)
@click.option(
    "--rebalance/--no-rebalance",
    default=None,
    help="Whether lanes move away from a slow worker, over the script's own word.  [default: they do]",
)
@click.option(
    "--timeline",
    is_flag=True,
    help="Write what every worker does, step by step, to timeline.json in the run's folder, for Perfetto.",
)
@click.option("--page", is_flag=True, help="Show the run in the browser while it goes on, for this host alone.")
@click.option("--on", type=click.Choice(["ray"]), help="Start the workers on a Ray cluster.  [default: on this host]")
@click.option(
    "--address",
    metavar="HOST:PORT|auto|local",
    help="With --on ray: the cluster's head, the one found from here, or a cluster of this host.  [default: auto]",
)
@click.option(
    "--cpus-per-worker", type=ParsedOption("number", parse_amount), help="With --on ray: CPUs per worker.  [default: 1]"
)
@click.option(
    "--gpus-per-worker", type=ParsedOption("number", parse_amount), help="With --on ray: GPUs per worker.  [default: 0]"
)
@click.option(
    "--placement",
    type=click.Choice(["pack", "spread"]),
    help="With --on ray: workers on few nodes, or on many.  [default: pack]",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    program: str,
    module: bool,
    workers: int,
    assignment: Assignment | None,
    run_dir: Path | None,
    checkpoint_every: str | None,
    on: str | None,
    address: str | None,
    cpus_per_worker: float | None,
    gpus_per_worker: float | None,
    placement: str | None,
    page: bool,
    **settings: Any,
) -> None:
    """Start PROGRAM, a script, on one or more workers of this host, or of a Ray cluster.

    Everything after PROGRAM is the program's own. One worker writes to the screen, every worker to its log.
    A worker that is lost is replaced while the others go on; see also `lockstep scale`.
    """
    of_ray = {
        "--address": address,
        "--cpus-per-worker": cpus_per_worker,
        "--gpus-per-worker": gpus_per_worker,
        "--placement": placement,
    }
    engine = {name: value for name, value in {"--on": on, **of_ray}.items() if value is not None}
    check_engine(engine, settings["spares"], settings["load_once"])
    (check_module if module else check_script)(program)
    check_assignment(assignment, workers, settings["lanes"])
    if workers > MAX_SLOTS:
        raise BadArgument(f"--workers {workers} is not allowed: one host runs {MAX_SLOTS} at most")
    note_misplaced_workers(program, settings["arguments"])
    if checkpoint_every is not None:
        parse_every(checkpoint_every)
    check_fault(settings["copies"])
    job = Job(
        program=program,
        run_dir=make_folder(run_dir, program),
        module=module,
        num_workers=workers,
        assignment=None if assignment is None else assignment.lanes_of,
        checkpoint_every=checkpoint_every,
        **settings,  # the other options have the names of the job's fields
    )
    screen = Screen()
    complain_once = only_first(screen.say)
    readers: list[Subscriber] = [Journal(job.run_dir, complain_once), WorkerHistory(job.run_dir, complain_once)]
    with shown_page(job.run_dir, screen.say) if page else nullcontext():
        outcome = launch(job, show=screen.show, say=screen.say, open_pool=pool_on(engine), readers=readers)
    if has_timeline(job.run_dir):
        show_timeline(job.run_dir, screen.say)
    if outcome.saved:
        screen.say(f"  to go on: {continuation(job, engine)}")
    elif outcome.exit_code in (CTRL_C, TERMINATED) and outcome.num_steps:
        screen.say(f"  nothing was saved: {AT_ONCE if outcome.at_once else NO_MOMENT}")
        if any((job.checkpoints or job.run_dir / "checkpoints").glob("step-*")):
            screen.say(f"  to go on from the newest checkpoint: {continuation(job, engine)}")
    sys.exit(outcome.exit_code)


@contextmanager
def shown_page(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, the run is shown in the browser."""
    from lockstep.observe.page.server import PageServer

    with PageServer([folder]) as server:
        say(f"  page: {server.address} (for this host alone; afterwards `lockstep page {folder}`)")
        yield


def show_timeline(folder: Path, say: Callable[[str], None]) -> None:
    """Puts the workers' parts together; the run's outcome does not depend on it."""
    try:
        say(f"  timeline: {write_trace(folder)} (open it in ui.perfetto.dev); `lockstep explain step {folder}`")
    except LockstepError as error:
        say(f"! {error}")


def check_engine(engine: Mapping[str, Any], spares: int, load_once: bool | None) -> None:
    """Raises if options of a cluster are given without one, or what it has not."""
    if "--on" not in engine and engine:
        raise BadArgument(f"{next(iter(engine))} says something of a cluster: give --on ray too, or leave it out")
    if "--on" in engine and spares:
        raise BadArgument("--spares cannot be had with --on ray: a lost worker is replaced by a new actor")
    if "--on" in engine and load_once:
        raise BadArgument("--load-once cannot be had with --on ray, which starts each worker by itself: leave it out")


def check_fault(copies: bool) -> None:
    """Raises if the fault on purpose waits for a copy that nobody makes."""
    fault = process_environment().get(FAULT, "")
    if not copies and fault.startswith(FaultKind.KILL):
        raise BadArgument(
            f'{FAULT}="{fault}" replaces the worker by a copy, which --no-copies rules out: write '
            f'"{fault.replace(FaultKind.KILL, FaultKind.REPLACE)}"'
        )


def pool_on(engine: Mapping[str, Any]) -> OpenPool:
    """What starts the workers. Ray is imported only if it is asked for."""
    if "--on" not in engine:
        return LocalPool
    try:
        ray_pool = importlib.import_module("lockstep.launch.pools.ray_pool")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "ray":
            raise
        raise BadEnvironment("--on ray needs Ray, which is not installed: pip install 'torch-lockstep[ray]'") from error
    return cast(OpenPool, ray_pool.pool_for(engine))


def continuation(job: Job, engine: Mapping[str, Any] | None = None) -> str:
    """The command line that resumes the job from its newest checkpoint."""
    settings = {
        **(engine or {}),
        "-n": job.num_workers,
        "--lanes": job.lanes,
        "--seed": job.seed,
        "--threads": job.threads,
        "--device": job.device,
        "--strategy": job.strategy,
        "--assignment": None if job.assignment is None else write_assignment(job.assignment),
        "--spares": job.spares or None,
        "--fault-budget": None if job.fault_budget == FAULT_BUDGET else job.fault_budget,
        "--hang-s": None if job.hang_s == HANG_S else f"{job.hang_s:g}",
        "--checkpoints": job.checkpoints,
        "--checkpoint-every": job.checkpoint_every,
        "--checkpoint-keep": job.checkpoint_keep,
        "--run-dir": job.run_dir,
        "--resume": "auto",
    }
    options = [
        word
        for name, value in settings.items()
        if value is not None
        for word in (name, f"{value:g}" if isinstance(value, float) else str(value))
    ]
    flags = ["--no-copies"] * (not job.copies) + ["--torch-distributed"] * job.torch_distributed
    flags += [] if job.rebalance is None else ["--rebalance" if job.rebalance else "--no-rebalance"]
    flags += [] if job.load_once is None else ["--load-once" if job.load_once else "--no-load-once"]
    flags += ["--timeline"] * job.timeline + ["-m"] * job.module
    return shlex.join(["lockstep", "run", *options, *flags, job.program, *job.arguments])


def note_misplaced_workers(program: str, arguments: Sequence[str]) -> None:
    """Says it where `-n` stands after PROGRAM and not before it: the program gets it, which is seldom meant."""
    context = click.get_current_context()
    (workers,) = (option.name for option in context.command.params if "--workers" in option.opts)
    found = next((one for one in arguments if re.match(r"-n\d*$|--workers(=|$)", one)), None)
    if found is not None and context.get_parameter_source(str(workers)) is ParameterSource.DEFAULT:
        click.echo(
            f"  note: {found} stands after {program}, so it is the program's own. Options of lockstep come before it: "
            f"{context.command_path} -n 2 {program}",
            err=True,
        )


def check_script(program: str) -> None:
    """Raises unless Python can run the path; names scripts that are spelled alike."""
    path = Path(program)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise BadArgument(f"{program} is a folder without a __main__.py: name the script in it")
    siblings = [str(script) for script in path.parent.glob("*.py")]
    near = difflib.get_close_matches(str(path), siblings, n=3)
    raise BadArgument(f"there is no script {program}" + (f"; did you mean {' or '.join(near)}?" if near else ""))


def check_module(program: str) -> None:
    """Raises unless the module's outermost package can be found. Imports nothing."""
    package = program.partition(".")[0]
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        exists = bool(package) and importlib.util.find_spec(package) is not None
    finally:
        sys.path.remove(here)
    if not exists:
        raise BadArgument(
            f"there is no module {program}: it is looked for in this folder and where Python has packages"
        )


def check_assignment(assignment: Assignment | None, workers: int, lanes: int | None) -> None:
    """Raises unless the assignment is for this many workers and lanes."""
    if assignment is None:
        return
    if assignment.num_workers != workers:
        raise BadArgument(f"--assignment names {count(assignment.num_workers, 'worker')}, but --workers is {workers}")
    if lanes not in (None, assignment.num_lanes):
        raise BadArgument(f"--assignment carries {assignment.num_lanes} lanes, but --lanes is {lanes}")


def make_folder(run_dir: Path | None, program: str) -> Path:
    if run_dir is None:
        return new_run_folder(Path("runs"), name_from(program))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(f"--run-dir {run_dir} cannot be made: {error.strerror}") from error
    return run_dir
