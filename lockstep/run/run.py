"""The run as the user holds it."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.chance import Generators
from lockstep.data import GlobalBatch, ShardedLoader
from lockstep.data.moving import Moving
from lockstep.elastic.guard import Continuity, Signals
from lockstep.elastic.waits import Waits
from lockstep.errors import BadArgument, Disagreement, LockstepError, Misuse, WorkerLost, advise, told_as_lost
from lockstep.events import Closed, Events, LaneEnded, Said
from lockstep.gradients.arrangement import Wanted
from lockstep.gradients.batchnorm import connect, norms_by_lane, told_by_lane
from lockstep.gradients.buffers import Buffers, buffer_places, refuse_new_buffers
from lockstep.gradients.health import HealthPlan
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import SUMMED, Wish
from lockstep.gradients.squares import SquaresPlan
from lockstep.gradients.updates import FlatUpdates, check_flat
from lockstep.launch.exits import TERMINATED
from lockstep.launch.status import Call, NoStatus, Phase, StatusWriter, Trait
from lockstep.optim.noise import Noise
from lockstep.run import active
from lockstep.run.autosave import Keeping
from lockstep.run.capture.functions import Capturing
from lockstep.run.noise import NoiseWatch
from lockstep.run.placement import place_on
from lockstep.run.replication import join
from lockstep.run.step_loop import Stage, Stepping, as_global_batch
from lockstep.run.totals import total_of
from lockstep.run.untracked import Strangers
from lockstep.script.place import Loop, Places
from lockstep.script.schedulers import is_fresh, untracked
from lockstep.script.site import Site, calling_frame, counts, site_of
from lockstep.settings.environment import Overrides
from lockstep.settings.options import Settings
from lockstep.state.checkpoints import file as checkpoint
from lockstep.state.checkpoints.options import asked_by_script
from lockstep.state.models import Models, RegistrationWatch, Stateful, refuse_new_parameters
from lockstep.state.progress import Progress
from lockstep.state.run_state import Parts, restore
from lockstep.strategies.replicated import Engine
from lockstep.verify.digest import digest
from lockstep.verify.trace import Sources
from lockstep.wire import Agreement, Proposal, Wire

Module = TypeVar("Module", bound=torch.nn.Module)


MOST_PATIENCE_MINUTES = 24 * 60


class Run:
    """One worker's hold on a run; made by `lockstep.start()`. Also a context manager that closes it.

    Everything here is called by every worker, in the same order, unless it says otherwise.
    """

    def __init__(
        self,
        settings: Settings,
        wire: Wire,
        events: Events,
        undo: ExitStack,
        status: StatusWriter | NoStatus,
        overrides: Overrides,
    ) -> None:
        self._settings = settings
        self._overrides = overrides
        self._undo = undo
        self._tracing = overrides.trace_dir is not None
        self._wire = wire
        self._events = events
        self._models = Models()
        self._engine: Engine | None = None
        self._flat: FlatUpdates | None = None
        self._watch = RegistrationWatch()
        self._sites: set[Site] = set()
        self._optimizer_hooks: dict[str, Any] = {}
        self._noise = NoiseWatch(self._models, events)
        self._moving = Moving(settings.device)
        self._progress = Progress()
        places = Places(self._models, self._progress)
        self._stepping = Stepping(
            wire.world.rank, settings.seed, settings.assignment, events, self._noise, places, self._moving
        )
        undo.callback(Strangers(self._models, self._stepping, lambda text: events.emit(Said(text))).close)
        self._parts = Parts(self._models, self._stepping, self._progress)
        self._status = status
        self._waits = Waits(wire, status)
        self.signals = Signals()
        self.continuity = Continuity(
            self._parts, wire, events, self.signals, self._status, self._end_by, settings.by_hand
        )
        self._stepping.surroundings = self.continuity
        self._keeping = Keeping(self._parts, settings, overrides, self._waits, events, self.continuity)
        self._capturing = Capturing(settings, self._models, self._stepping, events, self._ready_engine, self._own_hooks)
        self._has_looked_for_schedulers = False
        self._told_of_norms = False
        self._closed = False
        self.failed = False
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
        if not self._sites:
            self._status.is_known_as(Trait.READS_RANK)
            self.continuity.needs_first = True
        return self.continuity.rank

    @property
    def is_first(self) -> bool:
        """Whether this worker is the present first one: it prints and saves for all."""
        return self.continuity.is_first

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return self._wire.world.size

    @property
    def device(self) -> torch.device:
        """Where this worker computes: its GPU, or the CPU. Lanes arrive there."""
        return self._settings.device

    @property
    def step(self) -> int:
        """How many training steps are done."""
        if self._engine is not None and not self.failed:
            self._keeping.look()
        return self._stepping.step

    @property
    def epoch(self) -> int:
        """The epoch under way in `run.epochs`, from 0."""
        if self._engine is not None and not self.failed:
            self._keeping.look()
        return self._progress.epoch

    @property
    def lane_count(self) -> int:
        """How many lanes the run has, on all workers together."""
        return self._stepping.assignment.num_lanes

    @property
    def seed(self) -> int:
        """The seed from which all keys of the run are made."""
        return self._stepping.seed

    @property
    def loss(self) -> float | None:
        """The loss of the last step over all lanes, equal on all workers; None unless run.backward told it."""
        return self._stepping.loss

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
        self._stepping.refuse_unless_outside("run.replicate")
        if self._settings.flat:
            check_flat(optimizers, self.device)
        self._models.add(module, optimizers, tracked)
        place_on(self.device, module, optimizers)
        with told_as_lost(self._stepping.step, "run.replicate"):
            join(self._models, self._waits.at(Call.REPLICATE))
        self._stepping.places.streams.look(Generators.now())
        for label, optimizer in self._models.optimizers.items():
            if label not in self._optimizer_hooks:
                self._optimizer_hooks[label] = optimizer.register_step_pre_hook(self._before_update)
        self._make_engine()
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
                say=lambda text: self._events.emit(Said(text)),
                batch=batch,
                moving=self._moving,
                least=lambda: self._stepping.least,
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
        self._stepping.refuse_unless_outside("run.checkpoints")
        self._refuse_without_model("run.checkpoints")
        self._keeping.begin(asked_by_script(folder, every_steps, every_minutes, keep, resume))
        return self.step

    # -- training -------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Counts epochs from the one a resumed run was in, or from 0, up to `count`."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise BadArgument(f"run.epochs takes a number of epochs, 0 or more, not {count!r}")
        return self._epochs(count)

    def lanes(self, batch: Any, *, train: bool | None = None) -> Iterator[Any]:
        """This worker's share of a global batch, lane by lane; when exhausted, `p.grad` holds the step's gradient.

        Collective while training. Under `torch.no_grad()` or with the model in eval mode it is an evaluation:
        nothing is reduced. `train=True` makes it a training step although the model is in eval mode.
        """
        self._stepping.refuse_unless_outside("run.lanes")
        whole = as_global_batch(batch, self._stepping)
        in_training_mode = any(module.training for module in self._models.modules.values())
        frame = calling_frame()
        if train or (train is None and in_training_mode and torch.is_grad_enabled()):
            return self._training_lanes(whole, Loop(site_of(frame), counts(frame)))
        if in_training_mode and self._ready_engine().has_buffers:
            # Forward passes in training mode without gradients move BatchNorm's statistics: they are averaged.
            return self._training_lanes(whole, Loop(site_of(frame), counts(frame), is_step=False))
        return self._evaluating_lanes(whole)

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, scaler: Any = None, reduction: str = "mean"
    ) -> None:
        """`loss.backward()` for the lane under way, which then counts by `weight` (samples if None) in `run.loss` too.

        With `reduction="sum"` the loss is a sum over the lane's samples: the step's gradient, and `run.loss`, are then
        the sums over all lanes. With a GradScaler as `scaler` it is `scaler.scale(loss).backward()`, and the loss is
        told unscaled.
        """
        if self._stepping.stage is not Stage.TRAINING or self._engine is None:
            raise Misuse(
                f"run.backward {self._stepping.stage.value}: write it inside `for x, y in run.lanes(batch):`, with the "
                "model in training mode and gradients enabled"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise BadArgument(f"run.backward takes a loss with one element, not {_described(loss)}")
        checked = _checked_weight(weight, reduction)
        self._engine.tell(loss, checked)
        if weight is not None and checked is not None:
            self._stepping.told(checked)
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
        return self._stepping.carried.values

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside may stand outside of run.lanes; their gradients stay this worker's own in `p.grad`.

        The next step's gradient is added to them, so they must be equal on all workers. Inside a lane the lane's
        gradients stay in `p.grad` until it ends: more backward passes may follow, and what stands there may be changed.
        """
        with self._ready_engine().pausing():
            yield

    def captured(self, fn: Callable[..., Any], optimizer: Optimizer | None = None) -> Callable[..., Any]:
        """`fn`, which runs forward and backward of a lane, recorded into a CUDA graph once per shape and replayed.

        Call what is returned inside of run.lanes, with the lane's data; it returns copies of what `fn` returned. Python
        inside `fn` runs only when it is recorded. With an `optimizer` (made with capturable=True) its step() is
        replayed too. What cannot be recorded runs as it is, and a note says why. The bits are the same either way.
        """
        return self._capturing.capture(fn, optimizer)

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
        self._stepping.refuse_unless_outside("run.total")
        try:
            with told_as_lost(self._stepping.step, "run.total"):
                return total_of(value, self._stepping.visits, self._waits.at(Call.TOTAL), self._stepping.step)
        except Disagreement as failure:
            self._keeping.rescue(self.continuity.parts(failure, "run.total"))
        except WorkerLost as lost:
            self._keeping.rescue(lost)

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Puts a checkpoint at `path`: whole, or the one before stays. Worker 0 writes; the others do nothing."""
        if not self._closed:
            self._stepping.refuse_unless_outside("run.save")
        self._refuse_without_model("run.save")
        if self.is_first:
            checkpoint.write(_checked_path("run.save", path), self._parts.capture())

    def resume(self, path: str | os.PathLike[str]) -> int:
        """Collective. Goes on from the checkpoint at `path`, on any number of workers; returns its step.

        Call it after `replicate`. The lanes and the seed are the checkpoint's. A worker that joins a run under way is
        given the state of that run instead.
        """
        self._stepping.refuse_unless_outside("run.resume")
        self._refuse_without_model("run.resume")
        if not self.continuity.is_member:
            return self.step
        with told_as_lost(self._stepping.step, "run.resume"):
            wire = self._waits.at(Call.RESUME)
            elsewhere = restore(self._parts, _checked_path("run.resume", path), self._settings, wire)
        if elsewhere:
            self._events.emit(Said(elsewhere))
        return self.step

    # -- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the run on this worker and gives back what it holds. May be called twice."""
        if self._closed or os.getpid() != self.continuity.pid:  # what the worker has forked takes no part
            return
        self._closed = True
        self._status.enter(Phase.SAVING, self._stepping.step)
        self._keeping.close()
        self._stepping.stage = Stage.CLOSED
        self._events.emit(Closed(self._stepping.step))
        self._status.enter(Phase.ENDED, self._stepping.step)
        for loader in self._progress.loaders.values():
            loader.close()
        self._watch.close()
        self._capturing.close()
        if self._engine is not None:
            self._engine.close()
        if self._flat is not None:
            self._flat.close()
        for hook in self._optimizer_hooks.values():
            hook.remove()
        if not self.failed and self.continuity.is_member:
            self._part()
        self._wire.close()
        if self.continuity.recovery is not None:
            self.continuity.recovery.close()
        self._status.close()
        self._undo.close()
        world = self._wire.world
        active.deactivate(self, has_changed=world.generation > 1 or (self.failed and world.size > 1))

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.failed = self.failed or error is not None
        self.close()

    # -- inside ---------------------------------------------------------------------------------------------

    def _training_lanes(self, batch: GlobalBatch, loop: Loop) -> Iterator[Any]:
        engine = self._ready_engine()
        if self._watch.noticed:
            refuse_new_parameters(self._models, engine.named)
            self._models.check_optimizers_cover_known_parameters()
            engine.buffers = self._buffers()
            self._stepping.least = self._least()
            self._watch.noticed = False
        if loop.is_step and self._settings.stop_after is not None and self._stepping.step >= self._settings.stop_after:
            self.close()
            raise SystemExit(0)
        if loop.is_step:
            self._keeping.train()
            self._look_for_schedulers()
            self._tell_of_norms(batch)
            self._progress.trains_on(batch.loader)
        is_first_turn = loop.site not in self._sites
        self._sites.add(loop.site)
        return self._watched(self._stepping.training(batch, engine, loop), engine, is_first_turn)

    def _tell_of_norms(self, batch: GlobalBatch) -> None:
        """Once, in the first step, by worker 0."""
        if not self._told_of_norms and self.is_first:
            plan = StepPlan(self._stepping.step, batch.num_samples, self._stepping.assignment, least=batch.least)
            text = told_by_lane(self._models.modules.values(), plan.shares.values(), self.lane_count)
            if text:
                self._events.emit(Said(text))
        self._told_of_norms = True

    def _look_for_schedulers(self) -> None:
        """Once, when training begins: one that nobody tracks is told, and refused where it cannot be right."""
        if self._has_looked_for_schedulers:
            return
        self._has_looked_for_schedulers = True
        for scheduler in untracked(self._models.optimizers.values(), self._models.tracked.values()):
            text = (
                f"{type(scheduler).__name__} is a scheduler that run.replicate was not given: it is not saved, and a "
                "worker that joins has another one. Write run.replicate(model, optimizer, scheduler=scheduler)."
            )
            if self._stepping.step > 0 and is_fresh(scheduler):
                self.continuity.refuses(f"the run goes on from step {self._stepping.step}, and {text}")
            self._events.emit(Said(text))

    def _evaluating_lanes(self, batch: GlobalBatch) -> Iterator[Any]:
        self._progress.evaluates(batch)
        lanes = self._stepping.evaluating(batch)
        return lanes if self._engine is None else self._watched(lanes, self._engine, is_first_turn=False)

    def _watched(self, lanes: Iterator[Any], engine: Engine, is_first_turn: bool) -> Iterator[Any]:
        """The lanes of a loop; buffers that they have added to the models are refused when they are done."""
        known = buffer_places(self._modules()) if self._watch.noticed else None
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
        self._keeping.loader_asks(loader)
        self.continuity.loader_asks()
        return self._stepping.lanes

    def _make_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        named, settings = self._models.parameters(), self._settings
        self._flat = self._flat_updates()
        wanted = Wanted(settings.bucket_bytes, settings.reduce_dtype, self._flat)
        self._engine = Engine(self._wire, named, self._buffers(), wanted)
        self._engine.health = HealthPlan(self.state, self._settings.not_finite, self._settings.drift_every)
        self._engine.squares = SquaresPlan(self._settings.noise_every, self._noise.weigh)
        self._engine.awaits = self.continuity.awaits
        self._engine.rules.says = lambda text: self._events.emit(Said(text))
        self.continuity.engine = self._engine
        if self._tracing:
            self._engine.sight = lambda lane, grads: self._events.emit(LaneEnded(self._stepping.step, lane, grads))
        self._stepping.statistics = connect(self._modules(), self._waits.at(Call.STATISTICS).transport)
        self._stepping.least = self._least()
        self._watch.noticed = True

    def _flat_updates(self) -> FlatUpdates | None:
        if self._flat is not None:
            self._flat.close()
        return FlatUpdates(list(self._models.optimizers.values())) if self._settings.flat else None

    def _buffers(self) -> Buffers:
        return Buffers(self._modules(), self._models.name_prefixes())

    def _least(self) -> int:
        """How many samples the models need at a time. See Note [No lane with a single sample] in lanes.py."""
        return 2 if norms_by_lane(self._models.modules.values()) else 1

    def _epochs(self, count: int) -> Iterator[int]:
        if self._engine is not None:
            self._keeping.take_up()
        yield from self._progress.epochs(count)

    def _end_by(self, wish: Wish) -> None:
        """All workers have agreed to end here because of a signal."""
        self.close()
        if wish is Wish.INTERRUPT:
            raise KeyboardInterrupt
        raise SystemExit(TERMINATED)

    def _ready_engine(self) -> Engine:
        self._refuse_without_model("this")
        assert self._engine is not None
        return self._engine

    def _refuse_without_model(self, what: str) -> None:
        if self._engine is None:
            raise Misuse(f"{what} needs a model: call run.replicate(model, optimizer) first")

    def _own_hooks(self) -> set[int]:
        own = {hook.id for hook in self._optimizer_hooks.values()}
        return own if self._flat is None else own | self._flat.hook_numbers

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self._models.look_at(optimizer)
        self._stepping.updated(optimizer)

    def _part(self) -> None:
        """All workers should end at the same step; one that ends early is named to those that go on."""
        with self._status.awaiting(Call.END), suppress(LockstepError):
            Agreement(
                self._wire.transport, Proposal({"operation": "end of the run", "step": self._stepping.step})
            ).check()


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
