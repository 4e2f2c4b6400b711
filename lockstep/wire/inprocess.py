"""The transport of a world of one: there is nobody to talk to."""

import torch

from lockstep.wire.transport import Pending
from lockstep.world import World


class InProcess:
    """A world of one worker, in which every collective is already finished."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        raise ValueError(f"a world of one worker has no worker {target}")

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        raise ValueError(f"a world of one worker has no worker {source}")

    def awaited(self) -> list[int]:
        return []

    def close(self) -> None:
        pass
