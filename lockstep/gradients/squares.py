"""The squares of a step's gradients, lane by lane and of the whole: what the noise scale is measured from.

# Note [Squares by parameter]
# Buckets are cut to suit the link, and a lane may be carried by any worker. So a square is taken of every parameter's
# gradient by itself, and these are added in the order of the parameters, in float64: the same bits on any number of
# workers. Nothing waits for the device until the record of the step is packed.

# Note [As the optimizer sees it]
# For an optimizer that divides by a running size of the gradient (Adam and its kin) squares are also taken weighted by
# what it multiplies each element with, as its state says before the step's update: see optim/noise/preconditioner.py.
# If it does not know some parameter yet, or is another kind of optimizer, there are none of these in the step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.optim.noise import StepSquares

Weigh = Callable[[torch.nn.Parameter, torch.Tensor], torch.Tensor | None]
"""The square of a parameter's gradient as its optimizer sees it; None if it has no sight of its own, or not yet."""

KINDS = 2
"""Plain, and as the optimizer sees it."""


@dataclass(frozen=True)
class SquaresPlan:
    """In which steps squares are taken; `every` 0: never."""

    every: int = 0
    weigh: Callable[[], Weigh] | None = None
    """Gives what holds for one step."""

    def taken_in(self, step: int, num_lanes: int) -> bool:
        """One lane alone shows no noise. Step 0 is left out: there the optimizer knows nothing yet."""
        return self.every > 0 and step > 0 and step % self.every == 0 and num_lanes > 1


class Squares:
    """One step's squares on this worker."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], weigh: Weigh | None) -> None:
        self._parameters = parameters
        self._weigh = weigh
        self._lanes: dict[int, _Sums] = {}

    def look(self, lane: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Some of a lane's own gradients, by the number of their parameter."""
        self._lanes.setdefault(lane, _Sums(self._parameters, self._weigh)).add(gradients)

    def of_lanes(self, num_lanes: int) -> list[float | None]:
        """For the record: the squares of this worker's lanes, plain, then weighted; None where there are none."""
        found = {lane: sums.totals() for lane, sums in self._lanes.items()}
        return [found[lane][kind] if lane in found else None for kind in range(KINDS) for lane in range(num_lanes)]

    def whole(self, parts: Iterable[Mapping[int, torch.Tensor]]) -> tuple[float | None, ...]:
        """The squares of the step's gradient, which comes in parts: plain, then weighted."""
        sums = _Sums(self._parameters, self._weigh)
        for gradients in parts:
            sums.add(gradients)
        return sums.totals()


def of_all(
    squares: Sequence[float | None], weights: Mapping[int, float], whole: tuple[float | None, ...]
) -> tuple[StepSquares | None, ...]:
    """What all workers have reported, plain and weighted; None for a kind that is missing somewhere."""
    num_lanes = len(squares) // KINDS
    found: list[StepSquares | None] = []
    for kind, square in enumerate(whole):
        lanes = {lane: squares[kind * num_lanes + lane] for lane in weights}
        known = {lane: value for lane, value in lanes.items() if value is not None}
        found.append(StepSquares(weights, known, square) if square is not None and len(known) == len(lanes) else None)
    return tuple(found)


def as_means(
    squares: Sequence[float | None], whole: tuple[float | None, ...], shares: Mapping[int, int]
) -> tuple[list[float | None], Mapping[int, float], tuple[float | None, ...]]:
    """What `of_all` takes, where gradients were sums over the samples of their lanes: as though they were means."""
    num_lanes, num_samples = len(squares) // KINDS, sum(shares.values())
    counts = [shares.get(lane, 1) for lane in range(num_lanes)] * KINDS
    lanes = [None if square is None else square / count**2 for square, count in zip(squares, counts, strict=True)]
    weights = {lane: float(count) for lane, count in shares.items()}
    return lanes, weights, tuple(None if square is None else square / num_samples**2 for square in whole)


class _Sums:
    """The squares of one gradient. See Note [Squares by parameter]."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], weigh: Weigh | None) -> None:
        self._parameters = parameters
        self._weigh = weigh
        self._plain: dict[int, torch.Tensor] = {}
        self._weighted: dict[int, torch.Tensor] | None = None if weigh is None else {}

    @torch.no_grad()
    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        dense = [_wide(gradient.detach()) for gradient in gradients.values()]
        if dense:
            self._plain.update(zip(gradients, torch._foreach_norm(dense, 2), strict=True))
        for index, gradient in gradients.items():
            self._add_weighted(index, gradient)

    def totals(self) -> tuple[float | None, ...]:
        plain = _added([norm.double().square() for _, norm in sorted(self._plain.items())])
        weighted = None if self._weighted is None else _added([square for _, square in sorted(self._weighted.items())])
        return plain, weighted

    def _add_weighted(self, index: int, gradient: torch.Tensor) -> None:
        """See Note [As the optimizer sees it]."""
        if self._weigh is None or self._weighted is None:
            return
        square = self._weigh(self._parameters[index], gradient)
        if square is None:
            self._weighted = None
        else:
            self._weighted[index] = square


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    """In float32 at least: half precision has too few bits for a norm."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _added(squares: Sequence[torch.Tensor]) -> float:
    """One read of the device for all; added one after the other."""
    values = torch.stack([square.double().cpu() for square in squares]).tolist() if squares else []
    return float(sum(values))
