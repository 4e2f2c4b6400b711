"""What a script has changed between two places of its loop that a resumed run would change twice.

# Note [Saved in a body]
#     for batch in loader:
#         scheduler.step()
#         run.save("last")
#         for x, y in run.lanes(batch): ...
#
# This checkpoint goes on with the batch that was not trained on yet: the body runs again, from its top. What stands
# there before run.save was done before the checkpoint, and is done again. So where a loader is asked for a batch, it is
# noted how often the parameters were written, and where rates, schedulers and other counts stand; run.save compares
# them. Values are not read: this is done for each batch. What torch does not count, as writes to `p.data`, is not seen.

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

from lockstep.chance import Generators
from lockstep.data import GlobalBatch
from lockstep.data.structure import versions_of
from lockstep.script.restart.restored_state import trains
from lockstep.state.models import Models
from lockstep.state.progress import DataProgress


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


class BodyChanges:
    """What a run that is resumed from now would do twice. See Note [Saved in a body] and Note [Changed at the head]."""

    def __init__(self, models: Models, progress: DataProgress) -> None:
        self._models, self._progress = models, progress
        self._at_head: Marks | None = None
        """What was where the body of the epoch under way began, until its first step begins."""
        self._asks: dict[int, tuple[Generators, Marks]] = {}
        """What was where each loader was asked for the first batch that it would hand out again."""
        self.changes_at_head = False
        """Whether the script has changed rates, or some state, before the first batch of the epoch under way."""
        self.changed_at_head: str | None = None
        """The state among that, in words."""

    def epoch_begins(self) -> None:
        self._at_head, self.changes_at_head, self.changed_at_head = marks_of(self._models, of_weights=True), False, None

    def asked(self, number: int) -> None:
        """A loader is about to load its next batch."""
        loader = self._progress.loaders[number]
        if number not in self._asks or self._progress.resumes_at(loader) == loader.position:
            self._asks[number] = Generators.now(), marks_of(self._models, of_weights=self._at_head is not None)

    def step_begins(self, batch: GlobalBatch) -> None:
        at_head, self._at_head = self._at_head, None
        asked = self._asks.get(batch.loader) if batch.loader is not None and batch.begins_pass else None
        if at_head is not None and asked is not None:
            self.changes_at_head = changed(at_head, asked[1]) is not None
            self.changed_at_head = changed(at_head, asked[1], only_state=True)

    def forget(self) -> None:
        """No batch is handed out again: the step that trained on it is committed, or a snapshot was loaded."""
        self._asks.clear()

    def generators(self) -> Generators:
        """Those outside of lanes where a run that is resumed from now goes on: as they are; or, where it hands out a
        batch again, as they were when that was asked for."""
        again = self._asked_again()
        return Generators.now() if again is None else again[0]

    def in_body(self) -> str | None:
        """What the script has changed since the batch was asked for that such a run is handed out again."""
        again = self._asked_again()
        return None if again is None else changed(again[1], marks_of(self._models))

    def _asked_again(self) -> tuple[Generators, Marks] | None:
        progress = self._progress
        asks = ((progress.loaders[number], asked) for number, asked in self._asks.items())
        return next((asked for loader, asked in asks if progress.resumes_at(loader) != loader.position), None)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _number(value: Any) -> Any:
    return versions_of(value) if isinstance(value, torch.Tensor) else value


def _counts(one: Any) -> Any:
    """The numbers in its attributes; of a module, how often its first parameter and its own buffers were written."""
    if isinstance(one, nn.Module):
        return versions_of([*islice(one.parameters(), 1), *one.buffers(recurse=False)])
    return [value for value in vars(one).values() if type(value) in (int, float)] if hasattr(one, "__dict__") else []
