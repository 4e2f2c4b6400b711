"""The rhythm in which a script loops and updates, and whether a resumed run goes on in it.

# Note [Rhythm]
# A script that makes an update after every second batch, or trains a generator after every fifth one, may have a
# counter that lockstep cannot read. What it does can be observed: loops over run.lanes, by their line, and updates, by
# their optimizer:
#
#     loop train.py:9, loop train.py:9, update, loop train.py:9, loop train.py:9, update, loop train.py:9
#
# If the last of them before a snapshot repeat themselves, the resumed run must go on at the same place of the
# repetition. Here a loop is due, and then an update: an update where none is due, or another loop, shows that the
# script has restarted its count. A missing update alone shows nothing: a GradScaler leaves one out now and then. With
# one loop in each repetition nothing can be out of order.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

REMEMBERED = 256
TIMES = 3
"""How often a part must have come in a row to be a repetition."""

_LOOP, _UPDATE = "loop ", "update "


def loop(site: str) -> str:
    return _LOOP + site


def update(label: str) -> str:
    return _UPDATE + label


def repeated(history: Sequence[str]) -> Sequence[str]:
    """The part that the history repeats at its end, TIMES times or more: the one that explains most of it.

    Nothing if there is none. The next event is the first of the part.
    """
    explained = {length: _explained(history, length) for length in range(1, len(history) // TIMES + 1)}
    enough = [length for length, events in explained.items() if events >= TIMES * length]
    best = max(enough, key=lambda length: (explained[length], -length), default=0)
    return history[len(history) - best :]


def _explained(history: Sequence[str], length: int) -> int:
    """How many events at the end repeat those `length` before them, and the first such part."""
    same = 0
    while same + length < len(history) and history[-1 - same] == history[-1 - same - length]:
        same += 1
    return same + length


@dataclass
class Rhythm:
    """What the script has done recently, and, after a resume, what it must do next."""

    history: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _part: Sequence[str] = ()
    _place: int = 0
    _met: int = 0

    def expect(self, history: Sequence[str]) -> None:
        """The run resumes from a snapshot with this history. See Note [Rhythm]."""
        self.history = deque(history, maxlen=REMEMBERED)
        part = repeated(list(history))
        has_phase = sum(event.startswith(_LOOP) for event in part) > 1
        self._part, self._place, self._met = part if has_phase else (), 0, 0

    def forget(self) -> None:
        """Nothing is expected any more: a pass has ended, at which many scripts break their rhythm."""
        self._part = ()

    def saw(self, event: str) -> str | None:
        """Records what the script does next; returns what was due instead, if it is out of rhythm."""
        self.history.append(event)
        if not self._part:
            return None
        while event.startswith(_LOOP) and self._next.startswith(_UPDATE):  # left out
            self._place, self._met = self._place + 1, 0
        due = self._next
        self._place, self._met = self._place + 1, self._met + 1
        if self._met == len(self._part):
            self.forget()
        return None if due == event else due

    @property
    def ends_with_loop(self) -> bool:
        """Whether no update has been made since the last loop."""
        return bool(self.history) and self.history[-1].startswith(_LOOP)

    @property
    def _next(self) -> str:
        return self._part[self._place % len(self._part)]
