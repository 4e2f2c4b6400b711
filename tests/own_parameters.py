"""The sharded strategies of GPUs, for parameters on the CPU: a machine without a GPU runs the same code."""

from torch._dynamo import eval_frame

from lockstep.events import Events
from lockstep.strategies import EngineOptions, Sharded, StepEngine
from lockstep.strategies.sharded import offload
from lockstep.wire.generation import Generation


class AsOnGpus(Sharded):
    """Divides as on GPUs. Parameters leave their memory one module after the other, however small they are."""

    def __init__(self, level: str = "optimizer") -> None:
        super().__init__(level)

    def engine(self, options: EngineOptions, generation: Generation, events: Events) -> StepEngine:
        offload.GROUP_BYTES = 1
        eval_frame.cached_backends.clear()  # a test may have compiled in the process that this worker is forked from
        return self.engine_of_gpus(options, generation, events)
