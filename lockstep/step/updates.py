"""What happens around `optimizer.step()`: it is counted, refused inside of lanes, and may need the other workers.

Optimizers that the run does not know are looked at too.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.elastic.guard import Guard
from lockstep.errors import WorkerLost, naming_lost_worker
from lockstep.events import Events, UpdateBegan, UpdateEnded, Wait
from lockstep.script.schedulers import is_inside, saves_an_optimizer
from lockstep.state.models import has_state
from lockstep.step.step_loop import StepLoop
from lockstep.strategies import StepEngine

GIVE = "Write run.replicate(model, optimizer)."


class UpdateHooks:
    """The hooks of a run on its optimizers; `updated` is called after each update. One owner, who calls `close`."""

    def __init__(
        self, loop: StepLoop, engine: StepEngine, guard: Guard, events: Events, updated: Callable[[], None]
    ) -> None:
        self._loop, self._engine, self._guard, self._events, self._updated = loop, engine, guard, events, updated
        self._models = loop.state.models
        self._hooks: dict[str, tuple[Any, Any]] = {}

    def attach(self) -> None:
        """Every optimizer of the run has its hooks."""
        for label, optimizer in self._models.optimizers.items():
            if label not in self._hooks:
                before = optimizer.register_step_pre_hook(self._before)
                self._hooks[label] = before, optimizer.register_step_post_hook(self._after)

    def ids(self) -> set[int]:
        """By which torch knows these hooks."""
        return {hook.id for hooks in self._hooks.values() for hook in hooks}

    def close(self) -> None:
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._models.look_at(optimizer)
        self._loop.updated(optimizer)
        self._events.emit(UpdateBegan, step=max(0, self._loop.step - 1))
        self._with_others(lambda: self._engine.before_update(optimizer, any((*args[1:], *kwargs.values()))))

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._with_others(lambda: self._engine.after_update(optimizer))
        self._events.emit(UpdateEnded, step=max(0, self._loop.step - 1))
        self._updated()

    def _with_others(self, act: Callable[[], None]) -> None:
        """Collective under some strategies: with those who are left, if a worker is lost."""
        while True:
            try:
                with naming_lost_worker(self._loop.step, Wait.UPDATE):
                    return act()
            except WorkerLost as lost:
                self._guard.regroup(lost)


class UntrackedOptimizers:
    """Looks at every optimizer of the process before it steps, also at those that `run.replicate` was not given.

    Refuses a step inside of lanes that changes a replicated model. Notes one that changes what nobody replicates, and
    one of an optimizer that was forgotten, which is refused where its state was lost. One owner, who calls `close`.
    """

    def __init__(self, loop: StepLoop, guard: Guard) -> None:
        self._loop, self._guard, self._models = loop, guard, loop.state.models
        self._noted: WeakSet[Optimizer] = WeakSet()
        self._looked_at: WeakSet[Optimizer] = WeakSet()
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._hook.remove()

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        models = self._models
        if any(optimizer is known for known in models.optimizers.values()):
            return  # has a hook of the run's own
        replicated = {id(named.parameter) for named in models.parameters()}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held & replicated:
            self._loop.refuse_unless_outside("optimizer.step()")
            self._look_whether_forgotten(optimizer)
        if held - replicated and optimizer not in self._noted:
            self._noted.add(optimizer)
            self._guard.note(
                f"{type(optimizer).__name__}.step() changes parameters of no model that run.replicate was given: each "
                "worker has its own, and nothing keeps them alike"
            )

    def _look_whether_forgotten(self, optimizer: Optimizer) -> None:
        """Before its first update. See Note [Forgotten optimizers] in models.py. A wrapper may stand around one that
        the run knows, or in it."""
        models = self._models
        if optimizer in self._looked_at:
            return
        self._looked_at.add(optimizer)
        known = [one for one in (*models.optimizers.values(), *models.tracked.values()) if saves_an_optimizer(one)]
        if is_inside(optimizer, known) or any(is_inside(one, [optimizer]) for one in known):
            return
        kind = type(optimizer).__name__
        text = f"{kind} trains a replicated model, and run.replicate was not given it: nothing of it is saved. "
        if kind in models.lost and not has_state(optimizer):
            self._guard.refuse(
                f"the run goes on from step {self._loop.step}, and {text}It had a state, which is lost. {GIVE}"
            )
        models.forgotten.add(optimizer)
        self._guard.note(f"{text}After a resume, or on a worker that joins, it would begin anew. {GIVE}")
