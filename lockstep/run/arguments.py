"""What the methods of a run are given, checked: each function returns what is meant, or raises."""

from collections.abc import Iterable
from typing import Any

import torch

from lockstep.errors import BadArgument
from lockstep.gradients.record import SUMMED
from lockstep.state.models import Models

MOST_PATIENCE_MINUTES = 24 * 60


def checked_loss(loss: Any) -> torch.Tensor:
    """What `run.backward` begins with."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    described = f"a tensor {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise BadArgument(f"run.backward takes a loss with one element, not {described}")


def checked_weight(weight: float | None, reduction: str) -> float | None:
    """By what the lane counts."""
    if reduction not in ("mean", "sum"):
        raise BadArgument(f'run.backward takes reduction="mean" or reduction="sum", not {reduction!r:.60}')
    if reduction == "sum":
        if weight is not None:
            raise BadArgument(
                'run.backward takes weight= or reduction="sum", not both: a weight says how much the mean over a lane '
                "counts, and a sum counts whole"
            )
        return SUMMED
    return None if weight is None else _as_weight(weight)


def _as_weight(weight: float) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = -1.0
    if not 0 <= number < float("inf"):
        raise BadArgument(f"a lane's weight must be 0 or a positive number, not {weight!r:.60}")
    return number


def checked_epochs(*numbers: int) -> None:
    """How many epochs, and where they begin."""
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise BadArgument(f"run.epochs takes a number of epochs, 0 or more, not {number!r}")


def checked_patience_s(minutes: float) -> float:
    """How long nobody takes this worker for late."""
    if not isinstance(minutes, int | float) or not 0 < minutes <= MOST_PATIENCE_MINUTES:
        raise BadArgument(f"run.patience takes minutes, more than 0 and at most a day's, not {minutes!r:.60}")
    return 60 * minutes


def clipped_parameters(
    what: str, limit: float, parameters: torch.Tensor | Iterable[torch.Tensor] | None, models: Models
) -> list[torch.Tensor]:
    """The parameters whose gradient is clipped at `limit`: all of the models, where none are given."""
    models.require(what)
    if isinstance(limit, bool) or not isinstance(limit, int | float | torch.Tensor) or not limit >= 0:
        hint = (
            f": write {what}({parameters}, parameters), the number first" if isinstance(parameters, int | float) else ""
        )
        raise BadArgument(f"{what} takes a number, 0 or more, not {limit!r:.60}{hint}")
    if parameters is None:
        return [named.parameter for named in models.parameters()]
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
