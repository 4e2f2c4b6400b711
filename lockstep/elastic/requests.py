"""What workers ask of all: each puts its requests into a step's record, so that all learn of them in the same step."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.gradients.record import StepRequest


@dataclass
class Signals:
    """What was asked of this worker from outside; set by signal handlers."""

    interrupt: bool = False
    terminate: bool = False
    leave: bool = False


class Requests:
    """What this worker asks for in the step under way, and what all have agreed to do before the next one."""

    def __init__(self) -> None:
        self.mine: Sequence[bool] = [False] * len(StepRequest)
        self._agreed = [False] * len(StepRequest)

    def __contains__(self, request: StepRequest) -> bool:
        """Whether all have agreed on it."""
        return self._agreed[request]

    @property
    def ends(self) -> bool:
        """Whether all have agreed to end before the next step because of a signal."""
        return StepRequest.INTERRUPT in self or StepRequest.TERMINATE in self

    def ask(self, signals: Signals, *, change: bool, join: bool, first: bool) -> None:
        """For the record of the step that begins."""
        mine = [False] * len(StepRequest)
        mine[StepRequest.CHANGE], mine[StepRequest.JOIN], mine[StepRequest.FIRST] = signals.leave or change, join, first
        mine[StepRequest.INTERRUPT], mine[StepRequest.TERMINATE] = signals.interrupt, signals.terminate
        self.mine = mine

    def agree(self, requests: Sequence[bool]) -> None:
        """Those of all workers, from the record of a committed step. A request to join holds until a turn begins."""
        joins = StepRequest.JOIN in self
        self._agreed = list(requests)
        self._agreed[StepRequest.JOIN] |= joins

    def clear(self) -> None:
        """Another generation has been formed."""
        self._agreed = [False] * len(StepRequest)
