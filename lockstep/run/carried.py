"""State that belongs to a lane: `run.carried`, which goes where the lane goes.

# Note [Carried by a lane]
# A script may carry something from batch to batch for its samples: the hidden state of an RNN. Kept in a variable, it
# would stay behind when its lane moves to another worker. What a lane leaves in `run.carried` belongs to the step: it
# counts when the step is committed, and a step that is computed again starts from what counted before. Before the
# commit every worker is given what all lanes have left, so that none is lost with its worker.
"""

import ctypes
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch

from lockstep.data.copying import copied
from lockstep.data.moving import moved
from lockstep.errors import Misuse
from lockstep.run.checkpoint import Snapshot
from lockstep.run.handing import packed_bytes, unpacked_bytes
from lockstep.run.state import pack, unpack
from lockstep.wire import Wire
from lockstep.wire.exchange import exchange_bytes

Values = dict[str, Any]
CARRIED = "carried"


class Carried:
    """What every lane of the run carries, on one worker. See Note [Carried by a lane]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted: dict[int, Values] = {}
        self._left: dict[int, Values] = {}
        """What lanes of the step under way have left, from here or from other workers."""
        self._evaluated: dict[int, Values] = {}
        self._values: Values | None = None

    @property
    def values(self) -> Values:
        """The values of the lane under way."""
        if self._values is None:
            raise Misuse(
                "run.carried outside of run.lanes: it belongs to the lane under way. Read and write it inside of "
                "`for ... in run.lanes(batch):`."
            )
        return self._values

    def begin_step(self) -> None:
        """A training step begins, or begins again."""
        self._left, self._evaluated = {}, {}

    def begin_lane(self, lane: int, *, trains: bool) -> None:
        """In training a lane starts from what counted; in an evaluation, from what its last one left since a step."""
        counted = self._counted if trains else self._evaluated
        self._values = moved(copied(counted.get(lane, {})), self._device)

    def end_lane(self, lane: int, *, trains: bool) -> None:
        values, self._values = self._values, None
        assert values is not None
        left = self._left if trains else self._evaluated
        if values or lane in self._counted:
            left[lane] = _detached(values)

    @property
    def is_used(self) -> bool:
        """Whether a lane of this worker has left something in the step under way."""
        return bool(self._left)

    def exchange(self, wire: Wire) -> None:
        """Collective. Afterwards this worker has what all lanes of the step have left."""
        mine = _packed(self._left)
        for rank, theirs in enumerate(exchange_bytes(wire.transport, mine)):
            if rank != wire.world.rank:
                self._left |= _unpacked(theirs)

    def commit(self) -> None:
        """The step counts."""
        self._counted |= self._left
        self._left = {}

    def state(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What a snapshot holds of it; its tensors go into `tensors`."""
        return {str(lane): pack(values, f"{CARRIED}/{lane}", tensors) for lane, values in self._counted.items()}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """The run goes on from a snapshot."""
        self._counted = {int(lane): copied(unpack(values, tensors)) for lane, values in state.items()}
        self._left, self._evaluated = {}, {}


def _detached(part: Any) -> Any:
    """The same without the graphs that made it: a lane's backward pass ends where the lane does."""
    if isinstance(part, torch.Tensor):
        return part.detach()
    if isinstance(part, Mapping):
        return {key: _detached(value) for key, value in part.items()}
    return type(part)(map(_detached, part)) if isinstance(part, list | tuple) else part


def _packed(lanes: Mapping[int, Values]) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    state = {str(lane): pack(values, f"{CARRIED}/{lane}", tensors) for lane, values in lanes.items()}
    return packed_bytes(Snapshot(tensors, state))


def _unpacked(content: bytes) -> dict[int, Values]:
    snapshot = unpacked_bytes(content)
    return {int(lane): unpack(values, snapshot.tensors) for lane, values in snapshot.state.items()}
