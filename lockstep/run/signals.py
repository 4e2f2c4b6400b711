"""What is asked of a running worker by signals.

# Note [First and second]
# The first SIGINT or SIGTERM asks for a good end: the step under way is finished, all workers agree, the run is saved.
# A second one, or GRACE_S without the beginning of another step, ends this worker at once, as Python would have.
# SIGUSR1 asks this worker to leave; the others go on. Under an engine other signals ask for an end as well, and only
# the engine ends a worker at once: Note [Signals of an engine] in settings/environments/stop_signals.py.
"""

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lockstep.elastic.requests import Signals
from lockstep.launch.channels.exits import TERMINATED
from lockstep.settings.environments.stop_signals import GRACE_S, StopSignals

Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def handled(signals: Signals, asked: StopSignals, note: Callable[[str], None]) -> Iterator[None]:
    """While inside, the signals only note what is asked for. Does nothing outside of the main thread.

    A handler that the user has set stays, and `note` says so of an engine's signal. That by which `lockstep run` asks a
    worker to leave is always handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals.grace_s = asked.grace_s
    signals.leave_code = 0 if asked.engine is None else TERMINATED
    handlers = _handlers(signals, asked)
    kept = [number for number in handlers if not _is_free(number, asked)]
    if asked.engine is not None and kept:
        note(_kept_in_words(kept, asked.engine))
    before = {number: signal.signal(number, handlers[number]) for number in handlers if number not in kept}
    try:
        yield
    finally:
        for handler in handlers.values():
            if isinstance(handler, _Asked):
                handler.cancel()
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _handlers(signals: Signals, asked: StopSignals) -> dict[signal.Signals, Handler]:
    speaks = asked.engine is not None
    end = _Asked(signals, "terminate") if asked.has_limit else _Noted(signals, "terminate", speaks)
    leave = _Noted(signals, "leave", speaks)
    return {
        signal.SIGINT: _Asked(signals, "interrupt"),
        **dict.fromkeys(asked.ends, end),
        **dict.fromkeys(asked.leaves, leave),
    }


def _is_free(number: signal.Signals, asked: StopSignals) -> bool:
    if asked.engine is None and number in asked.leaves:
        return True
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    return signal.getsignal(number) == usual


def _kept_in_words(kept: list[signal.Signals], engine: str) -> str:
    names = ", ".join(number.name for number in kept)
    return f"the script handles {names} itself: lockstep neither saves nor ends the run when {engine} sends it"


class _Noted:
    """The handler of a signal that means nothing new when it comes again. See Note [First and second]."""

    def __init__(self, signals: Signals, wish: str, speaks: bool) -> None:
        self._signals, self._wish, self._speaks = signals, wish, speaks

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if getattr(self._signals, self._wish):
            return
        setattr(self._signals, self._wish, True)
        if not self._speaks:
            return
        does = "this worker leaves" if self._wish == "leave" else "the run is saved and ends"
        self._signals.news = f"{signal.Signals(number).name} has come: {does} after the step"


class _Asked:
    """The handler of a signal that a person sends. See Note [First and second]."""

    def __init__(self, signals: Signals, wish: str) -> None:
        self._signals, self._wish = signals, wish
        self._timer: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if getattr(self._signals, self._wish):
            self._at_once(number)
        setattr(self._signals, self._wish, True)
        self._timer = threading.Timer(GRACE_S, _thread.interrupt_main, (number,))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """No end at once any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _at_once(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
