"""A bucket at work: a stack of flat buffers on which a worker folds its lanes' gradients."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import BadArgument
from lockstep.gradients.layout import BucketLayout
from lockstep.wire import Reducer

SMALL, PIECE = 4 * 1024, 512 * 1024
"""In elements: gradients up to the first are weighted together, larger ones by themselves, in pieces."""


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

    Life of a step: `reset`, then for each lane `fold_lane`, then the wire reads `roots` and writes the sum to `total`.

    # Note [One place for the weight]
    # A lane's gradient is multiplied by its weight when it enters the stack, rounded, and only then added. Scaling
    # the loss instead, or a fused multiply-add, would round differently, and the bits would depend on
    # which lanes a worker happens to carry.

    # Note [The dtype of the sum]
    # Gradients are weighted, folded and added in the dtype of their parameter, or in the run's
    # `reduce_dtype`. Then a lane's gradient is converted first, and from there on all is as in Note [One place
    # for the weight]. Only the finished sum is converted back. A lane that is alone is converted too: its bits must
    # not depend on whether there are other workers.

    # Note [Gradients are only read]
    # What stands in `p.grad` may be the user's: one tensor for two parameters, a view, an expanded number, or a tensor
    # that the user's code reads again. So a gradient is never written to. It is weighted straight into the bucket, or
    # into memory that is used again at once, in pieces that fit into a cache. Where nothing is folded (Note [Nothing to
    # add] in plan.py) a gradient that never arrived from a backward pass is copied: it would go on being the user's.

    # Note [Absent is plus zero]
    # A parameter that a lane did not reach enters the sum as 0, which makes a -0 of another lane +0. A worker that
    # carries both lanes adds nothing for the absent one, so it makes the -0 a +0 there.
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

    @torch.no_grad()
    def fold_lane(self, weight: float, merges: int) -> None:
        """Takes the lane's gradients out of `p.grad`, weighted, onto the stack; then merges the topmost entries."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._refuse_sparse(gradients)
        self.reached = [gradient is not None for gradient in gradients]
        for place, reached in enumerate(self.reached):
            if reached:
                self.used[place] = True
                self.parameters[place].grad = None
        if self.layout.converts or merges == 0:
            self._push(gradients, weight)
            self._merge(merges)
        else:
            self._add_to_top(gradients, weight)
            self._merge(merges - 1)

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

    @torch.no_grad()
    def finish(self) -> None:
        """The sum stands in `result`. See Note [The dtype of the sum]."""
        if self.layout.converts:
            self.result.whole.copy_(self.total)

    def _push(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        flat = self._buffer(self._height)
        self._height += 1
        if self.layout.converts or self.layout.device.type != "cpu" or weight == 1.0:
            _copy(flat, gradients)
            if weight != 1.0:
                flat.whole.mul_(weight)
        else:  # one pass over memory, one operation for each parameter
            for view, gradient in zip(flat.views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    torch.mul(gradient, weight, out=view)

    def _merge(self, times: int) -> None:
        for _ in range(times):
            self._height -= 1
            self._stack[self._height - 1].whole.add_(self._stack[self._height].whole)

    def _add_to_top(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        views = self._stack[self._height - 1].views
        self._lose_minus_zero(views, gradients)
        pairs = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        if not pairs:
            return
        if weight != 1.0 and self.layout.device.type == "cpu":
            _add_weighted(pairs, weight)
        else:
            into, present = map(list, zip(*pairs, strict=True))
            torch._foreach_add_(into, present if weight == 1.0 else torch._foreach_mul(present, weight))

    def _lose_minus_zero(self, views: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """See Note [Absent is plus zero]. What no lane of this worker has reached is +0 already."""
        trio = zip(views, gradients, self.used, strict=True)
        absent = [view for view, gradient, used in trio if gradient is None and used]
        if absent:
            torch._foreach_add_(absent, 0.0)

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


def _add_weighted(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], weight: float) -> None:
    """Adds each gradient, weighted as `torch.mul` rounds, to its view. See Note [Gradients are only read].

    On the CPU `_foreach_mul` would first round the weight itself to half precision.
    """
    into, weighted = [], []
    for view, gradient in pairs:
        if gradient.numel() <= SMALL:
            into.append(view)
            weighted.append(gradient.mul(weight))
        else:
            for part, values in _pieces(view, gradient):
                part.add_(values.mul(weight))
    if into:
        torch._foreach_add_(into, weighted)


def _pieces(view: torch.Tensor, gradient: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Both cut alike into pieces of PIECE elements, if they stand alike in memory; else as they are."""
    if gradient.numel() <= PIECE or gradient.stride() != view.stride():
        return [(view, gradient)]
    flat = (gradient.numel(),), (1,)  # a parameter's place in a bucket has no gaps
    return zip(view.as_strided(*flat).split(PIECE), gradient.as_strided(*flat).split(PIECE), strict=True)


def _copy(flat: FlatBuffer, gradients: Sequence[torch.Tensor | None]) -> None:
    """All at once; what is absent is zero."""
    pairs = [(view, g) for view, g in zip(flat.views, gradients, strict=True) if g is not None]
    if len(pairs) < len(gradients):
        flat.whole.zero_()
    if pairs:
        into, present = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(into, present)
