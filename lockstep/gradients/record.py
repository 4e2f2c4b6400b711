"""What every worker must know of every other before a step can end: one small record each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.errors import BadArgument, Misuse


@dataclass
class StepRecord:
    """One worker's account of a step, or, once `merged`, that of all workers.

    `weights` and `losses` are by lane, None where nothing was told. `used` says which parameters had a gradient
    in some lane, `changed` which buffers were written to. `counters` is a fingerprint of what the worker's first lane
    left in counters; merged, it is None where workers differ.
    """

    weights: list[float | None]
    losses: list[float | None]
    used: list[bool]
    changed: list[bool]
    counters: int | None = 0

    @classmethod
    def empty(cls, num_lanes: int, num_parameters: int, num_buffers: int) -> "StepRecord":
        return cls([None] * num_lanes, [None] * num_lanes, [False] * num_parameters, [False] * num_buffers)

    def pack(self) -> torch.Tensor:
        numbers = [*self.weights, *self.losses]
        values = torch.tensor(
            [0.0 if number is None else number for number in numbers], dtype=torch.float64, device="cpu"
        )
        told = [number is not None for number in numbers]
        flags = torch.tensor([*told, *self.used, *self.changed], dtype=torch.uint8, device="cpu")
        counters = torch.tensor([self.counters], dtype=torch.int64, device="cpu")
        return torch.cat([counters.view(torch.uint8), values.view(torch.uint8), flags])

    def merged(self, packed: Sequence[torch.Tensor]) -> "StepRecord":
        """All workers' records as one: a lane's numbers come from the one worker that told them."""
        num_lanes = len(self.weights)
        split, size = 2 * num_lanes, 8 + 16 * num_lanes
        # Each number was told by one worker; the others sent 0, and x + 0 is x.
        values = torch.stack([record[8:size] for record in packed]).view(torch.float64).sum(0).tolist()
        flags = torch.stack([record[size:] for record in packed]).any(0).tolist()
        agree = all(torch.equal(record[:8], packed[0][:8]) for record in packed)
        numbers = [value if told else None for value, told in zip(values, flags[:split], strict=True)]
        used = flags[split : split + len(self.used)]
        changed = flags[split + len(used) :]
        return StepRecord(numbers[:num_lanes], numbers[num_lanes:], used, changed, self.counters if agree else None)

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
