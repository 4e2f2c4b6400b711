"""State that belongs to a lane: `run.carried`, which moves with the lane.

# Note [Carried by a lane]
# A script may carry something from batch to batch for its samples: the hidden state of an RNN. Kept in a variable, it
# would stay behind when its lane moves to another worker. What a lane stores in `run.carried` belongs to the step: it
# is committed with the step, and a step that is computed again starts from the values committed before. Before the
# commit every worker receives the values of all lanes, so that none is lost with its worker.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from lockstep.errors import Misuse
from lockstep.state.snapshot import Json, Tensors, from_bytes, pack, to_bytes, unpack
from lockstep.wire import Wire
from lockstep.wire.exchange import exchange_bytes

Values = dict[str, Any]
CARRIED = "carried"
LANES, PRINTED = "lanes", "printed"
"""What workers exchange before a commit."""


class Carried:
    """What every lane of the run carries, on one worker. See Note [Carried by a lane]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._committed: dict[int, Values] = {}
        self._stored: dict[int, Values] = {}
        """What lanes of the step under way have stored, on this or on other workers."""
        self._printed = ""
        """What the first lane of the batch has printed in the step under way, on this or on another worker."""
        self._evaluated: dict[int, Values] = {}
        self._values: Values | None = None

    @property
    def values(self) -> Values:
        if self._values is None:
            raise Misuse(
                "run.carried outside of run.lanes: it belongs to the lane under way. Read and write it inside of "
                "`for ... in run.lanes(batch):`."
            )
        return self._values

    @property
    def by_lane(self) -> Mapping[int, Values]:
        """What every lane carries, the same on every worker; not copies."""
        if self._values is not None:
            raise Misuse(
                "run.carried_by_lane inside of run.lanes: what the lanes of a step have stored is known after its loop"
            )
        return MappingProxyType(self._committed)

    def begin_step(self) -> None:
        """A training step begins, or begins again."""
        self._stored, self._printed, self._evaluated = {}, "", {}

    def begin_lane(self, lane: int, *, trains: bool) -> None:
        """In training a lane starts from the committed values; in an evaluation, from its last evaluation's."""
        start = self._committed if trains else self._evaluated
        self._values = _mapped(start.get(lane, {}), lambda tensor: tensor.to(self._device, copy=True))

    def end_lane(self, lane: int, *, trains: bool) -> None:
        values, self._values = self._values, None
        assert values is not None
        stored = self._stored if trains else self._evaluated
        if values or lane in self._committed:
            stored[lane] = _mapped(values, torch.Tensor.detach)  # a lane's backward pass ends where the lane does

    def print(self, text: str) -> None:
        """A lane of the step under way prints this; every worker has it when the step is committed."""
        self._printed += text

    @property
    def is_used(self) -> bool:
        """Whether a lane of this worker has stored or printed something in the step under way."""
        return bool(self._stored or self._printed)

    def exchange(self, wire: Wire) -> None:
        """Collective. Afterwards this worker has what all lanes of the step have stored and printed."""
        tensors: Tensors = {}
        mine = to_bytes({LANES: _packed(self._stored, tensors), PRINTED: self._printed}, tensors)
        for rank, theirs in enumerate(exchange_bytes(wire.transport, mine)):
            if rank != wire.world.rank:
                step, tensors = from_bytes(theirs)
                self._stored |= _unpacked(step[LANES], tensors)
                self._printed += step[PRINTED]  # one worker has the first lane: the others' texts are empty

    def commit(self) -> str:
        """The step counts. Returns what its lanes have printed."""
        printed, self._printed = self._printed, ""
        self._committed |= self._stored
        self._stored = {}
        return printed

    def state(self, tensors: Tensors) -> Json:
        """Its part of a snapshot; its tensors go into `tensors`."""
        return _packed(self._committed, tensors)

    def load(self, state: Json, tensors: Tensors) -> None:
        loaded = _unpacked(state, tensors)
        self._committed = {lane: _mapped(values, torch.Tensor.clone) for lane, values in loaded.items()}
        self.begin_step()


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
