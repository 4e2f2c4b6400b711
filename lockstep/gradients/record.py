"""What every worker must know of every other before a step can end: one small record each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from lockstep.errors import BadArgument, Misuse


class Wish(IntEnum):
    """What a worker may want all to do before the next step."""

    CHANGE = 0
    """Form another generation: somebody wants to join or to leave."""
    INTERRUPT = 1
    """Save and end, as after Ctrl-C."""
    TERMINATE = 2
    """Save and end, as after SIGTERM."""


@dataclass
class StepRecord:
    """One worker's account of a step, or, once `merged`, that of all workers.

    `weights` and `losses` are by lane, None where nothing was told. `used` says which parameters had a gradient
    in some lane, `changed` which buffers were written to. `squares` are those of the lanes' gradients, in steps in
    which they are taken. `wishes` are what a worker wants all to do after the step: one is enough. `counters` is a
    fingerprint of what the worker's first lane left in counters; merged, it is None where workers differ. `health` is a
    worker's own few bytes, of one size everywhere; merged, `healths` has them by rank.
    """

    weights: list[float | None]
    losses: list[float | None]
    used: list[bool]
    changed: list[bool]
    squares: list[float | None] = field(default_factory=list)
    wishes: list[bool] = field(default_factory=lambda: [False] * len(Wish))
    counters: int | None = 0
    health: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8, device="cpu"))
    healths: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, num_lanes: int, num_parameters: int, num_buffers: int) -> "StepRecord":
        return cls([None] * num_lanes, [None] * num_lanes, [False] * num_parameters, [False] * num_buffers)

    def pack(self) -> torch.Tensor:
        numbers = [*self.weights, *self.losses, *self.squares]
        values = torch.tensor(
            [0.0 if number is None else number for number in numbers], dtype=torch.float64, device="cpu"
        )
        told = [number is not None for number in numbers]
        flags = torch.tensor([*told, *self.wishes, *self.used, *self.changed], dtype=torch.uint8, device="cpu")
        counters = torch.tensor([self.counters], dtype=torch.int64, device="cpu")
        return torch.cat([counters.view(torch.uint8), values.view(torch.uint8), flags, self.health])

    def merged(self, packed: Sequence[torch.Tensor]) -> "StepRecord":
        """All workers' records as one: a lane's numbers come from the one worker that told them."""
        num_lanes = len(self.weights)
        split = 2 * num_lanes + len(self.squares)
        size = 8 + 8 * split
        # Each number was told by one worker; the others sent 0, and x + 0 is x.
        values = torch.stack([record[8:size] for record in packed]).view(torch.float64).sum(0).tolist()
        end = len(packed[0]) - len(self.health)
        flags = torch.stack([record[size:end] for record in packed]).any(0).tolist()
        agree = all(torch.equal(record[:8], packed[0][:8]) for record in packed)
        numbers = [value if told else None for value, told in zip(values, flags[:split], strict=True)]
        wishes, rest = flags[split : split + len(Wish)], flags[split + len(Wish) :]
        return StepRecord(
            weights=numbers[:num_lanes],
            losses=numbers[num_lanes : 2 * num_lanes],
            squares=numbers[2 * num_lanes :],
            used=rest[: len(self.used)],
            changed=rest[len(self.used) :],
            wishes=wishes,
            counters=self.counters if agree else None,
            healths=[record[end:] for record in packed],
        )

    def lane_weights(self, shares: dict[int, int]) -> dict[int, float]:
        """The weight of each lane of `shares` (lane to number of samples): what was told, else its samples."""
        told = [lane for lane in shares if self.weights[lane] is not None]
        if told and len(told) < len(shares):
            raise Misuse(
                f"lanes {told} were weighted by run.backward(loss, weight=...), lanes "
                f"{sorted(set(shares) - set(told))} were not. Weight all lanes of a step, or none."
            )
        weights = {lane: _or(self.weights[lane], num_samples) for lane, num_samples in shares.items()}
        if sum(weights.values()) <= 0:
            raise BadArgument("the weights of all lanes add up to 0, so there is nothing to average in this step")
        return weights

    def mean_loss(self, weights: dict[int, float]) -> float | None:
        """The lanes' losses averaged by weight, added in lane order; None if a lane told no loss."""
        total = 0.0
        for lane, weight in weights.items():
            loss = self.losses[lane]
            if loss is None:
                return None
            total += weight * loss
        return total / sum(weights.values())


def _or(told: float | None, otherwise: float) -> float:
    return float(otherwise) if told is None else told
