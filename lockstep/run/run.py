"""The run as the user holds it."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.capture.captures import Captures
from lockstep.chance import Generators
from lockstep.data import GlobalBatch, ShardedLoader
from lockstep.data.device import DeviceMover
from lockstep.elastic.guard import Elasticity, Guard
from lockstep.elastic.shown_waits import shown
from lockstep.errors import BadArgument, Disagreement, LockstepError, Misuse, WorkerLost, advise, naming_lost_worker
from lockstep.events import BatchLoaded, Closed, Events, UpdateBegan, UpdateEnded, Wait
from lockstep.gradients.batchnorm import lane_norm_note
from lockstep.gradients.bucket_set import BucketOptions
from lockstep.gradients.buffers import buffer_places, refuse_new_buffers
from lockstep.gradients.health import HealthPlan
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import SUMMED, StepRequest
from lockstep.gradients.shown_backward import shown_backward
from lockstep.gradients.squares import SquaresPlan
from lockstep.launch.exits import TERMINATED
from lockstep.launch.status import NoStatus, StatusWriter, Trait
from lockstep.observe.metrics import MetricsLog
from lockstep.optim.noise import Noise
from lockstep.optim.noise.watch import NoiseWatch
from lockstep.run import active
from lockstep.run.autosave import Autosave
from lockstep.run.deferral import DeferredUpdate, OwnUpdate, evaluation_lanes, training_steps
from lockstep.run.placement import place_on
from lockstep.run.replication import join
from lockstep.run.step_loop import Stage, StepLoop, as_global_batch
from lockstep.run.timeline import RunTimeline
from lockstep.run.totals import total_of
from lockstep.run.untracked import UntrackedOptimizers
from lockstep.script.body import refused_in_body
from lockstep.script.call_site import Site, calling_frame, site_of, whole_numbers
from lockstep.script.place import Places
from lockstep.script.turns import LaneLoop
from lockstep.script.unsaved import is_fresh, untracked
from lockstep.settings.environment import Overrides
from lockstep.settings.options import Settings
from lockstep.state.carried import Carried
from lockstep.state.checkpoints import file as checkpoint
from lockstep.state.checkpoints.plan import script_options
from lockstep.state.checkpoints.resume import restore
from lockstep.state.models import Models, RegistrationWatch, Stateful, refuse_new_parameters
from lockstep.state.progress import DataProgress
from lockstep.state.run_state import RunState, StepState
from lockstep.strategies import EngineOptions, Replicas, StepEngine, Strategy
from lockstep.verify.digest import digest
from lockstep.verify.trace import Sources
from lockstep.wire import Agreement, Proposal, Wire
from lockstep.wire.generation import Generation

Module = TypeVar("Module", bound=torch.nn.Module)


MOST_PATIENCE_MINUTES = 24 * 60


@dataclass(frozen=True)
class Context:
    """What a run is made in: what was asked for, who listens, where the launcher looks, and how to undo all of it."""

    settings: Settings
    strategy: Strategy
    overrides: Overrides
    events: Events
    status: StatusWriter | NoStatus
    undo: ExitStack
    progress: DataProgress


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
        self._moving = DeviceMover(settings.device)
        self._places = Places(self._models, self._progress)
        carried = Carried(settings.device)
        self._engine = context.strategy.engine(self._engine_options(), generation, events)
        steps = StepState(settings.seed, settings.assignment.num_lanes)
        self._state = RunState(
            self._models, self._progress, steps, self._noise, carried, self._places, self._engine, settings.device
        )
        self.guard = Guard(
            self._state, self._places, self._engine, generation, elasticity, events, context.status, self._end_by,
            settings.by_hand, settings.rebalance and settings.device.type == "cpu",
        )  # fmt: skip
        self._loop = StepLoop(
            self._state, self._places, carried, self._noise, self._engine, self.guard, self._moving, events
        )
        self._autosave = Autosave(self._state, self.guard, settings, self._overrides, events, context.status)
        self._captures = Captures(settings, self._models, events, self._engine, self._loop.misplaced, self._own_hooks)
        self._metrics = MetricsLog(context.overrides.run_dir, self.guard, events)
        self._timeline = RunTimeline(
            events,
            self._overrides.run_dir,
            settings.device.type,
            lambda: self.guard.generation.world.generation if self.guard.is_member else 0,
            launcher_merges=self._overrides.status_fd is not None,
        )
        self._watch = RegistrationWatch()
        self._sites: set[Site] = set()
        self._optimizer_hooks: dict[str, tuple[Any, Any]] = {}
        self._undo.callback(UntrackedOptimizers(self._models, self._loop.refuse_unless_outside, events.note).close)
        self._has_looked_for_schedulers = False
        self._has_noted_norms = False
        self._closed = False
        self.failed = False
        models = self._models
        self.sources = Sources(self.state, self.buffer_names, models.gradients, models.rates, lambda: self.failed)
        """What a trace of this run asks it."""

    def _engine_options(self) -> EngineOptions:
        settings = self._settings
        return EngineOptions(
            BucketOptions(settings.bucket_bytes, settings.reduce_dtype),
            HealthPlan(self.state, settings.not_finite, settings.drift_every),
            SquaresPlan(settings.noise_every, self._noise.weigh),
        )

    # -- who and where --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number now, from 0. It may become lower when workers are lost.

        A script that asks for it before it trains may have given worker 0 things that no other worker has (a writer).
        So if worker 0 is lost there, nobody else becomes 0 as long as a replacement may come, and it is waited for.
        """
        if not self._sites:
            self._status.add_trait(Trait.READS_RANK)
            self.guard.first.is_needed = True
        return self.guard.rank

    @property
    def is_first(self) -> bool:
        """Whether this worker is the present first one: it prints and saves for all."""
        return self.guard.is_first

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return self.guard.generation.world.size

    @property
    def device(self) -> torch.device:
        """Where this worker computes: its GPU, or the CPU. Lanes arrive there."""
        return self._settings.device

    @property
    def step(self) -> int:
        """How many training steps are done."""
        if self._has_models and not self.failed:
            self._autosave.look()
        return self._loop.step

    @property
    def epoch(self) -> int:
        """The epoch under way in `run.epochs`, from 0."""
        if self._has_models and not self.failed:
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
        for label, optimizer in self._models.optimizers.items():
            if label not in self._optimizer_hooks:
                before = optimizer.register_step_pre_hook(self._before_update)
                self._optimizer_hooks[label] = before, optimizer.register_step_post_hook(self._after_update)
        self._engine.hold(self._replicas(), self.guard.generation)
        self._watch.noticed = True
        return module

    def shard(self, loader: "DataLoader[Any]", *, batch: str = "split") -> ShardedLoader:
        """Your DataLoader, read by lanes: its batch_size is the global batch, each worker loads only its own lanes.

        With `batch="grow"` its batch_size is that of each lane: a global batch has `lane_count` times as many samples,
        and a note says so. Learning rate and schedule stay as they are. Lanes arrive on `run.device`.
        """
        return self._progress.add(
            lambda number: ShardedLoader(
                loader,
                seed=self.seed,
                num_lanes=self.lane_count,
                lanes=partial(self._lanes_to_load, number),
                index=number,
                say=self._events.note,
                loaded=lambda waited_s: self._events.emit(BatchLoaded, number, waited_s),
                batch=batch,
                mover=self._moving,
                least=lambda: self._engine.min_samples,
            )
        )

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
        self._refuse_without_model("run.checkpoints")
        self._autosave.begin(script_options(folder, every_steps, every_minutes, keep, resume))
        return self.step

    # -- training -------------------------------------------------------------------------------------------

    def epochs(self, count: int, *, start: int = 0) -> Iterator[int]:
        """Counts epochs from the one a resumed run was in, or from `start`, up to `count`.

        `start` is for scripts that have loaded a checkpoint of their own: loaders begin with the order of that epoch.
        """
        for number in (count, start):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise BadArgument(f"run.epochs takes a number of epochs, 0 or more, not {number!r}")
        return self._epochs(count, start)

    def lanes(self, batch: Any, *, train: bool | None = None) -> Iterator[Any]:
        """This worker's share of a global batch, lane by lane; when exhausted, `p.grad` holds the step's gradient.

        Collective while training. Under `torch.no_grad()` or with the model in eval mode it is an evaluation:
        nothing is reduced. `train=True` makes it a training step although the model is in eval mode.
        """
        self._loop.refuse_unless_outside("run.lanes")
        whole = as_global_batch(batch, self.guard.generation, self._engine.min_samples)
        frame = calling_frame()
        if train or (train is None and self._trains()):
            return self._training_lanes(whole, LaneLoop(site_of(frame), whole_numbers(frame)))
        if self._in_training_mode and self._ready_engine().buffers.slots:
            # Forward passes in training mode without gradients move BatchNorm's statistics: they are averaged.
            return self._training_lanes(whole, LaneLoop(site_of(frame), whole_numbers(frame), is_step=False))
        return self._evaluating_lanes(whole)

    def steps(self, loader: Iterable[Any], update: Callable[[], Any] | None = None) -> Iterator[Any]:
        """The lanes of every batch of `loader`, in one loop, for a body that was written for one device.

        After the lanes of a batch `update()` is called, on every worker. Without one, step() and zero_grad() of the
        optimizers may stand in the body: they do nothing in the lanes, and are done once after the batch.
        """
        self._loop.refuse_unless_outside("run.steps")
        if update is None and not self._trains():
            return evaluation_lanes(loader, self.lanes, self._trains)
        if update is not None:
            return training_steps(loader, self.lanes, self._trains, OwnUpdate(update))
        frame = calling_frame()
        if (why := refused_in_body(frame.f_code.co_filename, frame.f_lineno)) is not None:
            raise Misuse(why)
        return training_steps(loader, self.lanes, self._trains, DeferredUpdate(self._models))

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
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise BadArgument(f"run.backward takes a loss with one element, not {_described(loss)}")
        self._engine.record_loss(loss, _checked_weight(weight, reduction))
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
        return self._loop.carried.values

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside may stand outside of run.lanes; their gradients stay this worker's own in `p.grad`.

        The next step's gradient is added to them, so they must be equal on all workers. Inside a lane the lane's
        gradients stay in `p.grad` until it ends: more backward passes may follow, and what stands there may be changed.
        """
        with self._ready_engine().pausing():
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
        clipped = self._clipped("run.clip_grad_norm_", max_norm, parameters)
        gradients = [parameter.grad for parameter in clipped if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
        if norm.device.type != "cpu" or not max_norm / (norm + 1e-6) >= 1.0:  # else torch would multiply by 1
            torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
        return norm

    def clip_grad_value_(self, value: float, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """torch's `clip_grad_value_`: no element of the step's gradient is beyond `value`. See `clip_grad_norm_`."""
        torch.nn.utils.clip_grad_value_(self._clipped("run.clip_grad_value_", value, parameters), value)

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
        if not isinstance(minutes, int | float) or not 0 < minutes <= MOST_PATIENCE_MINUTES:
            raise BadArgument(f"run.patience takes minutes, more than 0 and at most a day's, not {minutes!r:.60}")
        with nullcontext() if self._closed else self._status.patient(60 * minutes):
            yield

    # -- looking and saving ---------------------------------------------------------------------------------

    def total(self, value: Any) -> Any:
        """Collective. The sum of `value` over all workers; every worker calls it after its lanes.

        Whole numbers are exact. For floats give a list with one number per lane computed: they are added in
        lane order, so that the sum has the same bits on any number of workers.
        """
        self._loop.refuse_unless_outside("run.total")
        try:
            with naming_lost_worker(self._loop.step, "run.total"):
                return total_of(value, self._loop.visits, self._shown_wire(Wait.TOTAL), self._loop.step)
        except Disagreement as failure:
            self._autosave.rescue(self.guard.exclude(failure, "run.total"))
        except WorkerLost as lost:
            self._autosave.rescue(lost)

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
        """Prints once: on the present first worker."""
        if self.is_first:
            print(*values, **options)

    def log(self, values: Mapping[str, Any]) -> None:
        """Logs numbers under the number of steps done; every worker calls it, outside of lanes, with the same values.

        The present first worker writes them, once, to `metrics.jsonl` in the run's folder and to what `log_to` names.
        """
        self._loop.refuse_unless_outside("run.log")
        self._metrics.log(self.step, values)

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
        self._refuse_without_model("run.save")
        if self.is_first:
            checkpoint.write(_checked_path("run.save", path), self._state.capture())

    def resume(self, path: str | os.PathLike[str]) -> int:
        """Collective. Goes on from the checkpoint at `path`, on any number of workers; returns its step.

        Call it after `replicate`. The lanes and the seed are the checkpoint's. A worker that joins a run under way is
        given the state of that run instead.
        """
        self._loop.refuse_unless_outside("run.resume")
        self._refuse_without_model("run.resume")
        if not self.guard.is_member:
            return self.step
        with naming_lost_worker(self._loop.step, "run.resume"):
            wire = self._shown_wire(Wait.RESUME)
            elsewhere = restore(self._state, _checked_path("run.resume", path), self._settings, wire)
        self.guard.deal()
        if elsewhere:
            self._events.note(elsewhere)
        return self.step

    # -- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the run on this worker and gives back what it holds. May be called twice."""
        if self._closed or os.getpid() != self.guard.pid:  # what the worker has forked takes no part
            return
        self._closed = True
        self._autosave.close()
        self._loop.stage = Stage.CLOSED
        self._events.emit(Closed)
        is_first = self.is_first
        for loader in self._progress.loaders.values():
            loader.close()
        self._watch.close()
        self._captures.close()
        self._engine.close()
        for hooks in self._optimizer_hooks.values():
            for hook in hooks:
                hook.remove()
        world = self.guard.generation.world
        if not self.failed and self.guard.is_member and self._end_together():
            self.guard.end()
        self._timeline.close(is_first)
        self.guard.close()
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

    def _training_lanes(self, batch: GlobalBatch, loop: LaneLoop) -> Iterator[Any]:
        engine = self._ready_engine()
        if self._watch.noticed:
            refuse_new_parameters(self._models, engine.replicas.parameters)
            self._models.check_optimizers_cover_known_parameters()
            engine.look_at_buffers()
            self._watch.noticed = False
        if loop.is_step and self._settings.stop_after is not None and self._loop.step >= self._settings.stop_after:
            self.close()
            raise SystemExit(0)
        if loop.is_step:
            self._autosave.train()
            self._look_for_schedulers()
            self._note_norms(batch)
            self._progress.trains_on(batch.loader)
        is_first_turn = loop.site not in self._sites
        self._sites.add(loop.site)
        return self._watched(self._loop.training(batch, loop), is_first_turn)

    @property
    def _in_training_mode(self) -> bool:
        return any(module.training for module in self._models.modules.values())

    def _trains(self) -> bool:
        """Whether a loop over lanes that begins now is a training step."""
        return self._in_training_mode and torch.is_grad_enabled()

    def _note_norms(self, batch: GlobalBatch) -> None:
        """Once, in the first step, by worker 0."""
        if not self._has_noted_norms and self.is_first:
            plan = StepPlan(self._loop.step, batch.num_samples, self.guard.generation.assignment, least=batch.least)
            text = lane_norm_note(self._models.modules.values(), plan.shares.values(), self.lane_count)
            if text:
                self._events.note(text)
        self._has_noted_norms = True

    def _look_for_schedulers(self) -> None:
        """Once, when training begins: one that nobody tracks is named, and refused where it cannot be right."""
        if self._has_looked_for_schedulers:
            return
        self._has_looked_for_schedulers = True
        for scheduler in untracked(self._models.optimizers.values(), self._models.tracked.values()):
            text = (
                f"{type(scheduler).__name__} is a scheduler that run.replicate was not given: it is not saved, and a "
                "worker that joins has another one. Write run.replicate(model, optimizer, scheduler=scheduler)."
            )
            if self._loop.step > 0 and is_fresh(scheduler):
                self.guard.refuse(f"the run goes on from step {self._loop.step}, and {text}")
            self._events.note(text)

    def _evaluating_lanes(self, batch: GlobalBatch) -> Iterator[Any]:
        self._progress.evaluates(batch)
        lanes = self._loop.evaluating(batch)
        return self._watched(lanes, is_first_turn=False) if self._has_models else lanes

    def _watched(self, lanes: Iterator[Any], is_first_turn: bool) -> Iterator[Any]:
        """The lanes of a loop; buffers that they have added to the models are refused when they are done."""
        engine = self._engine
        known = buffer_places(self._modules()) if self._watch.noticed else None
        with shown_backward(self._events):
            engine.begin_loop(is_first_turn)
            try:
                yield from lanes
            finally:
                engine.end_loop()
        if self._watch.noticed:
            known = engine.buffers.places if known is None else known
            refuse_new_buffers(self._modules(), self._models.name_prefixes(), known)

    def _modules(self) -> list[torch.nn.Module]:
        return list(self._models.modules.values())

    def _lanes_to_load(self, loader: int) -> tuple[int, ...]:
        """Asked by a loader before each batch: which lanes to load. It is also a moment to save at."""
        self._autosave.loader_asks(loader)
        self.guard.batch_is_due()
        return self.guard.generation.lanes

    def _epochs(self, count: int, start: int) -> Iterator[int]:
        if self._has_models:
            self._autosave.take_up()
        if start > self._progress.epoch:
            self._progress.start_at(start, self._loop.step)
        yield from self._progress.epochs(count)

    def _end_by(self, request: StepRequest) -> None:
        """All workers have agreed to end here because of a signal."""
        self.close()
        if request is StepRequest.INTERRUPT:
            raise KeyboardInterrupt
        raise SystemExit(TERMINATED)

    @property
    def _has_models(self) -> bool:
        return bool(self._models.modules)

    def _replicas(self) -> Replicas:
        return Replicas(self._models.parameters(), self._modules(), self._models.name_prefixes())

    def _shown_wire(self, wait: Wait) -> Wire:
        """The present wire, for a collective call of the user's script."""
        return shown(self.guard.generation.wire, self._events, wait)

    def _ready_engine(self) -> StepEngine:
        self._refuse_without_model("this")
        return self._engine

    def _refuse_without_model(self, what: str) -> None:
        if not self._has_models:
            raise Misuse(f"{what} needs a model: call run.replicate(model, optimizer) first")

    def _clipped(
        self, what: str, limit: float, parameters: torch.Tensor | Iterable[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """The parameters whose gradient is clipped."""
        self._loop.refuse_unless_outside(what)
        self._refuse_without_model(what)
        if isinstance(limit, bool) or not isinstance(limit, int | float | torch.Tensor) or not limit > 0:
            raise BadArgument(f"{what} takes a number above 0, not {limit!r:.60}")
        if parameters is None:
            return [named.parameter for named in self._models.parameters()]
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    def _own_hooks(self) -> set[int]:
        return {hook.id for hooks in self._optimizer_hooks.values() for hook in hooks}

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._models.look_at(optimizer)
        self._loop.updated(optimizer)
        self._events.emit(UpdateBegan, step=max(0, self._loop.step - 1))
        self._update(lambda: self._engine.before_update(optimizer, any((*args[1:], *kwargs.values()))))

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._update(lambda: self._engine.after_update(optimizer))
        self._events.emit(UpdateEnded, step=max(0, self._loop.step - 1))

    def _update(self, act: Callable[[], None]) -> None:
        """Collective under some strategies: with those who are left, if a worker is lost."""
        while True:
            try:
                with naming_lost_worker(self._loop.step, Wait.UPDATE):
                    return act()
            except WorkerLost as lost:
                self.guard.regroup(lost)

    def _end_together(self) -> bool:
        """All workers should end at the same step; one that ends early is named to those that go on. Whether all do."""
        facts = {"operation": "end of the run", "step": self._loop.step}
        try:
            with self._events.waiting(Wait.END):
                Agreement(self.guard.generation.wire.transport, Proposal(facts)).check()
        except LockstepError:
            return False
        return True


def _checked_weight(weight: float | None, reduction: str) -> float | None:
    """By what the lane counts."""
    if reduction not in ("mean", "sum"):
        raise BadArgument(f'run.backward takes reduction="mean" or reduction="sum", not {reduction!r:.60}')
    if reduction == "sum":
        if weight is not None:
            raise BadArgument(
                'run.backward takes weight= or reduction="sum", not both: a weight says how much the mean over a lane '
                "counts, and a sum counts whole"
            )
        return SUMMED
    return None if weight is None else _as_weight(weight)


def _as_weight(weight: float) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise BadArgument(f"a lane's weight must be 0 or a positive number, not {weight!r:.60}")
    return number


def _checked_path(what: str, path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise BadArgument(f"{what} takes the path of a checkpoint, not {type(path).__name__}")
    return Path(path)


def _described(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
