"""The strategy of Fabric: `fabric.setup` replicates, `setup_dataloaders` shards, and the loop has `run.lanes`."""

from typing import Any

import torch

from lockstep.data import ShardedLoader
from lockstep.errors import Misuse
from lockstep.integrations.lightning.trainer import HookedBackward, ShownPlace, active_run


class FabricLanes(ShownPlace):
    """Stands before Fabric's `SingleDeviceStrategy`. See Note [Lightning is alone] in __init__.py."""

    def __init__(self) -> None:
        self.run = active_run()
        super().__init__(device=self.run.device)  # type: ignore[call-arg]
        self.show_place()

    def setup_module_and_optimizers(self, module: Any, optimizers: list[Any], scheduler: Any = None) -> Any:
        """Collective."""
        tracked = {} if scheduler is None else {"scheduler": scheduler}
        if getattr(self.precision, "scaler", None) is not None:  # type: ignore[attr-defined]
            tracked["scaler"] = self.precision.scaler  # type: ignore[attr-defined]
        self.run.replicate(module, *optimizers, **tracked)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise Misuse("under lockstep a model and its optimizers are set up together: fabric.setup(model, optimizer)")

    def process_dataloader(self, dataloader: Any) -> ShardedLoader:
        return self.run.shard(dataloader)

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        hooked = HookedBackward(lambda loss: super(FabricLanes, self).backward(loss, module, *args, **kwargs))  # type: ignore[misc]
        self.run.backward(tensor, scaler=hooked)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self.show_place()
        return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """By the present first worker. The run's own state, its place in the data, is saved by `run.checkpoints`."""
        if self.run.is_first:
            super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]
