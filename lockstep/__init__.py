"""Data-parallel training for PyTorch: the same script, the same bits, on any number of workers."""

from typing import TYPE_CHECKING, Any

from lockstep.version import VERSION

if TYPE_CHECKING:
    from lockstep.errors import LockstepError
    from lockstep.gradients.batchnorm import sync_batchnorm
    from lockstep.run.run import Run
    from lockstep.run.start import start

__version__ = VERSION
__all__ = ["LockstepError", "Run", "__version__", "start", "sync_batchnorm"]

# Imported when first used, so that the command line, which needs none of them, starts without torch.
_PLACES = {
    "LockstepError": "lockstep.errors",
    "Run": "lockstep.run.run",
    "start": "lockstep.run.start",
    "sync_batchnorm": "lockstep.gradients.batchnorm",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
