"""A bucket at work: a stack of flat buffers on which a worker folds its lanes' gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import BadArgument
from lockstep.gradients.layout import BucketLayout
from lockstep.wire import Reducer


@dataclass(frozen=True)
class FlatBuffer:
    """One buffer of a bucket, and the view of it that belongs to each parameter."""

    whole: torch.Tensor
    views: list[torch.Tensor]

    def restore_views(self, layout: BucketLayout) -> None:
        """Makes those views again that stand elsewhere: a script has written `p.grad.data = ...` to one of them."""
        begin, width = self.whole.data_ptr(), self.whole.element_size()
        moved = [
            place
            for place, (view, slot) in enumerate(zip(self.views, layout.slots, strict=True))
            if view.data_ptr() != begin + slot.offset * width and view.numel()
        ]
        if moved:
            anew = layout.cut(self.whole)
            for place in moved:
                self.views[place] = anew[place]


class Bucket:
    """The gradients of some parameters, from the lanes' `p.grad` to the sum over all workers.

    Life of a step: `reset`, then for each lane `fold_lane` (in fold.py), then the wire reads `roots` and writes the
    sum to `total`.
    """

    def __init__(self, layout: BucketLayout, parameters: Sequence[torch.nn.Parameter], reducer: Reducer) -> None:
        self.layout = layout
        self._reducer = reducer
        self.parameters = [parameters[slot.index] for slot in layout.slots]
        self.used = [False] * len(self.parameters)
        self.reached = [False] * len(self.parameters)
        """Which parameters the lane that was folded last has reached."""
        self._stack: list[FlatBuffer] = []
        self._height = 0
        self._converted: FlatBuffer | None = None

    def reset(self) -> None:
        """Empties the stack; the buffers stay for the next step."""
        self._height = 0
        for flat in self._handed_over():
            flat.restore_views(self.layout)
        self.used = [False] * len(self.parameters)

    def prepare(self, depth: int) -> None:
        """Makes as many buffers as folding needs that reaches this depth."""
        self._buffer(depth if self.layout.converts else depth - 1)

    def begin_recording(self) -> tuple[int, list[bool]]:
        """What `end_recording` needs. What is recorded must hold whatever other lanes have reached."""
        before = self._height, self.used
        self.used = [True] * len(self.parameters)
        return before

    def end_recording(self, before: tuple[int, list[bool]]) -> None:
        """Folding stands where it did before something was recorded."""
        self._height, self.used = before

    def replayed(self, reached: Sequence[bool], merges: int) -> None:
        """A lane was folded by a graph that did what `fold_lane` does."""
        self._height += 1 - merges
        self.used = [before or now for before, now in zip(self.used, reached, strict=True)]

    def close(self) -> None:
        for flat in self._stack:
            self._reducer.release(flat.whole)

    def filled(self) -> bool:
        """Whether every parameter of the bucket has a gradient from the lane under way."""
        return all(parameter.grad is not None for parameter in self.parameters)

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the lane under way has left in `p.grad`, by name."""
        pairs = zip(self.layout.slots, self.parameters, strict=True)
        return {slot.spec.name: parameter.grad for slot, parameter in pairs if parameter.grad is not None}

    def has_gradients(self) -> bool:
        """Whether the lane under way has left anything in `p.grad`."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def give_gradients(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """What was left of them, by the number of the parameter, stands in `p.grad`."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if slot.index in gradients:
                parameter.grad = gradients[slot.index]

    def forget_gradients(self) -> None:
        """Nothing is left in `p.grad`."""
        for parameter in self.parameters:
            parameter.grad = None

    def copy_gradients(self) -> None:
        """What stood in `p.grad` was the user's own: now it is a copy."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()

    def entering_gradients(self) -> dict[str, torch.Tensor]:
        """The same as they enter the bucket: a number that is finite may not be in the bucket's dtype."""
        return {name: gradient.to(self.layout.dtype) for name, gradient in self.gradients().items()}

    def numbered_gradients(self) -> dict[int, torch.Tensor]:
        """What the lane under way has left in `p.grad`, by the number of the parameter."""
        pairs = zip(self.layout.slots, self.parameters, strict=True)
        return {slot.index: parameter.grad for slot, parameter in pairs if parameter.grad is not None}

    def take_lane(self) -> list[torch.Tensor | None]:
        """The lane's gradients, which stand in `p.grad` no longer; None for a parameter that it did not reach."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._refuse_sparse(gradients)
        self.reached = [gradient is not None for gradient in gradients]
        for place, reached in enumerate(self.reached):
            if reached:
                self.used[place] = True
                self.parameters[place].grad = None
        return gradients

    def push(self) -> FlatBuffer:
        """A buffer of any content, now the topmost entry of the stack."""
        self._height += 1
        return self._buffer(self._height - 1)

    def pop(self) -> FlatBuffer:
        """The topmost entry, which no longer is one."""
        self._height -= 1
        return self._stack[self._height]

    @property
    def top(self) -> FlatBuffer:
        """The topmost entry of the stack."""
        return self._stack[self._height - 1]

    def roots(self) -> list[torch.Tensor]:
        """What this worker hands to the wire: the entries left on the stack."""
        return [flat.whole for flat in self._stack[: self._height]]

    @property
    def total(self) -> torch.Tensor:
        """Where the sum belongs: the lowest buffer, whether or not this worker carried a lane."""
        return self._buffer(0).whole

    @property
    def views(self) -> list[torch.Tensor]:
        """The sum, parameter by parameter."""
        return self._buffer(0).views

    @property
    def result(self) -> FlatBuffer:
        """Where `finish` puts the sum in the parameters' own dtype; the next step writes there again."""
        if not self.layout.converts:
            return self._buffer(0)
        if self._converted is None:
            whole = torch.zeros(self.layout.num_elements, dtype=self.layout.parameter_dtype, device=self.layout.device)
            self._converted = FlatBuffer(whole, self.layout.cut(whole))
        return self._converted

    @property
    def handed_over(self) -> Sequence[torch.Tensor]:
        """What becomes `p.grad`, parameter by parameter, when `finish` has been called."""
        return self.result.views

    def hand_over(self, used: Sequence[bool], kept: Mapping[int, torch.Tensor]) -> None:
        """Puts the sum, and what was `kept` before the step, into `p.grad`; by the numbers of parameters, `used` says
        which of them any lane has reached."""
        self.finish()
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self.handed_over, strict=True):
            before = kept.get(slot.index)
            if not used[slot.index]:
                parameter.grad = before
            else:
                parameter.grad = view if before is None else view.add_(before)

    @torch.no_grad()
    def finish(self) -> None:
        """The sum stands in `result`. See Note [The dtype of the sum] in fold.py."""
        if self.layout.converts:
            self.result.whole.copy_(self.total)

    def _buffer(self, depth: int) -> FlatBuffer:
        while len(self._stack) <= depth:
            whole = self._allocate()
            whole.zero_()  # what lies between two parameters: adding and weighting leave it zero
            self._stack.append(FlatBuffer(whole, self.layout.cut(whole)))
        return self._stack[depth]

    def _handed_over(self) -> Sequence[FlatBuffer]:
        """The buffers whose views have been `p.grad`."""
        return self._stack[:1] if self._converted is None else (self._converted,)

    def _allocate(self) -> torch.Tensor:
        """Memory for one more buffer of the stack."""
        return self._reducer.allocate(self.layout.num_elements, self.layout.dtype, self.layout.device)

    def _refuse_sparse(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for slot, gradient in zip(self.layout.slots, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise BadArgument(
                    f"parameter {slot.spec.name} has a sparse gradient, which cannot be added in a fixed order. "
                    "Make its module without sparse=True."
                )
