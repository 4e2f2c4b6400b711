"""Snapshots in memory: copies that training does not change, and the one that a run keeps for a loss.

# Note [Lost outside of steps]
# Who loses a worker in a step computes the step again. In an evaluation, or elsewhere between two steps, what the lost
# worker had counted is gone, and only the script can count it again: all workers start again. They do not go on from
# the state of that moment. The script may have changed it since its last batch, by a scheduler's step or averaged
# weights for the evaluation, and would change it again; and it would miss what its loop over batches leaves behind, as
# the last loss. So the first and the last worker keep a snapshot in memory, taken where a run can be saved (Note
# [Moments] in saver.py): where the last batch of a pass is asked for, where an epoch has ended, and once a minute.
# Those who are left write it to disk.
"""

import math
import time
from collections.abc import Callable

import torch

from lockstep.launch.host.resources import free_bytes
from lockstep.state.snapshot import Snapshot

EVERY_S = 60.0
SHARE = 100
"""At most one part in so many of the time is spent on taking snapshots."""
MOST_OF_FREE = 1 / 8
"""The part of the free memory that a snapshot may take."""


class HostCopies:
    """CPU memory into which snapshots are copied, used again every time: training changes the tensors themselves.

    It holds one snapshot at a time, the last one copied.
    """

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copied(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot in this memory. Nothing is allocated for a name that has the size and dtype of before."""
        self._copies = {name: self._place_for(name, tensor) for name, tensor in snapshot.tensors.items()}
        for name, tensor in snapshot.tensors.items():
            self._copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in snapshot.tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return Snapshot(dict(self._copies), snapshot.state)

    def _place_for(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        known = self._copies.get(name)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        # A GPU copies into pinned memory at the full speed of its link.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


class Standby:
    """The newest snapshot that one worker keeps. See Note [Lost outside of steps]."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.snapshot: Snapshot | None = None
        self._say, self._clock = say, clock
        self._copies = HostCopies()
        self._taken_s = self._due_s = clock()

    def look(self, capture: Callable[[], Snapshot], *, is_end: bool) -> None:
        """The run can be saved now. `is_end`: a pass has one batch left, or an epoch has ended."""
        began_s = self._clock()
        if began_s < self._due_s or not (is_end or began_s - self._taken_s >= EVERY_S):
            return
        try:
            self._take(capture())
        except Exception as error:  # noqa: BLE001 - nobody has asked for it, so its failure ends no training
            self.snapshot, self._due_s = None, math.inf
            self._say(
                f"no snapshot is kept in memory: {error}. When a worker is lost in an evaluation, the run goes on from "
                "its newest checkpoint"
            )
            return
        self._taken_s = self._clock()
        self._due_s = self._taken_s + SHARE * (self._taken_s - began_s)

    def _take(self, snapshot: Snapshot) -> None:
        if self.snapshot is None:
            needed, free = sum(tensor.nbytes for tensor in snapshot.tensors.values()), free_bytes()
            if needed > free * MOST_OF_FREE:
                raise MemoryError(f"it takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
        self.snapshot = self._copies.copied(snapshot)
