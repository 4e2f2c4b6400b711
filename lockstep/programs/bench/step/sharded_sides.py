"""torch's own ways to hold less: DDP with ZeroRedundancyOptimizer, and FSDP2. Each at its usual settings."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from lockstep.programs.bench.sides import LoopSide, TrainingKit
from lockstep.programs.models import GptBlock, Residual


class ZeroSide(LoopSide):
    """Its optimizer's state is that of the part which this worker updates."""

    def optimizers(self) -> Iterable[Optimizer]:
        zero: Any = self.optimizer
        return (zero.optim,)


class FsdpSide(LoopSide):
    """Parameters and gradients are DTensors: whole ones are gathered where they are compared. Collective."""

    def gradients(self) -> dict[str, Tensor]:
        return _gathered(super().gradients())

    def movement(self) -> dict[str, Tensor]:
        return _gathered(super().movement())


def zero_side(kit: TrainingKit, rank: int, size: int, group: ProcessGroup | None) -> ZeroSide:
    """Collective. DDP as in `ddp_side`, with an update that is divided by parameters, which are then broadcast."""
    wrapped = DistributedDataParallel(
        kit.model, process_group=group, gradient_as_bucket_view=True, static_graph=True
    )  # fmt: skip
    optimizer = ZeroRedundancyOptimizer(kit.model.parameters(), AdamW, process_group=group, fused=True)
    return ZeroSide(kit.cut(rank, size), kit.forward(wrapped), optimizer)


def fsdp_side(kit: TrainingKit, rank: int, size: int) -> FsdpSide:
    """Collective. `fully_shard` of every block, or, where there are none, of every layer with parameters; over Gloo."""
    mesh = init_device_mesh("cpu", (size,))
    blocks = _of_kind(kit.model, GptBlock, Residual)
    for module in blocks or _of_kind(kit.model, nn.Linear, nn.Embedding):
        fully_shard(module, mesh=mesh)
    fully_shard(kit.model, mesh=mesh)
    return FsdpSide(kit.cut(rank, size), kit.forward(kit.model), AdamW(kit.model.parameters(), fused=True))


def _of_kind(model: nn.Module, *kinds: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kinds)]


def _gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: _whole(tensor) for name, tensor in tensors.items()}


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor()
    return found
