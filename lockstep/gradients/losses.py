"""A lane's loss on its way to the record of the step.

# Note [Losses do not wait for the backward pass]
# The record of a step tells its losses, so they must come to the host. Reading a tensor that is on a GPU waits for all
# that was launched before: the whole backward pass. So a loss is sent off to the host when it is told, before its
# backward pass, with an event behind it. When the record is written the host waits for this event alone, while
# the GPU is busy with what came after it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


class Told(Protocol):
    """A loss that was told."""

    def read(self) -> float: ...


@dataclass(frozen=True)
class Here:
    """A loss on the CPU."""

    loss: torch.Tensor

    def read(self) -> float:
        return float(self.loss)


@dataclass(frozen=True)
class Sent:
    """A loss that is on its way from a GPU."""

    place: torch.Tensor
    event: torch.cuda.Event

    def read(self) -> float:
        self.event.synchronize()
        return float(self.place)

    @classmethod
    def of(cls, loss: torch.Tensor, place: torch.Tensor, event: torch.cuda.Event) -> "Sent":
        """Sends it to `place`, in memory that is pinned. See Note [Losses do not wait for the backward pass]."""
        place.copy_(loss.reshape(()), non_blocking=True)
        event.record(torch.cuda.current_stream(loss.device))
        return cls(place, event)


def told(loss: torch.Tensor) -> Told:
    """The loss, which may be on a GPU, as it is now."""
    value = loss.detach()
    return Sent.of(value, pinned(value), torch.cuda.Event()) if value.is_cuda else Here(value.clone())


def pinned(like: torch.Tensor) -> torch.Tensor:
    """A place for one number, to which a GPU writes by itself."""
    return torch.empty((), dtype=like.dtype, device="cpu", pin_memory=True)
