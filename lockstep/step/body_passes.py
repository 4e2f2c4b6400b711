"""Bodies of `run.steps` with several updates, as a GAN's: `run.steps(loader, [optimizer_d, optimizer_g])`.

# Note [Passes over a body]
# A body with two updates computes the second one's gradient with the weights that the first has made. All lanes must
# have ended, and be added up, before the first update can be made; so the body cannot run through both. It runs twice
# for each lane. In the first pass only backward passes before the first step() count, and the first update is made
# after the commit; in the second pass those between the first step() and the second, with the new weights. A pass is a
# step of the run like any other, redone where a worker is lost. Both draw the same random numbers, so that what the
# body makes (a GAN's noise) is the same in both, as in the plain loop. What does not count is computed for nothing:
# forward passes twice. Buffers that these write (BatchNorm's averages) are set back, so each forward pass of the body
# moves them once. How many updates there are is given, not learned: a worker without lanes makes them too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.errors import BadArgument, Misuse
from lockstep.gradients.buffers import LaneBuffers

LOOP_FOR_EACH = (
    "Write a loop over run.lanes(batch) for each update instead, with its optimizer.step(), and what else happens once "
    "for each batch, after the loop."
)


@dataclass
class BodyPass:
    """Which pass over a body is under way, and how many calls of step() its present lane has made."""

    number: int = 0
    num_passes: int = 1
    num_steps: int = 0

    @property
    def counts(self) -> bool:
        """Whether a backward pass now belongs to the update of this pass."""
        return self.num_steps == self.number

    @property
    def has_counted(self) -> bool:
        """Whether what counts in this pass is just over, and more of the body comes."""
        return self.num_steps == self.number + 1 < self.num_passes

    @property
    def is_last(self) -> bool:
        return self.number == self.num_passes - 1


class OrderedUpdates:
    """The updates of a body in their order, one optimizer each. See Note [Passes over a body]."""

    def __init__(self, given: Sequence[Any], known: Sequence[Optimizer]) -> None:
        if {id(one) for one in given} != {id(one) for one in known} or len(given) != len(known):
            raise BadArgument(
                f"run.steps takes every optimizer of the run once, in the order of their updates: {len(given)} are "
                f"given, and run.replicate was given {len(known)}"
            )
        self._optimizers = list(given)

    @property
    def num_passes(self) -> int:
        return len(self._optimizers)

    @contextmanager
    def lane(
        self,
        now: BodyPass,
        replaced: Callable[..., Any],
        zero_grad: Callable[..., None],
        after_steps: AbstractContextManager[Any],
        buffers: LaneBuffers,
    ) -> Iterator[None]:
        """Stands around the body of one lane in the pass `now`.

        `replaced` puts a function in the place of an optimizer's step(), and `zero_grad` in that of its zero_grad().
        `after_steps` stands around what comes after the last step().
        """
        now.num_steps = 0
        before = {} if now.number == 0 else buffers.written_values()
        with ExitStack() as undo:

            def stepped() -> None:
                if now.counts:
                    buffers.set_written(before)
                elif now.has_counted:
                    undo.callback(buffers.set_written, buffers.written_values())
                if now.num_steps == self.num_passes:
                    undo.enter_context(after_steps)

            undo.enter_context(_counting_backward(now))
            for number, optimizer in enumerate(self._optimizers):
                undo.enter_context(replaced(optimizer, "step", partial(_step, now, number, stepped)))
                undo.enter_context(replaced(optimizer, "zero_grad", zero_grad))
            yield
        if now.num_steps != self.num_passes:
            raise Misuse(
                f"a body of run.steps has called step() of {now.num_steps} optimizers, and was given "
                f"{self.num_passes}: every lane of every batch must make all updates. {LOOP_FOR_EACH}"
            )

    def perform(self, number: int) -> None:
        self._optimizers[number].step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def _step(now: BodyPass, number: int, stepped: Callable[[], None], _: Optimizer, closure: Any = None) -> None:
    """In the place of the step() of the optimizer with this number."""
    if closure is not None:
        raise Misuse("run.steps cannot defer optimizer.step(closure), which computes a batch again")
    if number != now.num_steps:
        raise Misuse(
            f"a body of run.steps has called step() of its optimizer {number + 1} where that of optimizer "
            f"{now.num_steps + 1} was due: give the optimizers in the order in which the body steps them, each once"
        )
    now.num_steps += 1
    stepped()


@contextmanager
def _counting_backward(now: BodyPass) -> Iterator[None]:
    """Inside, backward passes that do not count in this pass do nothing."""
    own = torch.autograd.backward

    @partial(torch.compiler.disable, recursive=False)
    def backward(*args: Any, **kwargs: Any) -> None:
        if now.counts:
            own(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = own
