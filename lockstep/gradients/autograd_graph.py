"""What the graph below the root of a backward pass shows before the pass begins; and the pass itself, as events.

# Note [Numbers of graph nodes]
# torch numbers the nodes of its graph in the order in which a thread makes them, so the number shows in which lane a
# node was made. Numbers of two threads cannot be compared: a node that is numbered below one that it was made from
# shows that several were at work (a graph made by a backward pass on a GPU), and then nothing is known.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

from lockstep.errors import advise
from lockstep.events import BackwardBegan, BackwardEnded, Events

Span = tuple[int, int]
"""The numbers that nodes had in a stretch of time: from the first to below the second."""

LEAF = 2**64 - 1
"""The number of the node that adds up a parameter's gradient."""
MOST_SPANS = 64
"""How many loops over lanes are remembered."""

_NOTHING = nullcontext()


class LaneSpans:
    """When the graphs of lanes were made. See Note [Numbers of graph nodes]."""

    def __init__(self) -> None:
        self._before: deque[Span] = deque(maxlen=MOST_SPANS)
        self._loop_began = 0
        self._lane_began = 0

    def begin_loop(self) -> None:
        self._loop_began = self._lane_began = _get_sequence_nr()

    def begin_lane(self) -> None:
        self._lane_began = _get_sequence_nr()

    def end_loop(self) -> None:
        self._before.append((self._loop_began, _get_sequence_nr()))

    def made_before(self, roots: Sequence[Node]) -> str | None:
        """The name of a node below `roots` that was made in a lane before the one under way; None if there is none."""
        return made_in([*self._before, (self._loop_began, self._lane_began)], roots)


def made_in(spans: Sequence[Span], roots: Sequence[Node]) -> str | None:
    """The name of a node of the graph with a number in one of the spans; None if there is none, or none is known."""
    found, seen, waiting = None, set(roots), list(roots)
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if found is None and any(begin <= number < end for begin, end in spans):
            found = node.name()
        for child in children(node):
            if number < child._sequence_nr() < LEAF:
                return None
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return found


def looking(look: Callable[[Sequence[Node]], None]) -> AbstractContextManager[None]:
    """Inside, `look` is given the roots of every backward pass of this thread, before the pass begins.

    Not of those that stand inside of another one.
    """

    def look_at_roots(tensors: Any) -> None:
        with _waiting_unwatched():
            look(_roots(tensors))

    return AroundBackward(torch.compiler.disable(look_at_roots), lambda: None).inside()


@contextmanager
def _waiting_unwatched() -> Iterator[None]:
    """Inside, torch does not warn of waits for a GPU: who looks at values waits for them, and the script has not."""
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else 0
    if mode == 0:
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class ShownBackward:
    """Makes events of backward passes."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._around = AroundBackward(lambda _: events.emit(BackwardBegan), partial(events.emit, BackwardEnded))

    def inside(self) -> AbstractContextManager[None]:
        """Inside, every backward pass of this thread is an event at its begin and at its end.

        Not those that stand inside of another one. Where nobody reads these events, nothing is changed.
        """
        return self._around.inside() if self._events.has_readers(BackwardBegan) else _NOTHING


class AroundBackward:
    """Calls `begin` before backward passes, with the tensors that they begin with, and `end` after them."""

    def __init__(self, begin: Callable[[Any], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._made: dict[tuple[Callable[..., None], int], Callable[..., None]] = {}
        """What stands in the place of a function, for a thread: making it takes longer than calling it."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, this holds for every backward pass of this thread that does not stand inside of another one."""
        own, thread = torch.autograd.backward, threading.get_ident()
        if (own, thread) not in self._made:
            self._made[own, thread] = self._make(own, thread)
        torch.autograd.backward = self._made[own, thread]
        try:
            yield
        finally:
            torch.autograd.backward = own

    def _make(self, own: Callable[..., None], thread: int) -> Callable[..., None]:
        under_way, begin, end = False, self._begin, self._end

        @wraps(own)
        @partial(torch.compiler.disable, recursive=False)
        def backward(*args: Any, **kwargs: Any) -> None:
            nonlocal under_way
            if under_way or threading.get_ident() != thread:
                return own(*args, **kwargs)
            under_way = True
            try:
                begin(args[0] if args else kwargs.get("tensors", ()))
                own(*args, **kwargs)
            except RuntimeError as error:
                advise(error)
                raise
            finally:
                under_way = False
                end()

        return backward


def _roots(tensors: Any) -> list[Node]:
    """The nodes of tensors, or of the graph's edges, that a backward pass begins with."""
    given: Iterable[Any] = tensors if isinstance(tensors, list | tuple) and not hasattr(tensors, "node") else [tensors]
    nodes = [one.grad_fn if isinstance(one, torch.Tensor) else getattr(one, "node", None) for one in given]
    return [node for node in nodes if node is not None]


def children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]
