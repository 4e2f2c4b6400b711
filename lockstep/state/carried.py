"""State that belongs to a lane: `run.carried`, which moves with the lane.

# Note [Carried by a lane]
# A script may carry something from batch to batch for its samples: the hidden state of an RNN. Kept in a variable, it
# would stay behind when its lane moves to another worker. What a lane stores in `run.carried` belongs to the step: it
# is committed with the step, and a step that is computed again starts from the values committed before. Before the
# commit every worker receives the values of all lanes, so that none is lost with its worker.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lockstep.errors import Misuse
from lockstep.state.snapshot import Json, Tensors, from_bytes, pack, to_bytes, unpack
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
        """What lanes of the step under way have stored, on this or on other workers."""
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
        """In training a lane starts from the committed values; in an evaluation, from its last one's since a step."""
        counted = self._counted if trains else self._evaluated
        self._values = _mapped(counted.get(lane, {}), lambda tensor: tensor.to(self._device, copy=True))

    def end_lane(self, lane: int, *, trains: bool) -> None:
        values, self._values = self._values, None
        assert values is not None
        left = self._left if trains else self._evaluated
        if values or lane in self._counted:
            left[lane] = _mapped(values, torch.Tensor.detach)  # a lane's backward pass ends where the lane does

    @property
    def is_used(self) -> bool:
        """Whether a lane of this worker has stored something in the step under way."""
        return bool(self._left)

    def exchange(self, wire: Wire) -> None:
        """Collective. Afterwards this worker has what all lanes of the step have stored."""
        tensors: Tensors = {}
        mine = to_bytes(_packed(self._left, tensors), tensors)
        for rank, theirs in enumerate(exchange_bytes(wire.transport, mine)):
            if rank != wire.world.rank:
                self._left |= _unpacked(*from_bytes(theirs))

    def commit(self) -> None:
        """The step is committed."""
        self._counted |= self._left
        self._left = {}

    def state(self, tensors: Tensors) -> Json:
        """Its part of a snapshot; its tensors go into `tensors`."""
        return _packed(self._counted, tensors)

    def load(self, state: Json, tensors: Tensors) -> None:
        """Restores its part of a snapshot."""
        loaded = _unpacked(state, tensors)
        self._counted = {lane: _mapped(values, torch.Tensor.clone) for lane, values in loaded.items()}
        self._left, self._evaluated = {}, {}


def _packed(lanes: Mapping[int, Values], tensors: Tensors) -> Json:
    return {str(lane): pack(values, f"{CARRIED}/{lane}", tensors) for lane, values in lanes.items()}


def _unpacked(state: Json, tensors: Tensors) -> dict[int, Values]:
    return {int(lane): unpack(values, tensors) for lane, values in state.items()}


def _mapped(part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same in containers of its own, with every tensor changed."""
    if isinstance(part, torch.Tensor):
        return change(part)
    if isinstance(part, Mapping):
        return {key: _mapped(value, change) for key, value in part.items()}
    return type(part)(_mapped(item, change) for item in part) if isinstance(part, list | tuple) else part
