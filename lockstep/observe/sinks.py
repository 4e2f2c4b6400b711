"""Where a run's metrics go besides its folder: other people's loggers, known by the methods that they have.

| method | of |
| --- | --- |
| `add_scalar(name, value, step)` | TensorBoard's `SummaryWriter` |
| `log_metrics(values, step=)` | MLflow (the module), Lightning's loggers, Comet |
| `track(value, name=, step=)` | Aim |
| `log(values, step=)` | Weights & Biases |

None of them is imported here.
"""

import atexit
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import BadArgument

METHODS = ("add_scalar", "log_metrics", "track", "log")
CLOSERS = ("close", "finish", "finalize")

Values = Mapping[str, float]


class MetricsSink:
    """One sink of a run: an object with one of METHODS, or what makes one when this worker first writes to it.

    What was made here is closed here; an object that the script made stays the script's. A sink that fails gets nothing
    any more, `say` is called once, and training goes on.
    """

    def __init__(self, given: Any, say: Callable[[str], None]) -> None:
        self._given, self._say = given, say
        self._makes = isinstance(given, type) or method_of(given) is None
        if self._makes and not callable(given):
            raise BadArgument(f"run.log_to takes {_allowed()}, not {_named(given)}")
        if not self._makes:
            _refuse_other_log(given)
        self._made: Any = None
        self._has_failed = False

    def write(self, values: Values, step: int) -> None:
        """On the present first worker alone."""
        if not self._has_failed:
            self._attempt(lambda: write_to(self._target(), values, step), f"step {step}")

    def close(self) -> None:
        """Closes what was made here."""
        target, self._made = self._made, None
        atexit.unregister(self.close)
        closer = next((getattr(target, name) for name in CLOSERS if hasattr(target, name)), None)
        if closer is not None and not self._has_failed:
            self._attempt(lambda: closer("success") if closer.__name__ == "finalize" else closer(), "its end")

    def forked(self) -> "MetricsSink":
        """For a copy of this worker: what the original has opened is left to it, and made anew when it is needed."""
        atexit.unregister(self.close)
        return MetricsSink(self._given, self._say)

    def _target(self) -> Any:
        if not self._makes:
            return self._given
        if self._made is None:
            made = self._given()
            if method_of(made) is None:
                raise BadArgument(f"it has made {_named(made)}, and run.log_to takes {_allowed()}")
            _refuse_other_log(made)
            self._made = made
            atexit.register(self.close)  # before the library's own exit function, which ends what we then could not
        return self._made

    def _attempt(self, write: Callable[[], None], when: str) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - other people's code, on which no training depends
            self._has_failed = True
            self._say(
                f"the metrics of {when} could not be written to {_named(self._given)}: {type(error).__name__}: "
                f"{error}. It gets nothing any more; training goes on"
            )


def method_of(sink: Any) -> str | None:
    """The method by which metrics are written to the object; None if it has none of METHODS."""
    return next((name for name in METHODS if callable(getattr(sink, name, None))), None)


def write_to(sink: Any, values: Values, step: int) -> None:
    """Writes them by the method that the object has."""
    match method_of(sink):
        case "add_scalar":
            for name, value in values.items():
                sink.add_scalar(name, value, step)
            if callable(flush := getattr(sink, "flush", None)):
                flush()  # TensorBoard keeps values for two minutes, which a kill would lose
        case "track":
            for name, value in values.items():
                sink.track(value, name=name, step=step)
        case "log_metrics":
            sink.log_metrics(dict(values), step=step)
        case _:
            sink.log(dict(values), step=step)


def _refuse_other_log(sink: Any) -> None:
    """Python's own loggers have a method `log` too, which takes a level and a text."""
    if method_of(sink) != "log":
        return
    try:
        signature = inspect.signature(sink.log)
    except (TypeError, ValueError):  # one that is not written in Python
        return
    try:
        signature.bind({}, step=0)
    except TypeError as error:
        raise BadArgument(f"{_named(sink)} has another method log: run.log_to takes {_allowed()}") from error


def _allowed() -> str:
    return (
        "an object with add_scalar(name, value, step), log_metrics(values, step=), track(value, name=, step=) or "
        "log(values, step=), or a function without arguments that makes one"
    )


def _named(given: Any) -> str:
    return getattr(given, "__qualname__", None) or getattr(given, "__name__", None) or f"a {type(given).__qualname__}"
