"""What a lane does to the step besides its work on the GPU, noted while that is recorded.

# Note [A lane that is replayed]
# While a lane's work is recorded nothing runs on the GPU, but Python does: hooks fire, buckets are folded, losses are
# told. All that is noted, and the step is put back to where it was. Then, and every time the graph is replayed, what
# was noted is done to the step again: which gradients are used, how high the stacks are, which buffers were written,
# and the event behind each bucket, which is part of the graph. So the reduction of a bucket still begins in the middle
# of the backward pass.

# Note [Made before]
# Pinned memory and events cannot be made while work is recorded. So there are some of each from the start.
"""

from dataclasses import dataclass, field

import torch

from lockstep.gradients.losses import Sent

MOST_LOSSES = 8
"""How many backward passes of one lane can be told. See Note [Made before]."""


class TooManyLosses(RuntimeError):  # noqa: N818
    """A lane told more losses than can be recorded."""


@dataclass
class Recording:
    """What happened in a lane that was recorded. `gradients` are what it left in `p.grad` where nothing is folded."""

    ready: list[torch.cuda.Event]
    told: list[torch.cuda.Event]
    places: torch.Tensor
    num_full: int = 0
    losses: list[Sent] = field(default_factory=list)
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

    def tell(self, loss: torch.Tensor) -> Sent:
        number = len(self.losses)
        if number == MOST_LOSSES:
            raise TooManyLosses(f"it tells more than {MOST_LOSSES} losses in a lane")
        place = self.places[number].view(loss.dtype)[0]
        self.losses.append(Sent.of(loss.detach(), place, self.told[number]))
        return self.losses[-1]


def _event() -> torch.cuda.Event:
    """An event that is recorded inside of a graph and awaited outside; torch makes it when it is first recorded."""
    event = torch.cuda.Event(external=True)
    event.record()
    return event
