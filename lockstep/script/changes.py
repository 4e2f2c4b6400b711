"""What a script has changed between two places of its loop that a resumed run would change twice.

# Note [Saved in a body]
# A checkpoint that is saved between a batch and its loop over lanes goes on with that batch: the body runs again, from
# its top. What stands there before run.save, as `scheduler.step()`, was done before the checkpoint, and is done again.
# So where a loader is asked for a batch, it is noted how often the parameters were written, and where rates, schedulers
# and other counts stand; run.save compares them. Values are not read: this is done for each batch. What torch does not
# count, as writes to `p.data`, is not seen.

# Note [Changed at the head]
# A checkpoint in the middle of an epoch goes on with the head of the epoch's body: what the script changes there before
# its first batch, it changes again, and where the training depends on that, the run is refused (Note [What an epoch
# does at its head] in restored_state.py). So what is due in such an epoch is saved at its end. Rates do not count: most
# scripts that set them at the head set them to what they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from lockstep.data.structure import versions_of
from lockstep.script.restored_state import trains
from lockstep.state.models import Models


@dataclass(frozen=True)
class Mark:
    """What stands for the state of something. `is_state`: a run that goes on must find it as it was; a rate may be set
    to what it is, and an object of the script's own may count what is only shown."""

    value: Any
    is_state: bool = True


Marks = Mapping[str, Mark]
"""Of optimizers, models and other objects, by their names in words."""


def marks_of(models: Models, *, of_weights: bool = False) -> Marks:
    """As they are now. Cheap: nothing is read from a device. `of_weights`: models without an optimizer too."""
    marks: dict[str, Mark] = {}
    for label, optimizer in models.optimizers.items():
        groups = optimizer.param_groups
        marks[f"the parameters of {label}"] = Mark(versions_of([one for group in groups for one in group["params"]]))
        marks[f"the rates of {label}"] = Mark([_number(group.get("lr")) for group in groups], is_state=False)
    marks |= {f"`{name}`": Mark(_counts(one), is_state=trains(one)) for name, one in models.tracked.items()}
    if of_weights:
        modules = models.modules.items()
        marks |= {f"the weights of {label}": Mark(versions_of(_tensors(module))) for label, module in modules}
    return marks


def changed(before: Marks, now: Marks, *, only_state: bool = False) -> str | None:
    """The first that is not as it was, in words."""
    looked_at = ((name, mark) for name, mark in now.items() if mark.is_state or not only_state)
    return next((name for name, mark in looked_at if before.get(name, mark) != mark), None)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _number(value: Any) -> Any:
    return versions_of(value) if isinstance(value, torch.Tensor) else value


def _counts(one: Any) -> Any:
    """The numbers in its attributes; of a module, how often its first parameter and its own buffers were written."""
    if isinstance(one, nn.Module):
        return versions_of([*islice(one.parameters(), 1), *one.buffers(recurse=False)])
    return [value for value in vars(one).values() if type(value) in (int, float)] if hasattr(one, "__dict__") else []
