"""Arithmetic on rates and parameters for batches that grow. It never communicates, and needs nothing of the rest.

- `rules`, `warmup`          what must follow a larger batch, and how to get there
- `lars`, `lamb`, `trust`    optimizers that give every tensor a rate of its own
- `groups`                   which parameters are better left out of decay and adaptation
- `noise`                    how large a batch is worth it: the noise of the gradient, the critical batch, advice
- `adascale`                 a gain for SGD's rate that follows the noise
- `findings`                 what is often forgotten
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.optim.adascale import AdaScale
    from lockstep.optim.findings import Finding, check
    from lockstep.optim.groups import exclude_biases_and_norms
    from lockstep.optim.lamb import LAMB
    from lockstep.optim.lars import LARS
    from lockstep.optim.noise.advice import Advice, TooLittle, advise
    from lockstep.optim.noise.critical_batch import Effort, Fit, fit_samples, steps_and_samples
    from lockstep.optim.noise.estimate import Measured, Noise, NoiseScale, measure
    from lockstep.optim.rules import Scaled, scale_lr
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
_NAMES = {
    "adascale": ("AdaScale",),
    "findings": ("Finding", "check"),
    "groups": ("exclude_biases_and_norms",),
    "lamb": ("LAMB",),
    "lars": ("LARS",),
    "noise.advice": ("Advice", "TooLittle", "advise"),
    "noise.critical_batch": ("Effort", "Fit", "fit_samples", "steps_and_samples"),
    "noise.estimate": ("Measured", "Noise", "NoiseScale", "measure"),
    "rules": ("Scaled", "scale_lr"),
    "warmup": ("WarmUp",),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"lockstep.optim.{module}"), name)
    raise AttributeError(f"module 'lockstep.optim' has no attribute {name!r}")
