"""What the user's own callbacks keep in their attributes, for a worker that joins and for a training that is resumed.

# Note [Attributes of callbacks]
# A callback counts steps, keeps the best value, or an average of the weights, in its attributes. A new process makes
# the callback anew, and what it then decides would be another training, or another number in a log. So the attributes
# travel with the run: numbers, strings, tensors, lists and dicts of them, and objects that have a state_dict. If a
# callback has changed something else (an open file, an object without a state_dict), it may not fit the rest: nothing
# of that callback travels, and a note names it.

# Note [Moments of a clock]
# Workers compare what travels, and their clocks differ, so a moment (`self.began = time.time()`) is a worker's own, and
# stays. It is known by its value: when an attribute has a new value, that was read from a clock if it lies between the
# last look at the callbacks and now. Before the first look that is the life of the process.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any

import psutil
import torch

from lockstep.errors import BadArgument
from lockstep.state.snapshot import pack

_FOREIGN = ("transformers", "lightning", "pytorch_lightning")
"""Packages whose own callbacks have their own ways."""

_MOST = 200
"""So many characters of an object are looked at."""


class CallbackAttributes:
    """The attributes of callbacks, but for those that refer to `known`: the trainer and the model.

    `keeps_itself` says of a callback whether it has another way to keep its state.
    """

    def __init__(
        self, callbacks: Sequence[Any], known: Sequence[Any], keeps_itself: Callable[[Any], bool],
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        own = [one for one in callbacks if type(one).__module__.split(".")[0] not in _FOREIGN]
        self._own = [one for one in own if not keeps_itself(one)]
        self._known, self._note = set(map(id, known)), note
        self._first = [{name: _look(value) for name, value in vars(one).items()} for one in self._own]
        age_s = time.time() - psutil.Process().create_time() + 1
        self._looked_at = time.time() - age_s, time.monotonic() - age_s
        self._floats: dict[tuple[int, str], tuple[float, bool]] = {}
        """By callback and name: the value of the last look, and whether it is a moment."""
        self._find_moments()

    def state(self) -> list[dict[str, Any]]:
        """By callback, in order: what travels, or the names of what cannot."""
        self._find_moments()
        return [self._of(one, first) for one, first in zip(self._own, self._first, strict=True)]

    def _find_moments(self) -> None:
        """See Note [Moments of a clock]."""
        now = time.time(), time.monotonic()
        for callback in self._own:
            for name, value in vars(callback).items():
                key = id(callback), name
                if isinstance(value, float) and (key not in self._floats or self._floats[key][0] != value):
                    spans = zip(self._looked_at, now, strict=True)
                    self._floats[key] = value, any(before <= value <= after for before, after in spans)
        self._looked_at = now

    def _of(self, callback: Any, first: Mapping[str, str]) -> dict[str, Any]:
        values, parts, strange = {}, {}, []
        for name, value in vars(callback).items():
            if id(value) in self._known or self._is_moment(callback, name, value):
                continue
            if _is_value(value):
                values[name] = value
            elif _has_state(value):
                parts[name] = value.state_dict()
            elif first.get(name) != _look(value):
                strange.append(name)
        kind = type(callback).__qualname__
        return {"kind": kind, "strange": strange} if strange else {"kind": kind, "values": values, "parts": parts}

    def put(self, saved: Sequence[Mapping[str, Any]], *, says: bool = False) -> None:
        """The callbacks have what was saved. With `says`, a note names those that begin anew."""
        for callback, state in zip(self._own, saved, strict=False):
            if type(callback).__qualname__ != state["kind"]:
                continue
            for name, value in state.get("values", {}).items():
                _set(callback, name, value)
            for name, part in state.get("parts", {}).items():
                if _has_state(getattr(callback, name, None)):
                    getattr(callback, name).load_state_dict(part)
            if says and "strange" in state:
                self._note(
                    f"the callback {state['kind']} begins anew: it had changed {', '.join(state['strange'])}, which "
                    "cannot go on by itself. Give it a state_dict and a load_state_dict"
                )

    def _is_moment(self, callback: Any, name: str, value: Any) -> bool:
        if isinstance(value, float):
            return self._floats[id(callback), name][1]
        return isinstance(value, date | timedelta)


def _is_value(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return False
    try:
        pack(value, "", {})
    except BadArgument:
        return False
    return type(value) in (dict, list, tuple) or not isinstance(value, Mapping | list | tuple)


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _set(callback: Any, name: str, value: Any) -> None:
    """As a copy, on the device of what it replaces."""
    before = getattr(callback, name, None)
    setattr(callback, name, _moved(value, before))


def _moved(value: Any, like: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(like.device if isinstance(like, torch.Tensor) else value.device, copy=True)
    if isinstance(value, dict):
        return {key: _moved(item, like.get(key) if isinstance(like, dict) else None) for key, item in value.items()}
    if isinstance(value, list | tuple):
        known = list(like) if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        return type(value)(map(_moved, value, known))
    return value


def _look(value: Any) -> str:
    """What shows whether something other than a plain value has changed."""
    if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        return f"{type(value).__name__} {len(value)} {str(value)[:_MOST]}"
    if hasattr(value, "tobytes"):
        return str(hash(value.tobytes()))
    inner = vars(value) if hasattr(value, "__dict__") and not callable(value) else {}
    return f"{type(value).__name__} {id(value)} {sorted((name, _mark(one)) for name, one in inner.items())}"


def _mark(value: Any) -> str:
    """Of a part of an object: a number itself, a tensor by how often it was written to, and how many there are."""
    if isinstance(value, torch.Tensor):
        return f"{id(value)} {value._version}"
    if isinstance(value, dict):
        return f"{len(value)} {[_mark(one) for one in value.values() if isinstance(one, torch.Tensor)]}"
    if isinstance(value, list | set | deque):
        return f"{len(value)} {[_mark(one) for one in value if isinstance(one, torch.Tensor)]}"
    return str(value) if isinstance(value, int | float | str) else ""
