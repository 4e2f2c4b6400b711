"""lockstep under Ray Train: `TorchTrainer(..., torch_config=LockstepConfig())`, by `config`. Needs the extra `ray`."""

from lockstep.ray.config import LockstepConfig

__all__ = ["LockstepConfig"]
