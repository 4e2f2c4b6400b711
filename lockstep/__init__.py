"""Data-parallel training for PyTorch: the same script, the same bits, on any number of workers."""

import sys
from typing import TYPE_CHECKING, Any

from lockstep.version import VERSION

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from lockstep import optim, strategies
    from lockstep.errors import LockstepError
    from lockstep.gradients.batchnorm import sync_batchnorm
    from lockstep.launch.function import launch_function as launch
    from lockstep.run.run import Run
    from lockstep.run.start import start

__version__ = VERSION
__all__ = ["LockstepError", "Run", "__version__", "launch", "optim", "start", "strategies", "sync_batchnorm"]

# Imported when first used, so that the command line, which needs none of them, starts without torch.
_PLACES = {
    "LockstepError": "lockstep.errors",
    "Run": "lockstep.run.run",
    "start": "lockstep.run.start",
    "sync_batchnorm": "lockstep.gradients.batchnorm",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("launch", "optim", "strategies"):
        return importlib.import_module(f"lockstep.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """The public names and no others, for those who press Tab."""
    return sorted(__all__)


# Note [The backend registers itself]
# `import lockstep` makes init_process_group("lockstep") work, in whatever order torch and lockstep are imported, and
# without importing torch. If torch.distributed is loaded, the backend is registered at once. Otherwise a finder waits
# on sys.meta_path for the module that keeps the list of backends: it lets the usual finders find it, registers as
# soon as that module has run, and is gone. A torch without distributed never loads that module.
_LIST_OF_BACKENDS = "torch.distributed.distributed_c10d"


def _register(backends: Any) -> None:
    backends.Backend.register_backend("lockstep", _open_group, extended_api=True, devices=["cpu"])


def _open_group(asked: Any, options: Any) -> Any:
    from lockstep.torch_backend.group import open_group

    return open_group(asked, options)


class _WaitForTorch:
    """See Note [The backend registers itself]."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> "ModuleSpec | None":
        if name != _LIST_OF_BACKENDS:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


if _LIST_OF_BACKENDS in sys.modules:
    _register(sys.modules[_LIST_OF_BACKENDS])
else:
    sys.meta_path.insert(0, _WaitForTorch())
