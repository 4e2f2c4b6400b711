"""What both sides train: the same model, weights, batches and optimizer.

Of lockstep this imports the reference models only: a restarted baseline shall not wait for more than it needs.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW

from lockstep.programs.bench.recovery.plan import NUM_BATCHES
from lockstep.programs.models import Batch, Workload, reference_workload

_SEED = 0


@dataclass(frozen=True)
class Training:
    workload: Workload
    model: nn.Module
    optimizer: AdamW
    batches: list[Batch]


def make_training(name: str) -> Training:
    """The reference model of that name before its first step; equal in every process that makes it."""
    torch.manual_seed(_SEED)
    workload = reference_workload(name)
    model = workload.make_model()
    generator = torch.Generator().manual_seed(_SEED)
    batches = [workload.make_batch(generator) for _ in range(NUM_BATCHES)]
    return Training(workload, model, AdamW(model.parameters(), fused=True), batches)
