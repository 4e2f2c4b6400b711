"""What a recorded lane has done to the step, besides its work on the GPU.

# Note [Made before]
# Pinned memory and events cannot be made while work is recorded. So there are some of each from the start.
"""

from dataclasses import dataclass, field

import torch

from lockstep.gradients.record import DeviceLoss

MOST_LOSSES = 8
"""How many losses of one lane can be recorded. See Note [Made before]."""


class TooManyLosses(RuntimeError):  # noqa: N818
    """A lane reported more losses than can be recorded."""


@dataclass
class Recording:
    """What happened in a lane that was recorded. `gradients` are what it left in `p.grad` where nothing is folded."""

    ready: list[torch.cuda.Event]
    loss_events: list[torch.cuda.Event]
    places: torch.Tensor
    num_full: int = 0
    losses: list[DeviceLoss] = field(default_factory=list)
    weight: float | None = None
    reached: list[list[bool]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, num_buckets: int) -> "Recording":
        """See Note [Made before]."""
        places = torch.empty(MOST_LOSSES, 8, dtype=torch.uint8, device="cpu", pin_memory=True)
        return cls([_event() for _ in range(num_buckets)], [_event() for _ in range(MOST_LOSSES)], places)

    def bucket_is_full(self) -> None:
        """The next bucket has taken the gradients of the lane: others may read it behind this point."""
        self.ready[self.num_full].record()
        self.num_full += 1

    def add_loss(self, loss: torch.Tensor) -> DeviceLoss:
        number = len(self.losses)
        if number == MOST_LOSSES:
            raise TooManyLosses(f"it tells more than {MOST_LOSSES} losses in a lane")
        place = self.places[number].view(loss.dtype)[0]
        self.losses.append(DeviceLoss.of(loss.detach(), place, self.loss_events[number]))
        return self.losses[-1]


def _event() -> torch.cuda.Event:
    """An event that is recorded inside of a graph and awaited outside; torch makes it when it is first recorded."""
    event = torch.cuda.Event(external=True)
    event.record()
    return event
