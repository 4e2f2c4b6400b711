"""The run as the user holds it."""

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.capture.captures import Captures
from lockstep.chance import Generators
from lockstep.data import ShardedLoader
from lockstep.data.device import DeviceMover, to_device
from lockstep.determinism.onednn import OneDnnSwitch
from lockstep.elastic.formation import Elasticity, Formation
from lockstep.elastic.guard import Guard
from lockstep.elastic.shown_waits import shown
from lockstep.errors import Disagreement, Misuse, WorkerLost, advise, naming_lost_worker
from lockstep.events import Closed, Wait
from lockstep.launch.channels.status import Trait
from lockstep.observe.metrics import MetricsLog
from lockstep.optim.noise import Noise
from lockstep.optim.noise.watch import NoiseWatch
from lockstep.run import active
from lockstep.run.arguments import (
    checked_epochs,
    checked_loss,
    checked_patience_s,
    checked_weight,
    clipped_parameters,
)
from lockstep.run.autosave import Autosave
from lockstep.run.circumstances import circumstances
from lockstep.run.context import Context
from lockstep.run.loaders import Loaders
from lockstep.run.replication import join, place_on
from lockstep.run.timeline import RunTimeline
from lockstep.script.places import Places
from lockstep.settings.paths import as_path
from lockstep.state.carried import Carried
from lockstep.state.checkpoints import file as checkpoint
from lockstep.state.checkpoints.plan import script_options
from lockstep.state.checkpoints.trail import TrailFollower
from lockstep.state.models import Models, Stateful
from lockstep.state.run_state import RunState, StepState
from lockstep.step.body_passes import LOOP_FOR_EACH
from lockstep.step.deferral import Update, steps_of
from lockstep.step.lane_loops import LaneLoops
from lockstep.step.step_loop import Stage, StepLoop, as_global_batch
from lockstep.step.totals import gathered, total_of
from lockstep.step.updates import UntrackedOptimizers, UpdateHooks
from lockstep.strategies import Replicas
from lockstep.verify.digest import digest
from lockstep.verify.trace import Sources
from lockstep.wire import Wire
from lockstep.wire.generation import Generation

Module = TypeVar("Module", bound=torch.nn.Module)


class Run:
    """One worker's hold on a run; made by `lockstep.start()`. Also a context manager that closes it.

    Everything here is called by every worker, in the same order, unless it says otherwise.
    """

    def __init__(self, context: Context, generation: Generation, elasticity: Elasticity | None) -> None:
        settings, events = context.settings, context.events
        self._settings, self._overrides, self._events = settings, context.overrides, events
        self._status, self._undo = context.status, context.undo
        self._models, self._progress = Models(), context.progress
        self._noise = NoiseWatch(self._models.optimizers, events)
        moving = DeviceMover(settings.device)
        self._places = Places(self._models, self._progress)
        carried = Carried(settings.device)
        self._engine = context.engine(generation, self._noise, self.state)
        steps = StepState(settings.seed, settings.assignment.num_lanes)
        self._state = RunState(
            self._models, self._progress, steps, self._noise, carried, self._places, self._engine, settings.device
        )
        self._formation = Formation(
            self._state, self._places, self._engine, generation, elasticity, events, context.status,
            settings.by_hand, settings.rebalance and settings.device.type == "cpu", settings.exact,
        )  # fmt: skip
        self.guard = Guard(self._formation, self._state, self._places, self._engine, events, self.close)
        self._loop = StepLoop(
            self._state, self._places, carried, self._noise, self._engine, self.guard, moving, events, self._show,
            OneDnnSwitch(settings.exact, settings.device),
        )  # fmt: skip
        self.trail = TrailFollower(self._models, partial(circumstances, settings), events.note, settings.exact)
        """What shows that a run which goes on does what the one before did."""
        self._autosave = Autosave(
            self._state, self.guard, settings, self._overrides, events, context.status, self.trail
        )
        self._lane_loops = LaneLoops(
            self._loop,
            self._engine,
            self.guard,
            events,
            self._autosave.train,
            self._autosave.trained,
            settings.stop_after,
            self.close,
        )
        self._loaders = Loaders(
            self._state, self._formation, self._engine, moving, events,
            self._autosave.take_up, self._autosave.loader_asks, self._loop.refuse_again,
        )  # fmt: skip
        self._updates = UpdateHooks(self._loop, self._engine, self.guard, events, self._autosave.updated)
        self._captures = Captures(settings, self._models, events, self._engine, self._loop.misplaced, self._updates.ids)
        self._metrics = MetricsLog(context.overrides.run_dir, self._formation, events, self._state.steps)
        self._timeline = RunTimeline(
            events, self._overrides.run_dir, settings.device.type, lambda: self._formation.number,
            launcher_merges=self._overrides.status_fd is not None,
        )  # fmt: skip
        self._undo.callback(UntrackedOptimizers(self._loop, self.guard).close)
        self._closed = self.failed = False
        models = self._models
        self.sources = Sources(self.state, self.buffer_names, models.gradients, models.rates, lambda: self.failed)
        """What a trace of this run asks it."""

    # -- who and where --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number now, from 0. It may become lower when workers are lost.

        A script that asks for it before it trains may have given worker 0 things that no other worker has (a writer).
        So if worker 0 is lost there, nobody else becomes 0 as long as a replacement may come, and it is waited for.
        """
        if not self._lane_loops.has_trained:
            self._status.add_trait(Trait.READS_RANK)
            self._formation.first.is_needed = True
        return self._formation.rank

    @property
    def is_first(self) -> bool:
        """Whether this worker is the present first one: it prints and saves for all."""
        return self._formation.is_first

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return self._formation.generation.world.size

    @property
    def device(self) -> torch.device:
        """Where this worker computes: its GPU, or the CPU. Lanes arrive there."""
        return self._settings.device

    @property
    def step(self) -> int:
        """How many training steps are done."""
        if self._models.modules and not self.failed:
            self._autosave.look()
        return self._loop.step

    @property
    def epoch(self) -> int:
        """The epoch under way in `run.epochs`, from 0."""
        if self._models.modules and not self.failed:
            self._autosave.look()
        return self._progress.epoch

    @property
    def lane_count(self) -> int:
        """How many lanes the run has, on all workers together."""
        return self._state.steps.num_lanes

    @property
    def seed(self) -> int:
        """The seed from which all keys of the run are made."""
        return self._state.steps.seed

    @property
    def loss(self) -> float | None:
        """The loss of the last step over all lanes, equal on all workers; None unless run.backward records it."""
        return self._state.steps.loss

    @property
    def noise(self) -> Noise:
        """The gradient noise scale with its interval, as the run's optimizer sees it; equal on all workers.

        `noise.critical_batch` is the batch up to which growing pays, if `noise.sure`. It needs two lanes or more.
        """
        return self._noise.noise

    # -- setting up -----------------------------------------------------------------------------------------

    def replicate(self, module: Module, *optimizers: Optimizer, **tracked: Stateful) -> Module:
        """Collective. Makes `module` and its optimizers equal on all workers, trains them together; returns `module`.

        The first worker's values go to all; different models are refused with the difference. What is on the CPU goes
        to `run.device`, in place. What else has a state_dict is given by name (`scheduler=s`) and is saved and resumed
        too.
        """
        self._loop.refuse_unless_outside("run.replicate")
        self._models.add(module, optimizers, tracked)
        place_on(self.device, module, optimizers)
        with naming_lost_worker(self._loop.step, "run.replicate"):
            join(self._models, self._shown_wire(Wait.REPLICATE))
        self._places.streams.look(Generators.now())
        self._updates.attach()
        modules = list(self._models.modules.values())
        replicas = Replicas(self._models.parameters(), modules, self._models.name_prefixes())
        self._engine.hold(replicas, self._formation.generation)
        self._lane_loops.look_at_models()
        return module

    def shard(self, loader: "DataLoader[Any]", *, batch: str = "split") -> ShardedLoader:
        """Your DataLoader, read by lanes: its batch_size is the global batch, each worker loads only its own lanes.

        With `batch="grow"` its batch_size is that of each lane: a global batch has `lane_count` times as many samples,
        and a note says so. Learning rate and schedule stay as they are. Lanes arrive on `run.device`.
        """
        return self._loaders.shard(loader, batch)

    def checkpoints(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> int:
        """Collective. Goes on from the newest good checkpoint in `folder`, and saves there from now on; gives the step.

        Call it once, after `replicate`. `resume` is "auto", "never", or the path of a checkpoint. Saving goes on in the
        background: every `every_steps` or `every_minutes`, whichever comes first (10 minutes if neither is given). The
        newest `keep` (3) good ones stay. A worker that joins a run under way is given the state of that run instead.
        """
        self._loop.refuse_unless_outside("run.checkpoints")
        self._models.require("run.checkpoints")
        self._autosave.begin(script_options(folder, every_steps, every_minutes, keep, resume))
        return self.step

    # -- training -------------------------------------------------------------------------------------------

    def epochs(self, count: int, *, start: int = 0) -> Iterator[int]:
        """Counts epochs from the one a resumed run was in, or from `start`, up to `count`.

        `start` is for scripts that have loaded a checkpoint of their own: loaders begin with the order of that epoch.
        """
        checked_epochs(count, start)
        return self._loaders.epochs(count, start)

    def lanes(self, batch: Any, *, train: bool | None = None) -> Iterator[Any]:
        """This worker's share of a global batch, lane by lane; when exhausted, `p.grad` holds the step's gradient.

        Collective while training. Under `torch.no_grad()` or with the model in eval mode it is an evaluation:
        nothing is reduced. `train=True` makes it a training step although the model is in eval mode.
        """
        self._loop.refuse_unless_outside("run.lanes")
        whole = as_global_batch(batch, self._formation.generation, self._engine.min_samples)
        return self._lane_loops.begin(whole, train)

    def steps(
        self,
        loader: Iterable[Any],
        update: Update = None,
    ) -> Iterator[Any]:
        """The lanes of every batch of `loader`, in one loop, for a body that was written for one device.

        After the lanes of a batch `update()` is called, on every worker. Without one, step() and zero_grad() of the
        optimizers may stand in the body: they do nothing in the lanes, and are done once after the batch. With
        `enumerate(loader)` the number of the batch comes along, with each of its lanes. A body with several updates, as
        a GAN's, runs once for each of them: `update` is then the list of their optimizers, in order. Functions at the
        end of that list are called after the updates of a batch.
        """
        self._loop.refuse_unless_outside("run.steps")
        return steps_of(
            loader, self.lanes, self._lane_loops.trains, update, self._models, lambda: self._engine.buffers,
            self._loop.begin_pass,
        )  # fmt: skip

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, scaler: Any = None, reduction: str = "mean"
    ) -> None:
        """`loss.backward()` for the lane under way, which then counts by `weight` (samples if None) in `run.loss` too.

        With `reduction="sum"` the loss is a sum over the lane's samples: the step's gradient, and `run.loss`, are then
        the sums over all lanes. With a GradScaler as `scaler` it is `scaler.scale(loss).backward()`, and the loss is
        recorded unscaled.
        """
        if self._loop.stage is not Stage.TRAINING:
            raise Misuse(
                f"run.backward {self._loop.stage.value}: write it inside `for x, y in run.lanes(batch):`, with the "
                "model in training mode and gradients enabled"
            )
        checked = checked_loss(loss), checked_weight(weight, reduction)
        if not self._loop.body_pass.counts:
            return
        self._engine.record_loss(*checked)
        try:
            (loss if scaler is None else scaler.scale(loss)).backward()
        except RuntimeError as error:
            advise(error)
            raise

    @property
    def carried(self) -> dict[str, Any]:
        """What the lane under way carries from step to step: tensors and plain values, which go where the lane goes.

        What a lane leaves here counts with its step. In an evaluation it lasts until the next training step.
        """
        if self._loop.body_pass.num_passes > 1:
            raise Misuse(
                f"run.carried in a body of run.steps with several updates would be written for each. {LOOP_FOR_EACH}"
            )
        return self._loop.carried.values

    @property
    def carried_by_lane(self) -> Mapping[int, Mapping[str, Any]]:
        """What every lane carries now, by lane, the same on every worker: for values that lanes report to all.

        Read it after the lanes. A lane without samples in the last step has what it carried before.
        """
        return self._loop.carried.by_lane

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside may stand outside of run.lanes; their gradients stay this worker's own in `p.grad`.

        The next step's gradient is added to them, so they must be equal on all workers. Inside a lane the lane's
        gradients stay in `p.grad` until it ends: more backward passes may follow, and what stands there may be changed.
        """
        self._models.require("this")
        with self._engine.pausing():
            yield

    def clip_grad_norm_(
        self,
        max_norm: float,
        parameters: torch.Tensor | Iterable[torch.Tensor] | None = None,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """torch's `clip_grad_norm_` of the step's gradient: of `parameters`, or of all replicated models together.

        Call it after the lanes, before `optimizer.step()`; with a GradScaler, after `scaler.unscale_(optimizer)`. Gives
        the norm from before. The bits are the same on any number of workers, under any strategy.
        """
        self._loop.refuse_unless_outside("run.clip_grad_norm_")
        clipped = clipped_parameters("run.clip_grad_norm_", max_norm, parameters, self._models)
        gradients = [parameter.grad for parameter in clipped if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
        if norm.device.type != "cpu" or not max_norm / (norm + 1e-6) >= 1.0:  # else torch would multiply by 1
            torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
        return norm

    def clip_grad_value_(self, value: float, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """torch's `clip_grad_value_`: no element of the step's gradient is beyond `value`. See `clip_grad_norm_`."""
        self._loop.refuse_unless_outside("run.clip_grad_value_")
        clipped = clipped_parameters("run.clip_grad_value_", value, parameters, self._models)
        torch.nn.utils.clip_grad_value_(clipped, value)

    def captured(self, fn: Callable[..., Any], optimizer: Optimizer | None = None) -> Callable[..., Any]:
        """`fn`, which runs forward and backward of a lane, recorded into a CUDA graph once per shape and replayed.

        Call what is returned inside of run.lanes, with the lane's data; it returns copies of what `fn` returned. Python
        inside `fn` runs only when it is recorded. With an `optimizer` (made with capturable=True) its step() is
        replayed too. What cannot be recorded runs as it is, and a note says why. The bits are the same either way.
        """
        return self._captures.capture(fn, optimizer)

    @contextmanager
    def patience(self, minutes: float) -> Iterator[None]:
        """Announces that this worker may do nothing for so long: inside, nobody takes it for late or hung.

        For a wait that uses no processor, such as an upload, a database or a lock. Not collective: the others wait
        where they need this worker. Without `lockstep run` it does nothing.
        """
        patience_s = checked_patience_s(minutes)
        with nullcontext() if self._closed else self._status.patient(patience_s):
            yield

    # -- looking and saving ---------------------------------------------------------------------------------

    def total(self, value: Any) -> Any:
        """Collective. The sum of `value` over all workers; every worker calls it after its lanes.

        Whole numbers are exact. For floats give a list with one number per lane computed: they are added in
        lane order, so that the sum has the same bits on any number of workers.
        """
        return self._of_all_lanes(Wait.TOTAL, partial(total_of, device=self.device), value)

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Collective. What all lanes have given, on every worker, in the order of loops and lanes.

        `values` has one entry for each lane that this worker has computed: numbers, strings, tensors, and dicts, lists
        and tuples of them. Tensors are on `run.device` afterwards.
        """
        entries = self._of_all_lanes(Wait.GATHER, gathered, values)
        return [to_device(entry, self.device) for entry in entries]

    def digest(self) -> str:
        """SHA-256 over parameters, buffers and optimizer state, by name. Any worker may call it alone."""
        return digest(self.state())

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state by name, as `digest` sees them; not copies."""
        return self._models.everything()

    def buffer_names(self) -> list[str]:
        """Which names of `state` are buffers."""
        return [name for name, _ in self._models.buffers()]

    def print(self, *values: Any, **options: Any) -> None:
        """Prints once: on the present first worker.

        In the lanes of a training step it prints once for the batch: what the first lane prints, when the step is
        committed. To a `file` it prints at once, what each lane of the first worker prints.
        """
        text = io.StringIO()
        print(*values, **{**options, "file": text, "flush": False})
        travels = options.get("file") in (None, sys.stdout) and self._loop.print(text.getvalue())
        if not travels and self.is_first:
            print(*values, **options)

    def _show(self, printed: str) -> None:
        """Prints, on the present first worker, what the lanes of a committed step have printed."""
        if printed and self.is_first:
            print(printed, end="", flush=True)

    def log(self, values: Mapping[str, Any]) -> None:
        """Logs numbers under the number of steps done; every worker calls it, outside of lanes, with the same values.

        The present first worker writes them, once, to `metrics.jsonl` in the run's folder and to what `log_to` names.
        """
        self._loop.refuse_unless_outside("run.log")
        self._metrics.log(self.step, values, is_again=self._places.resumption.is_before)

    def log_to(self, sink: Any) -> None:
        """What `log` is given goes to `sink` too: a logger of another library, or a function that makes it when needed.

        Every worker calls it. Only the present first one calls the function, and writes; what it makes it closes.
        """
        self._loop.refuse_unless_outside("run.log_to")
        self._metrics.add(sink)

    def timeline(self, steps: int | None = 20, folder: str | os.PathLike[str] | None = None) -> None:
        """Writes what this worker does in the next `steps` steps (None: in all) to the run's timeline, for Perfetto.

        Not collective, but all workers should call it. `folder` is needed where the run has none: without
        `lockstep run`. At the end of the run `timeline.json` there is the trace of all workers.
        """
        if not self._closed:
            self._timeline.begin(steps, folder)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Puts a checkpoint at `path`: whole, or the one before stays. Worker 0 writes; the others do nothing."""
        if not self._closed:
            self._loop.refuse_unless_outside("run.save")
        self._models.require("run.save")
        twice = self._places.resumption.changes.in_body()
        if twice is not None:
            raise Misuse(
                f"run.save behind a change of {twice}, in the body of a loop whose batch is not trained on yet: a run "
                "that is resumed from here has this batch again, and makes that change twice. Save at the end of the "
                "body, or before the change."
            )
        if self.is_first:
            place = as_path("run.save", path).absolute()
            checkpoint.write(place, self._state.capture())
            self.trail.saved(self._loop.step, lambda: place)

    def resume(self, path: str | os.PathLike[str]) -> int:
        """Collective. Goes on from the checkpoint at `path`, on any number of workers; returns its step.

        Call it after `replicate`. The lanes and the seed are the checkpoint's. A worker that joins a run under way is
        given the state of that run instead.
        """
        self._loop.refuse_unless_outside("run.resume")
        self._models.require("run.resume")
        if self._formation.is_member:
            self._autosave.resume(as_path("run.resume", path))
        return self.step

    # -- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the run on this worker and gives back what it holds. May be called twice."""
        if self._closed or os.getpid() != self._formation.pid:  # what the worker has forked takes no part
            return
        self._closed = True
        self._autosave.close()
        self._loop.stage = Stage.CLOSED
        self._events.emit(Closed)
        is_first = self.is_first
        self._loaders.close()
        self._lane_loops.close()
        self._captures.close()
        self._engine.close()
        self._updates.close()
        world = self._formation.generation.world
        if not self.failed and self._formation.is_member:
            self.guard.end()
        self._timeline.close(is_first)
        self._formation.close()
        self._status.close()
        self._undo.close()
        active.deactivate(self, has_changed=world.generation > 1 or (self.failed and world.size > 1))

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.failed = self.failed or error is not None
        self.close()

    # -- inside ---------------------------------------------------------------------------------------------

    def _of_all_lanes(self, wait: Wait, collect: Callable[..., Any], values: Any) -> Any:
        """A collective call with what this worker has after its lanes."""
        self._loop.refuse_unless_outside(wait.value)
        try:
            with naming_lost_worker(self._loop.step, wait.value):
                return collect(values, self._loop.visits, self._shown_wire(wait), self._loop.step)
        except Disagreement as failure:
            self._autosave.rescue(self.guard.exclude(failure, wait.value))
        except WorkerLost as lost:
            self._autosave.rescue(lost)

    def _shown_wire(self, wait: Wait) -> Wire:
        """The present wire, for a collective call of the user's script."""
        return shown(self._formation.generation.wire, self._events, wait)
