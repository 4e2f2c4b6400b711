"""Which modules are in evaluation mode, and which parameters are frozen, in each training loop.

# Note [Modes that are set once]
# `if epoch == 3: model.backbone.requires_grad_(True)`, or `.eval()` of a layer, is done once. A process that starts
# later does not do it, and nothing would show it. So a snapshot has, for each training loop of the script, the modes
# that were set when it last began. When it is loaded those of the last loop are put back. If the script has set other
# ones when a loop begins in the middle of a pass, it is refused. At the start of a pass that may be meant: a note is
# enough there, and only where the modes are those with which the training began. A loop whose modes have come back to
# earlier ones has a rhythm of its own, as of a GAN, and is left alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lockstep.script.restart.attributes import SET_AGAIN, name_of_module
from lockstep.script.restart.difference import Difference
from lockstep.state.models import Models

_MOST_EARLIER = 16
_trains, _needs_grad = attrgetter("training"), attrgetter("requires_grad")


@dataclass
class _Loop:
    """The names of modules in evaluation mode and of frozen parameters, when a loop began first and last."""

    first: frozenset[str]
    last: frozenset[str]
    alternates: bool = False
    earlier: list[frozenset[str]] = field(default_factory=list)

    def saw(self, now: frozenset[str]) -> None:
        if now != self.last:
            self.alternates |= now in self.earlier
            self.earlier = [*self.earlier, self.last][-_MOST_EARLIER:]
            self.last = now


class ModelModes:
    """See Note [Modes that are set once]."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._loops: dict[str, _Loop] = {}
        """By their lines."""
        self._newest = ""
        """The loop that has begun last."""
        self._due: set[str] = set()
        """Loops of a snapshot that have not begun since it was loaded."""
        self._holders: tuple[list[nn.Module], list[torch.Tensor]] | None = None
        """Modules and parameters, as they were found last."""
        self._flags: dict[str, tuple[bool, ...]] = {}
        """Their modes when each loop began last."""

    def begin(self, loop: str, *, at_start: bool) -> list[Difference]:
        """A training loop begins, at the start of a pass or within one. Returns what is other than in the snapshot."""
        self._newest = loop
        modules, parameters = self._holders or self._look()
        flags = (*map(_trains, modules), *map(_needs_grad, parameters))
        if self._flags.get(loop) == flags:
            return []
        now = self._names()
        self._flags[loop] = flags
        known = self._loops.setdefault(loop, _Loop(now, now))
        before = known.last
        known.saw(now)
        if loop not in self._due:
            return []
        self._due.remove(loop)
        is_meant = known.alternates or (at_start and now != known.first)
        if now == before or is_meant:
            return []
        return [Difference(f"{_in_words(loop, now, before)}. {SET_AGAIN}", is_wrong=not at_start)]

    def state(self) -> list[list[Any]]:
        """Its part of a snapshot: for each loop its line, the names at first and at last, and if it alternates.

        The loop that has begun last stands last.
        """
        self._holders = None  # modules may have come: look again
        self._flags = {}
        loops = sorted(self._loops.items(), key=lambda item: item[0] == self._newest)
        return [[line, sorted(one.first), sorted(one.last), one.alternates] for line, one in loops]

    def load(self, saved: Iterable[tuple[str, list[str], list[str], bool]]) -> None:
        """Sets the modes of the last loop of a snapshot."""
        self._loops = {line: _Loop(frozenset(one), frozenset(last), turns) for line, one, last, turns in saved}
        self._due, self._flags, self._holders = set(self._loops), {}, None
        if self._loops:
            self._newest = list(self._loops)[-1]
            last = self._loops[self._newest].last
            for name, module in self._modules().items():
                module.training = name not in last
            for named in self._models.parameters():
                is_trained = _of_parameter(named.name) not in last
                if named.parameter.requires_grad != is_trained and _can_be_trained(named.parameter):
                    named.parameter.requires_grad_(is_trained)

    def _look(self) -> tuple[list[nn.Module], list[torch.Tensor]]:
        parameters: list[torch.Tensor] = [named.parameter for named in self._models.parameters()]
        self._holders = (list(self._modules().values()), parameters)
        return self._holders

    def _names(self) -> frozenset[str]:
        evaluating = {name for name, module in self._modules().items() if not module.training}
        parameters = self._models.parameters()
        return frozenset(
            evaluating | {_of_parameter(one.name) for one in parameters if not one.parameter.requires_grad}
        )

    def _modules(self) -> Mapping[str, nn.Module]:
        models = self._models.modules.items()
        return {name_of_module(label, path): one for label, model in models for path, one in model.named_modules()}


def _can_be_trained(parameter: torch.Tensor) -> bool:
    return parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())


def _of_parameter(name: str) -> str:
    return f"parameter {name}"


def _in_words(loop: str, now: frozenset[str], before: frozenset[str]) -> str:
    name, *more = sorted(now ^ before, key=lambda one: (not one.startswith("parameter "), one))
    if name.startswith("parameter "):
        words = f"{name} is {'frozen' if name in now else 'not frozen'}"
    else:
        words = f"{name} is in {'evaluation' if name in now else 'training'} mode"
    others = f", and {len(more)} more are not as they were" if more else ""
    return f"{words} in the loop at {loop}, and was not when the snapshot was taken{others}"
