"""torch's own ways to divide the work of an update: baselines of the sharded strategies, on CPUs and GPUs.

They are not in sides.py, because loading FSDP2 takes time and memory, which the other sides' processes do not pay.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW

from lockstep.programs.bench.sides import LoopSide, OptimizerStates, TrainingKit, ddp_forward

BLOCKS = ("GptBlock", "Residual", "Bottleneck", "EncoderBlock")
"""Of which classes the models are made: lockstep's own, and torchvision's."""


class ZeroSide(LoopSide):
    """A loop whose optimizer is a ZeroRedundancyOptimizer: each worker has the state of some parameters."""

    @property
    def states(self) -> OptimizerStates:
        inner: OptimizerStates = self.optimizer.optim.state  # type: ignore[attr-defined]
        return inner

    def gradient_means(self) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        means = {
            name: self.states[value]["exp_avg"].clone() if value in self.states else torch.zeros_like(value.detach())
            for name, value in named.items()
        }
        for mean in means.values():
            dist.all_reduce(mean)
        return means


def zero_side(kit: TrainingKit, rank: int, size: int) -> ZeroSide:
    """Collective. DDP as in `ddp_side`, with an update that is divided by parameters, which are then broadcast."""
    optimizer = ZeroRedundancyOptimizer(kit.model.parameters(), AdamW, fused=True)
    return ZeroSide(kit.cut(rank, size), ddp_forward(kit), optimizer)


def fsdp_side(kit: TrainingKit, rank: int, size: int) -> LoopSide:
    """Collective. `fully_shard` of every block, or, where there are none, of every layer with parameters."""
    kit.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # it divides nothing else
    mesh = init_device_mesh(next(kit.model.parameters()).device.type, (size,))
    modules = list(kit.model.modules())
    blocks = [module for module in modules if type(module).__name__ in BLOCKS]
    for module in blocks or [module for module in modules if isinstance(module, nn.Linear | nn.Embedding)]:
        fully_shard(module, mesh=mesh)
    fully_shard(kit.model, mesh=mesh)
    return LoopSide(kit.cut(rank, size), kit.forward(kit.model), AdamW(kit.model.parameters(), fused=True))
