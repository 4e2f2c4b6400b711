"""Shows the backward passes of a script as events, where somebody reads them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lockstep.events import BackwardBegan, BackwardEnded, Events
from lockstep.gradients.autograd_graph import around_backward

_NOTHING = nullcontext()


def shown_backward(events: Events) -> AbstractContextManager[None]:
    """Inside, every backward pass of this thread is an event at its begin and at its end.

    Not those that stand inside of another one. Where nobody reads these events, nothing is changed.
    """

    @contextmanager
    def shown(_: object) -> Iterator[None]:
        events.emit(BackwardBegan)
        try:
            yield
        finally:
            events.emit(BackwardEnded)

    return around_backward(shown) if events.has_readers(BackwardBegan) else _NOTHING
