"""A step in flight on one worker.

# Note [Scale of given weights]
# A lane enters the sum multiplied by weight/N, where N is the number of samples: for plain lanes this is the final
# weight n_v/N. Where the script gives weights (tokens), their total is known only when the last lane has ended, so
# the sum is multiplied by N/total at the end. For weights equal to the samples that factor is exactly 1. The only
# lane of a step counts whole, whatever its weight. So do all lanes of a step whose losses are sums over their samples:
# nothing is multiplied at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.gradients.bucket import Bucket
from lockstep.gradients.buffers import LaneBuffers
from lockstep.gradients.health import StepHealth
from lockstep.gradients.marks import LaneMarks
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.record import SUMMED, LaneLoss, StepRecord, Weights
from lockstep.gradients.recorded_lane import Recording
from lockstep.gradients.squares import Squares
from lockstep.lanes import Fold, Reduction
from lockstep.wire import Agreement, PendingReduction
from lockstep.wire.generation import Generation


@dataclass
class StepInFlight:
    """A step in flight on this worker."""

    plan: StepPlan
    generation: Generation
    fold: Fold
    reduction: Reduction
    agreement: Agreement
    record: StepRecord
    health: StepHealth
    buckets: Sequence[Bucket]
    buffers: LaneBuffers
    kept: dict[int, torch.Tensor]
    launched: list[PendingReduction]
    squares: Squares | None = None
    marks: LaneMarks | None = None

    def __post_init__(self) -> None:
        self.position = 0
        self.in_lane = False
        self.lane_began_s = 0.0
        self.keeps_gradients = False
        """Whether the gradients of the lane under way stay in `p.grad` until it ends."""
        self.is_reentrant = False
        """Whether it has made checkpoints that run a backward pass inside of another one."""
        self.folded = 0
        """How many buckets have taken the gradients of the lane under way."""
        self.full: set[int] = set()
        self.recording: Recording | None = None
        """That of the lane under way, while it is recorded."""
        self.losses: dict[int, list[LaneLoss]] = {}
        self.outcome: StepRecord | None = None
        self.weights = Weights({}, 1.0)

    def forget_lane(self) -> None:
        """Nothing of the lane under way is recorded or taken any more."""
        self.folded = 0
        self.full.clear()
        self.losses.pop(self.lane, None)
        self.record.weights[self.lane] = None

    @property
    def lane(self) -> int:
        return self.fold.lanes[self.position]

    @property
    def on_last_lane(self) -> bool:
        return self.in_lane and self.position == len(self.fold.lanes) - 1

    @property
    def folds_early(self) -> bool:
        """Whether a bucket is folded, and leaves, as soon as it is full: in the last lane, and where it has to go."""
        if not self.on_last_lane or self.keeps_gradients or self.is_reentrant or not self.buckets:
            return False
        is_alone = self.generation.world.size == 1
        return not (is_alone and self.buckets[0].layout.device.type == "cuda")  # Note [Buckets together] in fold.py

    @property
    def weight(self) -> float:
        """By what the lane under way is multiplied. See Note [Scale of given weights]."""
        given = self.record.weights[self.lane]
        if len(self.plan.present) == 1 or given == SUMMED:
            return 1.0
        return (self.plan.shares[self.lane] if given is None else given) / self.plan.num_samples

    @property
    def scale(self) -> float:
        """By what the sum is multiplied. See Note [Scale of given weights]."""
        whole = self.weights.summed or len(self.weights.lanes) == 1
        return 1.0 if whole else self.plan.num_samples / self.weights.total
