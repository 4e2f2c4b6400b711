"""Arithmetic on rates and parameters for batches that grow. It never communicates, and needs nothing of the rest.

- `scaling`, `warmup`        what must follow a larger batch, and how to get there
- `lars`, `lamb`, `trust`    optimizers that give every tensor a rate of its own
- `groups`                   which parameters are better left out of decay and adaptation
- `noise`, `critical`        how large a batch is worth it: the gradient noise scale, steps against samples
- `adascale`, `advice`       a gain for SGD's rate; what to do, in words
- `checking`                 what is often forgotten
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.optim.adascale import AdaScale
    from lockstep.optim.advice import Advice, TooLittle, advise
    from lockstep.optim.checking import Finding, check
    from lockstep.optim.critical import Effort, Fit, fit_samples, steps_and_samples
    from lockstep.optim.groups import exclude_biases_and_norms
    from lockstep.optim.lamb import LAMB
    from lockstep.optim.lars import LARS
    from lockstep.optim.noise import Measured, Noise, NoiseScale, measure
    from lockstep.optim.scaling import Scaled, scale_lr
    from lockstep.optim.warmup import WarmUp

__all__ = [
    "LAMB",
    "LARS",
    "AdaScale",
    "Advice",
    "Effort",
    "Finding",
    "Fit",
    "Measured",
    "Noise",
    "NoiseScale",
    "Scaled",
    "TooLittle",
    "WarmUp",
    "advise",
    "check",
    "exclude_biases_and_norms",
    "fit_samples",
    "measure",
    "scale_lr",
    "steps_and_samples",
]

# Imported when first used: torch's optimizers take seconds to load, and the command line needs none of them.
_PLACES = {
    "LAMB": "lamb",
    "LARS": "lars",
    "AdaScale": "adascale",
    "Advice": "advice",
    "Effort": "critical",
    "Finding": "checking",
    "Fit": "critical",
    "Measured": "noise",
    "Noise": "noise",
    "NoiseScale": "noise",
    "Scaled": "scaling",
    "TooLittle": "advice",
    "WarmUp": "warmup",
    "advise": "advice",
    "check": "checking",
    "exclude_biases_and_norms": "groups",
    "fit_samples": "critical",
    "measure": "noise",
    "scale_lr": "scaling",
    "steps_and_samples": "critical",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'lockstep.optim' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"lockstep.optim.{_PLACES[name]}"), name)
