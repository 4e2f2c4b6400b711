"""Loops whose body stays as it was written for one device: `for x, y in run.steps(loader)`.

# Note [Deferred updates]
# A body that was written for a whole batch calls optimizer.step() and zero_grad() itself. Under run.steps it runs once
# for each lane. In the lanes these calls are noted and do nothing. When the step is committed, every worker makes the
# update, once: step() of every optimizer that run.replicate was given, then zero_grad(). A worker without lanes in a
# batch runs no body and makes the same update: so it cannot be learned from the body, and what bodies may defer is
# fixed. What else happens once for each batch (clipping, a schedule, logging) is given as a function, `update`. A body
# with several updates is given their optimizers: see Note [Passes over a body] in body_passes.py.

# Note [Weights after a deferred step]
# In the rest of the body, after its last step(), the weights are still those of before. An average of weights or a
# checkpoint that is taken there would be an old one, taken once for each lane of this worker. So until the body ends,
# operations are looked at: one that reads or writes a weight is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.data import GlobalBatch
from lockstep.errors import BadArgument, Misuse
from lockstep.gradients.autograd_graph import looking
from lockstep.gradients.buffers import LaneBuffers
from lockstep.script.call_site import calling_frame
from lockstep.script.lanes import IN_LANES, refused_in_body
from lockstep.script.schedulers import untracked
from lockstep.state.models import Models
from lockstep.step.body_passes import BodyPass, OrderedUpdates

GIVE_UPDATE = "Give what happens once for each batch as a function: run.steps(loader, update)."
GIVE_AFTER = (
    "Give it as a function after the optimizers, which is called once for each batch, after the update: "
    "run.steps(loader, [optimizer, function])."
)


Update = Callable[[], Any] | Optimizer | Sequence[Optimizer | Callable[[], Any]] | None
"""What a user gives to `run.steps`."""


class StepUpdate(Protocol):
    """What happens in a lane's body, and after the commit of its step."""

    @property
    def num_passes(self) -> int:
        """How many updates the body makes; it runs so many times for each lane."""

    def lane(self, now: BodyPass, is_first_batch: bool) -> AbstractContextManager[None]:
        """Stands around the body of one lane. The body is looked at closely in the first batch."""

    def perform(self, number: int) -> None:
        """After the commit of a pass, on every worker: makes its update."""


def steps_of(
    batches: Iterable[Any],
    lanes: Callable[[Any], Iterator[Any]],
    trains: Callable[[], bool],
    update: Update,
    models: Models,
    buffers: Callable[[], LaneBuffers],
    begin_pass: Callable[[BodyPass], None],
) -> Iterator[Any]:
    """The lanes of every batch, each with the update that the user gives, or that the body of the loop writes.

    `begin_pass` is called before the lanes of each pass over the body.
    """
    given = [] if update is None else [update] if isinstance(update, Optimizer) else update
    if not isinstance(given, Sequence):
        return _training_steps(batches, lanes, trains, OwnUpdate(given), begin_pass)
    if not trains():
        return _evaluation_lanes(batches, lanes, trains)
    frame = calling_frame()
    if (why := refused_in_body(frame.f_code.co_filename, frame.f_lineno)) is not None:
        raise Misuse(why)
    return _training_steps(batches, lanes, trains, DeferredUpdate(models, buffers, given), begin_pass)


def _training_steps(
    batches: Iterable[Any],
    lanes: Callable[[Any], Iterator[Any]],
    trains: Callable[[], bool],
    update: StepUpdate,
    begin_pass: Callable[[BodyPass], None],
) -> Iterator[Any]:
    """The lanes of every batch; after those of each the update is made."""
    is_first_batch, lanes = True, _with_numbers(batches, lanes)
    for batch in batches:
        if not trains():
            raise Misuse(
                "a loop over run.steps that trains has come to a batch with the model in eval mode, or with gradients "
                "off: call model.train() before it, and evaluate in a loop of its own"
            )
        for number in range(update.num_passes):
            begin_pass(now := BodyPass(number, update.num_passes))
            for data in lanes(batch):
                with update.lane(now, is_first_batch):
                    yield data
            begin_pass(BodyPass())
            update.perform(number)
        is_first_batch = False


def _evaluation_lanes(
    batches: Iterable[Any], lanes: Callable[[Any], Iterator[Any]], trains: Callable[[], bool]
) -> Iterator[Any]:
    """The lanes of every batch, and no update."""
    lanes = _with_numbers(batches, lanes)
    for batch in batches:
        if trains():
            raise Misuse("a loop over run.steps that evaluates has come to a batch with the model in training mode")
        yield from lanes(batch)


def _with_numbers(batches: Iterable[Any], lanes: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """`lanes`; of batches that are enumerated, each with the number of its batch.

    A pass that is taken up in its middle begins with the number that it would have without the interruption.
    """
    if not isinstance(batches, enumerate):
        return lanes
    num_before: int | None = None

    def lanes_with_number(numbered: tuple[int, Any]) -> Iterator[tuple[int, Any]]:
        nonlocal num_before
        number, batch = numbered
        if num_before is None:
            num_before = batch.position.step if isinstance(batch, GlobalBatch) and batch.position else 0
        return ((number + num_before, data) for data in lanes(batch))

    return lanes_with_number


def _functions(given: Sequence[Any]) -> Sequence[Callable[[], Any]]:
    for one in given:
        if isinstance(one, Optimizer) or not callable(one):
            raise BadArgument(
                "run.steps takes a list of optimizers in the order of their updates, and after them of functions that "
                f"are called once for each batch, not {type(one).__name__} there"
            )
    return given


class OwnUpdate:
    """The user's function. Its optimizers are not to step in the lanes, which the run itself refuses."""

    def __init__(self, update: Callable[[], Any]) -> None:
        if not callable(update):
            raise BadArgument(
                "run.steps takes a function without arguments as its update, or the optimizers of the body in the "
                f"order of their updates, not {update!r:.60}"
            )
        self._update = update

    @property
    def num_passes(self) -> int:
        return 1

    def lane(self, now: BodyPass, is_first_batch: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def perform(self, number: int) -> None:
        self._update()


class DeferredUpdate:
    """What the body calls in its lanes is done after them. See Note [Deferred updates]."""

    def __init__(self, models: Models, buffers: Callable[[], LaneBuffers], given: Sequence[Any]) -> None:
        """`given` are the optimizers of the body in the order of their updates, and what is called after a batch."""
        if not models.optimizers:
            raise Misuse(
                "run.steps makes the updates of a run's optimizers: call run.replicate(model, optimizer) first"
            )
        if any(isinstance(one, torch.amp.GradScaler) for one in models.tracked.values()):
            raise Misuse(f"run.steps cannot defer a GradScaler's update, which looks at gradients. {GIVE_UPDATE}")
        self._optimizers, self._buffers = models.optimizers, buffers
        tracked = [one for one in models.tracked.values() if isinstance(one, LRScheduler)]
        self._schedulers = tracked + untracked(models.optimizers.values(), models.tracked.values())
        optimizers = [one for one in given if isinstance(one, Optimizer)]
        self._functions = _functions(given[len(optimizers) :])
        ordered = OrderedUpdates(optimizers, list(models.optimizers.values())) if optimizers else None
        self._ordered = ordered if ordered is not None and ordered.num_passes > 1 else None
        self._after_step = WeightsAreOld(models)
        self._calls: Counter[str] = Counter()

    @property
    def num_passes(self) -> int:
        return 1 if self._ordered is None else self._ordered.num_passes

    @contextmanager
    def lane(self, now: BodyPass, is_first_batch: bool) -> Iterator[None]:
        before = [scheduler.last_epoch for scheduler in self._schedulers]
        if self._ordered is not None:
            with self._ordered.lane(now, _replaced, _zero_grad, self._after_step, self._buffers()):
                yield
        else:
            with self._one_update(is_first_batch):
                yield
        self._refuse_schedulers(before)

    @contextmanager
    def _one_update(self, is_first_batch: bool) -> Iterator[None]:
        self._calls.clear()
        with ExitStack() as undo:
            if is_first_batch:
                undo.enter_context(looking(lambda roots: self._refuse_backward()))
            for label, optimizer in self._optimizers.items():
                undo.enter_context(_replaced(optimizer, "step", self._step(label, undo)))
                undo.enter_context(_replaced(optimizer, "zero_grad", _zero_grad))
            yield
        self._check()

    def perform(self, number: int) -> None:
        if self._ordered is not None:
            self._ordered.perform(number)
        else:
            for optimizer in self._optimizers.values():
                optimizer.step()
            for optimizer in self._optimizers.values():
                optimizer.zero_grad()
        for function in self._functions if number == self.num_passes - 1 else ():
            function()

    def _step(self, label: str, body: ExitStack) -> Callable[..., None]:
        """What stands in the place of an optimizer's step until `body` is closed."""

        def step(_: Optimizer, closure: Any = None) -> None:
            if closure is not None:
                raise Misuse(
                    f"run.steps cannot defer optimizer.step(closure), which computes a batch again. {IN_LANES}"
                )
            self._calls[label] += 1
            if self._calls[label] == 1 and len(self._calls) == len(self._optimizers):
                body.enter_context(self._after_step)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        return step

    def _refuse_backward(self) -> None:
        if self._calls:
            raise Misuse(
                f"a backward pass comes after step() of {next(iter(self._calls))} in one body of run.steps: it would "
                "see the weights of before that update (as a GAN's generator after the discriminator's step). Give the "
                "optimizers in the order of their updates, run.steps(loader, [optimizer_d, optimizer_g]), or write a "
                "loop over run.lanes(batch) for each update, with its optimizer.step() after the loop."
            )

    def _check(self) -> None:
        """After a body: what it has called is what is done for it after the commit."""
        for label in self._optimizers:
            if self._calls[label] != 1:
                raise Misuse(
                    f"a body of run.steps has called step() of {label} {self._calls[label]} times, and run.steps makes "
                    f"one update of every optimizer for each batch. {GIVE_UPDATE}"
                )

    def _refuse_schedulers(self, before: list[int]) -> None:
        for scheduler, epoch in zip(self._schedulers, before, strict=True):
            if scheduler.last_epoch != epoch:
                raise Misuse(
                    f"{type(scheduler).__name__}.step() was called in a body of run.steps, which runs once for each "
                    f"lane. {GIVE_AFTER}"
                )


class WeightsAreOld(TorchDispatchMode):
    """While it is entered, an operation on a weight is refused. See Note [Weights after a deferred step]."""

    def __init__(self, models: Models) -> None:
        super().__init__()
        self._models = models
        self._first: tuple[torch.Tensor, int] | None = None
        self._weights: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        for tensor in tree_leaves((args, options)):
            if isinstance(tensor, torch.Tensor) and (name := self._name(tensor)) is not None:
                raise Misuse(
                    f"{name} is used after step() in a body of run.steps, and the update is made after the last lane "
                    "of the batch: an average of weights or a checkpoint would see those of before, once for each "
                    f"lane. {GIVE_AFTER}"
                )
        return func(*args, **options)

    def _name(self, tensor: torch.Tensor) -> str | None:
        """The weight in whose memory the tensor stands. Weights are found again when the first has other memory."""
        if self._first is None or _memory(self._first[0]) != self._first[1]:
            parameters = self._models.parameters()
            weights = {_memory(named.parameter): named.name for named in parameters}
            self._weights = {memory: name for memory, name in weights.items() if memory}
            self._first = parameters[0].parameter, _memory(parameters[0].parameter)
        return self._weights.get(_memory(tensor))


def _memory(tensor: torch.Tensor) -> int:
    """What tells tensors of different memory apart; 0 where there is none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
    if not set_to_none:
        raise Misuse(f"run.steps sets gradients to None, and zero_grad(set_to_none=False) does not. {GIVE_UPDATE}")


@contextmanager
def _replaced(thing: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the method of this one object is another. What stood in its place on the object itself comes back."""
    own = vars(thing).get(name)
    setattr(thing, name, MethodType(function, thing))
    try:
        yield
    finally:
        if own is None:
            delattr(thing, name)
        else:
            setattr(thing, name, own)
