"""What a script has changed in the body of a loop before it calls `run.save`: a resumed run would change it twice.

# Note [Saved in a body]
# A checkpoint that is saved between a batch and its loop over lanes goes on with that batch: the body runs again, from
# its top. What stands there before run.save, as `scheduler.step()`, was done before the checkpoint, and is done again.
# So where a loader is asked for a batch, it is noted how often the parameters were written, and where rates, schedulers
# and other counts stand; run.save compares them. Values are not read: this is done for each batch. What torch does not
# count, as writes to `p.data`, is not seen.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from lockstep.data.structure import versions_of
from lockstep.state.models import Models

Marks = Mapping[str, Any]
"""What stands for the state of an optimizer or another object, by its name in words."""


def marks_of(models: Models) -> Marks:
    """As they are now. Cheap: nothing is read from a device."""
    marks: dict[str, Any] = {}
    for label, optimizer in models.optimizers.items():
        groups = optimizer.param_groups
        marks[f"the parameters of {label}"] = versions_of([one for group in groups for one in group["params"]])
        marks[f"the rates of {label}"] = [_number(group.get("lr")) for group in groups]
    return marks | {f"`{name}`": _counts(one) for name, one in models.tracked.items()}


def changed(before: Marks, now: Marks) -> str | None:
    """The first that is not as it was, in words."""
    return next((name for name, mark in now.items() if before.get(name, mark) != mark), None)


def _number(value: Any) -> Any:
    return versions_of(value) if isinstance(value, torch.Tensor) else value


def _counts(one: Any) -> Any:
    """The numbers in its attributes; of a module, how often its first parameter and its own buffers were written."""
    if isinstance(one, nn.Module):
        return versions_of([*islice(one.parameters(), 1), *one.buffers(recurse=False)])
    return [value for value in vars(one).values() if type(value) in (int, float)] if hasattr(one, "__dict__") else []
