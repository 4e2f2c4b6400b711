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
SAID = -1
"""Stands for a lane: what the first one of the batch has said."""


class Carried:
    """What every lane of the run carries, on one worker. See Note [Carried by a lane]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._committed: dict[int, Values] = {}
        self._stored: dict[int, Values] = {}
        """What lanes of the step under way have stored, on this or on other workers."""
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
        self._stored, self._evaluated = {}, {}

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

    def say(self, text: str) -> None:
        """A lane of the step under way says this to all workers, if the step counts."""
        self._stored.setdefault(SAID, {"text": ""})["text"] += text

    @property
    def is_used(self) -> bool:
        """Whether a lane of this worker has stored something in the step under way."""
        return bool(self._stored)

    def exchange(self, wire: Wire) -> None:
        """Collective. Afterwards this worker has what all lanes of the step have stored."""
        tensors: Tensors = {}
        mine = to_bytes(_packed(self._stored, tensors), tensors)
        for rank, theirs in enumerate(exchange_bytes(wire.transport, mine)):
            if rank != wire.world.rank:
                self._stored |= _unpacked(*from_bytes(theirs))

    def commit(self) -> str:
        """The step counts; gives what its lanes have said."""
        said = self._stored.pop(SAID, {"text": ""})["text"]
        self._committed |= self._stored
        self._stored = {}
        return str(said)

    def state(self, tensors: Tensors) -> Json:
        """Its part of a snapshot; its tensors go into `tensors`."""
        return _packed(self._committed, tensors)

    def load(self, state: Json, tensors: Tensors) -> None:
        loaded = _unpacked(state, tensors)
        self._committed = {lane: _mapped(values, torch.Tensor.clone) for lane, values in loaded.items()}
        self._stored, self._evaluated = {}, {}


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
