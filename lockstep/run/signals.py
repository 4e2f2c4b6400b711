"""What is asked of a running worker by signals.

# Note [First and second]
# The first SIGINT or SIGTERM asks for a good end: the step under way is finished, all workers agree, the run is saved.
# A second one, or GRACE_S without the beginning of another step, ends this worker at once, as Python would have.
# SIGUSR1 asks this worker to leave; the others go on.
"""

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lockstep.elastic.requests import Signals

GRACE_S = 2.0


@contextmanager
def handled(signals: Signals) -> Iterator[None]:
    """While inside, the signals only note what is asked for. Does nothing outside of the main thread.

    A handler that the user has set stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal.SIGINT: _Asked(signals, "interrupt"), signal.SIGTERM: _Asked(signals, "terminate")}
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = {number: handler for number, handler in handlers.items() if signal.getsignal(number) == usual[number]}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: setattr(signals, "leave", True))
    try:
        yield
    finally:
        for handler in handlers.values():
            handler.cancel()
        for number, earlier in before.items():
            signal.signal(number, earlier)


class _Asked:
    """The handler of one signal. See Note [First and second]."""

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
        if self._timer is not None:
            self._timer.cancel()

    def _at_once(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
