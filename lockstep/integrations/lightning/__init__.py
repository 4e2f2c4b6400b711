"""Lightning's Trainer and Fabric on lockstep: `Trainer(strategy="lockstep")`, `Fabric(strategy="lockstep")`.

Importing this module registers both names, with `lightning` and with `pytorch_lightning`, whichever are installed. Call
`lockstep.start()` before the Trainer or the Fabric is made.

- `trainer`    the strategy of the Trainer; `fabric` that of Fabric
- `logged`     what `self.log` is given in lanes, and how it comes together
- `progress`   how far the Trainer has come, as something that a run tracks
- `refused`    options that cannot be what they are elsewhere, and the names that are not meant for others

# Note [Lightning is alone]
# On every worker Lightning believes that it is one process on one device, and its options keep the meaning that they
# have there: the batch size of the user's loader is that of the global batch, on any number of workers. The present
# first worker logs and saves.
"""

from importlib import import_module
from importlib.util import find_spec

from lockstep.errors import BadEnvironment
from lockstep.integrations.lightning.fabric import FabricLanes
from lockstep.integrations.lightning.trainer import TrainerLanes

NAME = "lockstep"


def _register(trainers: str, fabrics: str) -> None:
    """Both strategies, under the names that one of the packages has for its parts."""
    of_trainer, of_fabric = import_module(f"{trainers}.strategies"), import_module(f"{fabrics}.strategies")
    strategy = type("LockstepStrategy", (TrainerLanes, of_trainer.SingleDeviceStrategy), {"strategy_name": NAME})
    of_trainer.StrategyRegistry.register(NAME, strategy, override=True)
    fabric = type("LockstepFabricStrategy", (FabricLanes, of_fabric.SingleDeviceStrategy), {})
    of_fabric.STRATEGY_REGISTRY.register(NAME, fabric, override=True)


_INSTALLED = [
    names
    for package, *names in (
        ("lightning", "lightning.pytorch", "lightning.fabric"),
        ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
    )
    if find_spec(package) is not None
]
if not _INSTALLED:
    raise BadEnvironment('Lightning is not installed: pip install "torch-lockstep[lightning]"')
for _names in _INSTALLED:
    _register(*_names)
