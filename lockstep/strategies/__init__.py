"""What a step means: who owns it between its lanes and the update. `lockstep.start(strategy=...)` takes one of these.

`protocol` is the seam; `replicated` is plain data parallelism; in `sharded`, parameters and optimizer state are held
once.
"""

from lockstep.errors import BadArgument
from lockstep.settings.environment import STRATEGIES
from lockstep.strategies.protocol import EngineOptions, Replicas, StepEngine, Strategy
from lockstep.strategies.replicated import Replicated
from lockstep.strategies.sharded import LEVELS, Sharded

__all__ = ["EngineOptions", "Replicas", "Replicated", "Sharded", "StepEngine", "Strategy", "parse"]

_BY_NAME: dict[str, Strategy] = dict(
    zip(STRATEGIES, (Replicated(), *(Sharded(level) for level in LEVELS)), strict=True)
)


def parse(text: str) -> Strategy:
    """The strategy that `str(strategy)` names."""
    if text not in _BY_NAME:
        raise BadArgument(
            f"strategy must be one of {', '.join(map(repr, _BY_NAME))}, or an object of lockstep.strategies, not "
            f"{text!r:.60}"
        )
    return _BY_NAME[text]
