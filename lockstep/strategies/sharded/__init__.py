"""Sharded data parallelism: what plain data parallelism holds on every worker is held once, and each updates a part.

`engine` says what a step and an update are, whatever is held where; `plan` who updates what, `once` what a host holds,
`ledger` how far each worker has come. `optimizer` makes the user's optimizer update `chunks`.

- `host_engine`   CPUs. All workers of a host map one memory: `on_host` updates it (a `fused` optimizer in one call),
                  `gradients` is where their sum stands; lanes wait for it in `lent_buffers`
- `gpu_engine`    GPUs. Each worker has its parameters: `on_gpu` updates a part of them, and they are gathered in
                  `rounds`. `host_sums` has the sum of the gradients in the memory of the host, of which a script sees
                  a `host_gradient`. Parameters may leave the GPU while lanes need the memory (`offload`), if their
                  `marks` say that the host has them
"""

from dataclasses import dataclass

from lockstep.errors import BadArgument
from lockstep.events import Events
from lockstep.strategies.protocol import EngineOptions, StepEngine
from lockstep.strategies.sharded.gpu_engine import GpuEngine, OffloadEngine
from lockstep.strategies.sharded.host_engine import HostEngine
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
        if options.device.type == "cpu":
            return HostEngine(options, generation, events, self.level != "optimizer")
        return self.engine_of_gpus(options, generation, events)

    def engine_of_gpus(self, options: EngineOptions, generation: Generation, events: Events) -> StepEngine:
        kind = OffloadEngine if self.level == "parameters" else GpuEngine
        return kind(options, generation, events, self.level != "optimizer")
