"""Whether code that sees a lane keeps something of it in the attributes of an object of the user's.

# Note [Kept in a lane]
# A method that is called for each lane sees the lanes of this worker only. What it adds up in an attribute (a counter,
# a list of losses) is another thing on another number of workers, and counts twice what is computed again after a loss.
# A number or a container that has changed is refused by its name. A tensor may be replaced, as an image that is kept to
# be shown: nothing is added up.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from lockstep.errors import Misuse

_MANY = (list, tuple, dict, set, deque)


class LaneAttributes:
    """Looks at the attributes of one object, but for those in `ignored`. See Note [Kept in a lane]."""

    def __init__(self, holder: Any, method: str, advice: str, ignored: Iterable[str] = ()) -> None:
        self._holder, self._method, self._advice, self._ignored = holder, method, advice, frozenset(ignored)

    def now(self) -> dict[str, Any]:
        """What numbers and containers there are: numbers by value, containers by how much they hold."""
        found = {}
        for name, value in vars(self._holder).items():
            if name in self._ignored:
                continue
            if isinstance(value, int | float):
                found[name] = value
            elif isinstance(value, _MANY):
                found[name] = sum(len(one) for one in _parts(value) if isinstance(one, _MANY)) + len(value)
        return found

    def check(self, before: dict[str, Any]) -> None:
        """Misuse, by name, if one is another than `before`."""
        now = self.now()
        for name in now.keys() | before.keys():
            if now.get(name) != before.get(name) and not (now.get(name) != now.get(name)):
                raise Misuse(
                    f"{self._method} has changed self.{name}: it is called for each lane, and sees those of one worker "
                    f"only, so what is kept there differs with the number of workers. {self._advice}"
                )


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
