"""lockstep under Ray Train: `TorchTrainer(..., torch_config=LockstepConfig())`. Needs the extra `ray`."""

from lockstep.ray.config import LockstepConfig

__all__ = ["LockstepConfig"]
