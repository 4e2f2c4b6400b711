"""Another batch, another rate: the hyperparameters that belong to a batch `kappa` times as large.

# Note [One scale_lr, before the scheduler]
# A scheduler copies the rates when it is made and computes every later rate from its copy, so a rate scaled afterwards
# is lost at the next `scheduler.step()`. `scaled_from` in a parameter group is the rate before scaling. It travels in
# the optimizer's state_dict, so a second scaling is seen even after a resume; warm-up and `check` read it too.

# Note [Two rules]
# Linear, η ← κ·η: Krizhevsky 2014 (arXiv:1404.5997, in practice); Goyal et al. 2017 (arXiv:1706.02677), section 2.1: κ
# steps of size η along gradients that hardly change are one step of size κ·η along their mean. Decoupled decay per
# epoch, η·λ·steps, stays as it is: κ times the rate, 1/κ of the steps.
# Square root, η ← √κ·η: Krizhevsky 2014 (in theory): the variance of an update, η²·σ²/batch, stays. For Adam and
# RMSprop Malladi et al. 2022 (arXiv:2205.10287): the update is divided by √v, which noise dominates and which shrinks
# by √κ, so only √κ is left to the rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import BadArgument, Misuse

# Of the optimizers whose groups have no `decoupled_weight_decay`: those that shrink the weights by lr·λ directly.
DECOUPLED = frozenset({"AdamW", "LAMB", "Lamb", "Lion", "Muon", "Adafactor"})


class Change(NamedTuple):
    """One hyperparameter of one group; betas are called beta1, beta2, ..."""

    name: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.name} {self.before:.6g} → {self.after:.6g}"


@dataclass(frozen=True)
class Scaled:
    """What `scale_lr` did: for each parameter group the hyperparameters that are now different."""

    rule: str
    base_batch: int
    batch: int
    factor: float
    """κ = batch / base_batch."""
    groups: tuple[tuple[Change, ...], ...]

    @property
    def lost(self) -> tuple[str, ...]:
        """The averages (beta1, beta2, alpha) that became shorter than one step, where the rule no longer holds."""
        return tuple(sorted({change.name for group in self.groups for change in group if _is_lost(change)}))

    def __str__(self) -> str:
        head = f"{self.rule} rule, batch {self.base_batch} → {self.batch} (×{self.factor:.6g})"
        changed = f"{head}: {_listed(self.groups)}"
        if not self.lost:
            return changed
        return (
            f"{changed}. {' and '.join(self.lost)} reached 0: an average shorter than one step, "
            "outside of where the rule was derived. Grow the batch less, or set follow=False and betas of your own"
        )


RULES: dict[str, Callable[[float], float]] = {"linear": lambda kappa: kappa, "sqrt": math.sqrt, "none": lambda _: 1.0}
"""By what the rate is multiplied. See Note [Two rules]; "none": the rate is right for the new batch already."""


def scale_lr(optimizer: Optimizer, *, batch: int, base_batch: int, rule: str = "linear", follow: bool = True) -> Scaled:
    """Every group's rate, found for `base_batch`, is now the one for `batch`, and `scaled_from` keeps the old rate.

    With `follow`, the rule is applied to other hyperparameters too: see `followers_of_square_root`. Rates that are
    tensors are changed in place. Nothing is changed if anything is refused. A group added later is not scaled.
    """
    require_optimizer(optimizer)
    if rule not in tuple(RULES):
        raise BadArgument(f"rule={rule!r} is not a scaling rule; write one of {', '.join(map(repr, RULES))}")
    kappa = require_count("batch", batch) / require_count("base_batch", base_batch)
    _refuse_the_wrong_moment(optimizer)
    groups = tuple(_changes(optimizer, group, rule, kappa, follow) for group in optimizer.param_groups)
    for group, changes in zip(optimizer.param_groups, groups, strict=True):
        # Two groups may share one tensor, so what the rate was is not read back from the group.
        group["scaled_from"] = next((change.before for change in changes if change.name == "lr"), float(group["lr"]))
        _apply(group, changes)
    return Scaled(rule, int(base_batch), int(batch), kappa, groups)


def followers_of_square_root(group: dict[str, Any], kappa: float, *, decoupled: bool) -> list[Change]:
    """What must follow the rate under the square-root rule.

    Malladi et al. 2022, arXiv:2205.10287 (for Adam: every beta; for RMSprop: alpha, which is its β₂):
        β ← max(0, 1 − κ·(1 − β))      the averages remember as many samples as before
        ε ← ε/√κ                       as √v, to which it is added
    Decoupled weight decay: λ ← √κ·λ, so that the decay per epoch, η·λ·steps, stays: √κ·√κ/κ = 1. Coupled decay (L2) is
    a part of the loss and stays.
    """
    followers = [
        *((f"beta{place}", beta, _remembering(beta, kappa)) for place, beta in enumerate(group.get("betas", ()), 1)),
        *((name, group[name], _remembering(group[name], kappa)) for name in ("alpha",) if _is_rmsprop(group)),
    ]
    if followers and _is_number(group.get("eps")):
        followers.append(("eps", group["eps"], float(group["eps"]) / math.sqrt(kappa)))
    if decoupled and _is_number(group.get("weight_decay")):
        followers.append(("weight_decay", group["weight_decay"], float(group["weight_decay"]) * math.sqrt(kappa)))
    return [Change(name, float(before), after) for name, before, after in followers]


def require_optimizer(optimizer: Optimizer) -> None:
    """Raises BadArgument unless it is a torch optimizer with rates."""
    if not isinstance(optimizer, Optimizer):
        raise BadArgument(f"{type(optimizer).__name__} is not an optimizer; give a torch.optim.Optimizer")
    for number, group in enumerate(optimizer.param_groups):
        if not _is_number(group.get("lr")):
            kind = type(optimizer).__name__
            raise BadArgument(f"parameter group {number} of {kind} has no 'lr' that is a number, to scale or check")


def require_count(name: str, value: int) -> int:
    """The value, if it is a whole number of at least 1; else raises BadArgument."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise BadArgument(f"{name}={value!r} cannot be used; write a whole number of at least 1")
    return int(value)


def _changes(optimizer: Optimizer, group: dict[str, Any], rule: str, kappa: float, follow: bool) -> tuple[Change, ...]:
    rate = float(group["lr"])
    changes = [Change("lr", rate, rate * RULES[rule](kappa))]
    if follow and rule == "sqrt":
        changes += followers_of_square_root(group, kappa, decoupled=_is_decoupled(optimizer, group))
    return tuple(change for change in changes if change.before != change.after)


def _refuse_the_wrong_moment(optimizer: Optimizer) -> None:
    """See Note [One scale_lr, before the scheduler]."""
    for number, group in enumerate(optimizer.param_groups):
        if "scaled_from" in group:
            raise Misuse(
                f"this optimizer was scaled before (parameter group {number}: lr {group['scaled_from']:.6g} → "
                f"{float(group.get('initial_lr', group['lr'])):.6g}). Call scale_lr once, on the rates found for "
                "base_batch. If the product of both factors is meant, forget the first: "
                'for group in optimizer.param_groups: group.pop("scaled_from", None)'
            )
        if "initial_lr" in group:
            raise Misuse(
                f"a scheduler was made for this optimizer (parameter group {number} has 'initial_lr') and keeps the "
                "rates from before. Call scale_lr first, then make the scheduler."
            )


def _apply(group: dict[str, Any], changes: tuple[Change, ...]) -> None:
    for change in changes:
        if change.name.startswith("beta"):
            place = int(change.name.removeprefix("beta")) - 1
            betas = list(group["betas"])
            betas[place] = _replaced(betas[place], change.after)
            group["betas"] = tuple(betas)
        else:
            group[change.name] = _replaced(group[change.name], change.after)


@torch.no_grad()
def _replaced(old: float | Tensor, value: float) -> float | Tensor:
    """A tensor keeps its identity: a captured graph or a compiled step may hold it."""
    return old.fill_(value) if isinstance(old, Tensor) else value


def _remembering(beta: float | Tensor, kappa: float) -> float:
    return max(0.0, 1.0 - kappa * (1.0 - float(beta)))


def _is_rmsprop(group: dict[str, Any]) -> bool:
    """ASGD has an alpha too, which is no average; it has no eps."""
    return "alpha" in group and "eps" in group


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    by_name = any(kind.__name__ in DECOUPLED for kind in type(optimizer).__mro__)
    return bool(group.get("decoupled_weight_decay", by_name))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _is_lost(change: Change) -> bool:
    return change.after == 0.0 and (change.name.startswith("beta") or change.name == "alpha")


def _listed(groups: tuple[tuple[Change, ...], ...]) -> str:
    lines = [", ".join(map(str, changes)) or "nothing changed" for changes in groups]
    if len(set(lines)) == 1:
        return lines[0]
    return "; ".join(f"group {number}: {line}" for number, line in enumerate(lines))
