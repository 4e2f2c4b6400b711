"""Looks at every optimizer of the process before it steps, also at those that `run.replicate` was not given."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.state.models import Models


class UntrackedOptimizers:
    """Refuses a step inside of lanes that changes a replicated model; notes one that changes what nobody replicates.

    `refuse_inside` raises where the lanes of a step are under way. One owner, who calls `close`.
    """

    def __init__(self, models: Models, refuse_inside: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._models, self._refuse_inside, self._note = models, refuse_inside, note
        self._noted: set[int] = set()
        self._hook = register_optimizer_step_pre_hook(self._look)

    def close(self) -> None:
        self._hook.remove()

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        if any(optimizer is known for known in self._models.optimizers.values()):
            return  # has a hook of the run's own
        replicated = {id(named.parameter) for named in self._models.parameters()}
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held & replicated:
            self._refuse_inside("optimizer.step()")
        if held - replicated and id(optimizer) not in self._noted:
            self._noted.add(id(optimizer))
            self._note(
                f"{type(optimizer).__name__}.step() changes parameters of no model that run.replicate was given: each "
                "worker has its own, and nothing keeps them alike"
            )
