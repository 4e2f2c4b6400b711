"""Shows the backward passes of a script as events, where somebody reads them."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch

from lockstep.events import BackwardBegan, BackwardEnded, Events

_NOTHING = nullcontext()


def shown_backward(events: Events) -> AbstractContextManager[None]:
    """Inside, every backward pass of this thread is an event at its begin and at its end.

    Not those that stand inside of another one. Where nobody reads these events, nothing is changed.
    """
    return _shown(events) if events.has_readers(BackwardBegan) else _NOTHING


@contextmanager
def _shown(events: Events) -> Iterator[None]:
    own, thread = torch.autograd.backward, threading.get_ident()
    under_way = False

    @wraps(own)
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal under_way
        if under_way or threading.get_ident() != thread:
            return own(*args, **kwargs)
        under_way = True
        events.emit(BackwardBegan)
        try:
            return own(*args, **kwargs)
        finally:
            under_way = False
            events.emit(BackwardEnded)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = own
