"""What workers ask of all: each puts its requests into a step's record, so that all learn of them in the same step.

# Note [The last one saves]
# A worker that leaves need not save, because others go on. If all leave in one step, nobody goes on, and what was
# trained since the last checkpoint would be lost without a word. So every worker that does not leave says so in its
# record, and where none has, all save and end as after SIGTERM. The last member of a run is such a case by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.gradients.record import StepRequest
from lockstep.settings.environments.stop_signals import GRACE_S


@dataclass
class Signals:
    """What was asked of this worker from outside; set by signal handlers."""

    interrupt: bool = False
    terminate: bool = False
    leave: bool = False
    leave_code: int = 0
    """With which exit code this worker leaves."""
    grace_s: float = GRACE_S
    """How long the last checkpoint may take."""
    news: str = ""
    """The signal that has come and that was not reported yet."""

    def take_news(self) -> str:
        """The signal that was not reported yet, once."""
        news, self.news = self.news, ""
        return news


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
        mine[StepRequest.STAY] = not signals.leave
        mine[StepRequest.CHANGE], mine[StepRequest.JOIN], mine[StepRequest.FIRST] = signals.leave or change, join, first
        mine[StepRequest.INTERRUPT], mine[StepRequest.TERMINATE] = signals.interrupt, signals.terminate
        self.mine = mine

    def agree(self, requests: Sequence[bool]) -> None:
        """Those of all workers, from the record of a committed step. A request to join holds until a turn begins.

        So does one to end. See Note [The last one saves].
        """
        before, self._agreed = self._agreed, list(requests)
        if not requests[StepRequest.STAY]:
            self._agreed[StepRequest.CHANGE], self._agreed[StepRequest.TERMINATE] = False, True
        for request in (StepRequest.JOIN, StepRequest.INTERRUPT, StepRequest.TERMINATE):
            self._agreed[request] |= before[request]

    def clear(self) -> None:
        """Another generation has been formed."""
        self._agreed = [False] * len(StepRequest)
