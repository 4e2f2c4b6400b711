"""The recipes that are compared: an optimizer, a rule for its rate, with or without warm-up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, SequentialLR

from lockstep.optim.groups import exclude_biases_and_norms
from lockstep.optim.lamb import LAMB
from lockstep.optim.lars import LARS
from lockstep.optim.rules import scale_lr
from lockstep.optim.warmup import WarmUp

BASE_BATCH = 16
SMALL_BASE_BATCH = 4  # well below the critical batch, for SGD only
WARM = 1 / 6  # of all steps

Make = Callable[[nn.Module, float], Optimizer]


@dataclass(frozen=True)
class Tuned:
    """An optimizer with what was found for it at a base batch by `--tune`; `tried` are the grids."""

    make: Make
    values: Mapping[int, float]
    tried: Mapping[int, tuple[float, ...]]
    called: str = "lr"


def lars(model: nn.Module, trust: float) -> Optimizer:
    """What LARS does not adapt, biases and norms, is trained as SGD trains it, at SGD's rate."""
    groups = exclude_biases_and_norms(model, 1e-4)
    return LARS(groups, OPTIMIZERS["SGD"].values[BASE_BATCH], trust_coefficient=trust, momentum_correction=True)


OPTIMIZERS = {
    "SGD": Tuned(
        lambda model, lr: SGD(exclude_biases_and_norms(model, 1e-4), lr, momentum=0.9),
        {BASE_BATCH: 0.01, SMALL_BASE_BATCH: 0.0025},
        {
            BASE_BATCH: (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
            SMALL_BASE_BATCH: (0.00125, 0.0025, 0.005, 0.01, 0.02),
        },
    ),
    "AdamW": Tuned(
        lambda model, lr: AdamW(exclude_biases_and_norms(model, 0.01), lr),
        {BASE_BATCH: 2e-3},
        {BASE_BATCH: (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3)},
    ),
    "LARS": Tuned(lars, {BASE_BATCH: 0.3}, {BASE_BATCH: (0.03, 0.1, 0.3, 1.0, 3.0)}, "trust"),
    "LAMB": Tuned(
        lambda model, lr: LAMB(exclude_biases_and_norms(model, 0.01), lr),
        {BASE_BATCH: 8e-3},
        {BASE_BATCH: (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)},
    ),
}


@dataclass(frozen=True)
class Recipe:
    name: str
    optimizer: str
    rule: str = "none"
    warm: bool = False
    follow: bool = True

    def prepare(self, model: nn.Module, batch: int, base: int, num_steps: int) -> tuple[Optimizer, LRScheduler]:
        """The optimizer with the rate for `batch`, and a schedule to step after it: cosine to zero for all."""
        tuned = OPTIMIZERS[self.optimizer]
        optimizer = tuned.make(model, tuned.values[base])
        scale_lr(optimizer, batch=batch, base_batch=base, rule=self.rule, follow=self.follow)
        return optimizer, schedule(optimizer, num_steps, round(WARM * num_steps) if self.warm else 0)


def schedule(optimizer: Optimizer, num_steps: int, warm_steps: int) -> LRScheduler:
    if not warm_steps:
        return CosineAnnealingLR(optimizer, T_max=num_steps)
    parts = [WarmUp(optimizer, steps=warm_steps), CosineAnnealingLR(optimizer, T_max=num_steps - warm_steps)]
    return SequentialLR(optimizer, parts, milestones=[warm_steps])


def bases(base: int) -> list[Recipe]:
    return [Recipe(f"{name}, base", name) for name, tuned in OPTIMIZERS.items() if base in tuned.values]


def recipes(base: int) -> list[Recipe]:
    """Those whose optimizer was tuned at this base batch."""
    return [recipe for recipe in RECIPES if base in OPTIMIZERS[recipe.optimizer].values]


RECIPES = (
    Recipe("SGD, rate unchanged", "SGD"),
    Recipe("SGD, linear", "SGD", "linear"),
    Recipe("SGD, linear, warm-up", "SGD", "linear", warm=True),
    Recipe("SGD, square root, warm-up", "SGD", "sqrt", warm=True),
    Recipe("AdamW, square root, warm-up", "AdamW", "sqrt", warm=True),
    Recipe("AdamW, square root, warm-up, betas kept", "AdamW", "sqrt", warm=True, follow=False),
    Recipe("LARS, linear, warm-up", "LARS", "linear", warm=True),
    Recipe("LAMB, square root, warm-up, betas kept", "LAMB", "sqrt", warm=True, follow=False),
)
