"""Gradual warm-up: a large rate is reached step by step."""

import math
import warnings

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import BadArgument
from lockstep.optim.rules import require_count, require_optimizer

SHAPES = ("linear", "exponential")

Rate = float | Tensor


class WarmUp(LRScheduler):
    """Rises from a low rate to each group's full rate in `steps` steps, then leaves the rate alone.

    Goyal et al. 2017, section 2.2 ("gradual warmup"). With s the start, η the full rate and n the steps, step t has
        linear         s + (η − s)·t/n
        exponential    s^(1−t/n) · η^(t/n)
    so step 0 has s, and from step n on the rate is η, bit for bit. Give `steps`, or `epochs` with `steps_per_epoch`
    (the product is rounded to whole steps). `start` is s/η; without it s is the rate before `scale_lr`, or η where
    that is smaller.

    Step it after every `optimizer.step()`. In a SequentialLR its milestone is `steps`. In a ChainedScheduler the other
    schedulers' factors are kept; put it first there. Resume by `load_state_dict`, as with every scheduler of torch.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        steps: int | None = None,
        epochs: float | None = None,
        steps_per_epoch: int | None = None,
        start: float | None = None,
        shape: str = "linear",
        last_epoch: int = -1,
    ) -> None:
        require_optimizer(optimizer)
        if shape not in SHAPES:
            raise BadArgument(f"shape={shape!r} is not a shape of warm-up; write one of {', '.join(map(repr, SHAPES))}")
        self.steps = num_steps(steps, epochs, steps_per_epoch)
        self.shape = shape
        self.start_lrs = _start_rates(optimizer, start, shape)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Rate]:
        """The rates of step `last_epoch`. See Note [What others did to the rate]."""
        if not self._get_lr_called_within_step:
            warnings.warn("get_lr() is torch's own; get_last_lr() gives the rates in use", stacklevel=2)
        current = [group["lr"] for group in self.optimizer.param_groups]
        resuming = self._is_initial and self.last_epoch > 0
        if resuming or self.last_epoch > self.steps:
            return [lr.clone() if isinstance(lr, Tensor) else lr for lr in current]
        before = self._rates(self.last_epoch - 1) if self.last_epoch > 0 else self.base_lrs
        now = self._rates(self.last_epoch)
        return [_moved(*rates) for rates in zip(current, before, now, strict=True)]

    def _get_closed_form_lr(self) -> list[Rate]:
        """The rates of step `last_epoch`, whatever the optimizer has now. SequentialLR starts a phase with it."""
        return self._rates(self.last_epoch)

    def _rates(self, step: int) -> list[Rate]:
        return [self._rate(step, *ends) for ends in zip(self.start_lrs, self.base_lrs, strict=True)]

    def _rate(self, step: int, start: float, full: Rate) -> Rate:
        if step >= self.steps:
            return full
        part = step / self.steps
        if self.shape == "linear":
            return start + (full - start) * part
        # Two powers instead of start·(full/start)^part: a group with rate 0 stays at 0, without a division by it.
        risen: Rate = start ** (1.0 - part) * full**part
        return risen


# Note [What others did to the rate]
# torch's schedulers may be chained: each multiplies the rate it finds. Alone, the rate found is the one set at the step
# before, and the next comes from the formula, so no rounding error is carried from step to step. Otherwise the rate
# found is the one before times what others did to it, and it is moved by the ratio of the formula's two values. From a
# rate of 0 no factor of others can be read, hence "put it first": then nothing of theirs is in it yet.


def _moved(current: Rate, before: Rate, now: Rate) -> Rate:
    """`now` where `current` is `before`, else `current·now/before`. See Note [What others did to the rate]."""
    if isinstance(current, Tensor):  # without asking a GPU for its value
        before, now = torch.as_tensor(before).to(current), torch.as_tensor(now).to(current)
        return torch.where((current == before) | (before == 0), now, current * now / before)
    return now if current == before or before == 0 else current * now / before


def num_steps(steps: int | None, epochs: float | None, steps_per_epoch: int | None) -> int:
    """The length of a warm-up in steps, given in one of two ways."""
    if steps is not None and epochs is None and steps_per_epoch is None:
        return require_count("steps", steps)
    if steps is not None or epochs is None or steps_per_epoch is None:
        raise BadArgument("say how long the warm-up is in one of two ways: steps=500, or epochs=5, steps_per_epoch=100")
    if isinstance(epochs, bool) or not isinstance(epochs, (int, float)) or not 0 < epochs < math.inf:
        raise BadArgument(f"epochs={epochs!r} cannot be used; write a number above 0")
    whole = round(epochs * require_count("steps_per_epoch", steps_per_epoch))
    if whole < 1:
        raise BadArgument(f"{epochs} epochs of {steps_per_epoch} steps are less than one step; write steps=1 or more")
    return whole


def _start_rates(optimizer: Optimizer, start: float | None, shape: str) -> list[float]:
    full = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if start is None:
        return [min(base, rate) for base, rate in zip(_rates_before_scaling(optimizer), full, strict=True)]
    if isinstance(start, bool) or not isinstance(start, (int, float)) or not 0 <= start <= 1:
        raise BadArgument(f"start={start!r} cannot be used; write a share of the full rate from 0 to 1, such as 0.1")
    if start == 0 and shape == "exponential":
        raise BadArgument("an exponential warm-up cannot rise from start=0; write a small share such as start=0.001")
    return [start * rate for rate in full]


def _rates_before_scaling(optimizer: Optimizer) -> list[float]:
    for number, group in enumerate(optimizer.param_groups):
        if "scaled_from" not in group:
            raise BadArgument(
                f"parameter group {number} was not scaled by scale_lr, so the warm-up does not know where to start; "
                "write start=0.1 (a tenth of the full rate), or call scale_lr before"
            )
    return [group["scaled_from"] for group in optimizer.param_groups]
