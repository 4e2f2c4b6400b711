"""Looks at every optimizer of the process before it steps, also at those that `run.replicate` was not given."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.run.step_loop import StepLoop
from lockstep.state.models import Models


class UntrackedOptimizers:
    """Refuses a step inside of lanes that changes a replicated model; tells of one that changes what nobody replicates.

    One owner, who calls `close`.
    """

    def __init__(self, models: Models, loop: StepLoop, say: Callable[[str], None]) -> None:
        self._models, self._loop, self._say = models, loop, say
        self._told: set[int] = set()
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._hook.remove()

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        if any(optimizer is known for known in self._models.optimizers.values()):
            return  # has a hook of the run's own
        replicated = {id(named.parameter) for named in self._models.parameters()}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held & replicated:
            self._loop.refuse_unless_outside("optimizer.step()")
        if held - replicated and id(optimizer) not in self._told:
            self._told.add(id(optimizer))
            self._say(
                f"{type(optimizer).__name__}.step() changes parameters of no model that run.replicate was given: each "
                "worker has its own, and nothing keeps them alike"
            )
