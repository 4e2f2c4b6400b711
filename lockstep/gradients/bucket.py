"""A bucket at work: a stack of flat buffers on which a worker folds its lanes' gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import BadArgument
from lockstep.gradients.layout import BucketLayout
from lockstep.wire import Reducer


@dataclass(frozen=True)
class Flat:
    """One buffer of a bucket, and the view of it that belongs to each parameter."""

    whole: torch.Tensor
    views: list[torch.Tensor]


class Bucket:
    """The gradients of some parameters, from the lanes' `p.grad` to the sum over all workers.

    Life of a step: `reset`, then for each lane `fold_lane`, then the wire reads `roots` and writes the sum to `total`.

    # Note [One place for the weight]
    # A lane's gradient is multiplied by its weight when it enters the stack, rounded, and only then added. Scaling
    # the loss instead, or a fused multiply-add, would round differently, and the bits would depend on
    # which lanes a worker happens to carry.
    """

    def __init__(self, layout: BucketLayout, parameters: Sequence[torch.nn.Parameter], reducer: Reducer) -> None:
        self.layout = layout
        self._reducer = reducer
        self.parameters = [parameters[slot.index] for slot in layout.slots]
        self.used = [False] * len(self.parameters)
        self._stack: list[Flat] = []
        self._height = 0

    def reset(self) -> None:
        """Empties the stack; the buffers stay for the next step."""
        self._height = 0
        self.used = [False] * len(self.parameters)

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

    def numbered_gradients(self) -> dict[int, torch.Tensor]:
        """The same, by the number of the parameter."""
        pairs = zip(self.layout.slots, self.parameters, strict=True)
        return {slot.index: parameter.grad for slot, parameter in pairs if parameter.grad is not None}

    @torch.no_grad()
    def fold_lane(self, weight: float, merges: int) -> None:
        """Takes the lane's gradients out of `p.grad`, weighted, onto the stack; then merges the topmost entries."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._refuse_sparse(gradients)
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self.used[place] = True
                self.parameters[place].grad = None
        if merges == 0:
            self._push(gradients, weight)
        else:
            self._add_to_top(gradients, weight)
        for _ in range(merges - 1):
            self._height -= 1
            self._stack[self._height - 1].whole.add_(self._stack[self._height].whole)

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

    def _push(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        flat = self._buffer(self._height)
        self._height += 1
        for view, gradient in zip(flat.views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif weight == 1.0:
                view.copy_(gradient)
            else:
                torch.mul(gradient.detach(), weight, out=view)

    def _add_to_top(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        views = self._stack[self._height - 1].views
        pairs = [(view, g.detach()) for view, g in zip(views, gradients, strict=True) if g is not None]
        if not pairs:
            return
        into, present = map(list, zip(*pairs, strict=True))
        if weight != 1.0:
            torch._foreach_mul_(present, weight)
        torch._foreach_add_(into, present)

    def _buffer(self, depth: int) -> Flat:
        while len(self._stack) <= depth:
            whole = self._reducer.allocate(self.layout.num_elements, self.layout.dtype, self.layout.device)
            self._stack.append(Flat(whole, self._cut(whole)))
        return self._stack[depth]

    def _cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole.as_strided(slot.spec.shape, slot.spec.stride, slot.offset) for slot in self.layout.slots]

    def _refuse_sparse(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for slot, gradient in zip(self.layout.slots, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise BadArgument(
                    f"parameter {slot.spec.name} has a sparse gradient, which cannot be added in a fixed order. "
                    "Make its module without sparse=True."
                )
