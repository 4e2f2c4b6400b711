"""Sharded data parallelism: what plain data parallelism holds on every worker is held once, and each updates a part.

`plan` says who updates what, `once` what a host holds, `gradients` where their sum stands (that of GPUs: `host_sums`,
of which a script sees a `host_gradient`), `ledger` how far each worker has come. `optimizer` makes the user's optimizer
update `chunks`: `on_host`, where all workers map one memory (a `fused` one in one call), or `on_gpu`, where each has
its parameters, which are gathered in `rounds`, and may leave the GPU while lanes need the memory (`offload`), if
their `marks` say that the host has them. `engine` ties them to a step.
"""

from dataclasses import dataclass

from lockstep.errors import BadArgument
from lockstep.events import Events
from lockstep.strategies.protocol import EngineOptions, StepEngine
from lockstep.strategies.sharded.engine import ShardedEngine
from lockstep.wire.generation import Generation

LEVELS = ("optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Sharded:
    """`level` names what is held once: "optimizer", "gradients" or "parameters"; each includes those before it.

    On CPUs the workers of a host share memory, in which parameters and optimizer state stand once whatever the level:
    it costs less than to copy them. "gradients" has the sum of the gradients there too; "parameters" is the same. On
    GPUs "optimizer" divides the state among the workers of a host, "gradients" has their sum in the memory of the host,
    and under "parameters" these leave the GPU in the forward pass; between steps each worker has all of them.
    """

    level: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise BadArgument(f"Sharded takes {', '.join(map(repr, LEVELS))}, not {self.level!r:.60}")

    def __str__(self) -> str:
        return f"sharded:{self.level}"

    def engine(self, options: EngineOptions, generation: Generation, events: Events) -> StepEngine:
        return ShardedEngine(options, generation, events, self.level)
