"""What `self.log` is given in the lanes of a step, and how it comes together: the same values on every worker.

# Note [Logged in lanes]
# A lane logs what it has found on its own samples. Its entries travel with the step (`run.carried`), so that they are
# committed with it, computed again with it, and known to every worker, also to one without lanes. After the lanes every
# worker gives them to Lightning, once: means by the samples of the lanes, in lane order, and sums, minima and maxima.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.errors import BadArgument
from lockstep.run.run import Run

CARRIED = "lightning"

_REDUCTIONS: Mapping[str, Callable[[list[float], list[float]], float]] = {
    "mean": lambda values, sizes: sum(v * s for v, s in zip(values, sizes, strict=True)) / sum(sizes),
    "sum": lambda values, sizes: sum(values),
    "min": lambda values, sizes: min(values),
    "max": lambda values, sizes: max(values),
}


class LaneLog:
    """What the lanes of the step under way log, and what all lanes of the last one have logged."""

    def __init__(self, run: Run, module: Any) -> None:
        self._run, self._module = run, module

    @contextmanager
    def lane(self, num_samples: int) -> Iterator[None]:
        """Inside, `self.log` of the module stores what it is given."""
        entries: list[Any] = []

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if args:
                raise BadArgument(f"self.log({name!r}) in training_step takes its options by name under lockstep")
            entries.append(_entry(name, value, num_samples, options))

        self._module.log = log
        try:
            yield
        finally:
            del self._module.log
        self._run.carried[CARRIED] = {"step": self._run.step, "entries": entries}

    def give(self) -> None:
        """After the lanes: logs what they have logged, once."""
        together: dict[str, list[Any]] = {}
        for _, carried in sorted(self._run.carried_by_lane.items()):
            stored = carried.get(CARRIED, {"step": -1})
            if stored["step"] == self._run.step - 1:
                for name, *entry in stored["entries"]:
                    together.setdefault(name, []).append(entry)
        for name, entries in together.items():
            values, sizes, options = map(list, zip(*entries, strict=True))
            reduction = options[0].get("reduce_fx", "mean")
            value = _REDUCTIONS[reduction](values, sizes)
            self._module.log(name, value, **{**options[0], "batch_size": int(sum(sizes))})


def _entry(name: str, value: Any, num_samples: int, options: dict[str, Any]) -> list[Any]:
    """As plain values, which travel."""
    if not isinstance(value, int | float) and getattr(value, "numel", lambda: 0)() != 1:
        raise BadArgument(
            f"self.log({name!r}) in training_step takes a number under lockstep, not {type(value).__name__}: a metric "
            "of torchmetrics sees the lanes of one worker only. Log its value for the batch"
        )
    reduction = options.get("reduce_fx", "mean")
    reduction = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "?")
    if reduction not in _REDUCTIONS:
        raise BadArgument(
            f"self.log({name!r}, reduce_fx={reduction}) in training_step: take one of {', '.join(_REDUCTIONS)}"
        )
    kept = {key: given for key, given in options.items() if given is None or isinstance(given, bool | int | str)}
    size = options.get("batch_size") or num_samples
    return [
        name,
        float(value.detach() if hasattr(value, "detach") else value),
        float(size),
        {**kept, "reduce_fx": reduction},
    ]
