"""A bucket's parameters, and what their optimizer keeps of them, each in one flat tensor.

# Note [Flat beside flat]
# A parameter stands at the same offset in the bucket's gradient, in the flat parameter and in the flat state, so an
# update that looks at one element at a time may take the bucket as one parameter. Each is as aligned there as by itself
# (Note [As aligned as its own] in layout.py). What lies between two parameters is zero in the gradient; what an update
# makes of it nobody reads.

# Note [Whole vectors]
# torch's fused kernels take four elements at a time, and the end of a tensor that has no whole four left one by one, in
# a loop that the compiler may have rounded otherwise. In a flat tensor that end would stand in the middle. So a
# parameter whose number of elements is not a multiple of four stays by itself.

# Note [Linked]
# `p.data` and `optimizer.state[p][key]` are views of the flat tensors: whoever reads or changes them in place needs to
# know nothing. With another layout the parameters move at once. What was replaced since (`load_state_dict`) is copied
# into the flat tensors before the next update, and replaced by the views again. Links are looked at before every
# update, without waiting for the device.
"""

from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.gradients.bucket import Bucket
from lockstep.gradients.bucket import FlatBuffer as Flat

VECTOR = 4
"""See Note [Whole vectors]."""

STEP = "step"
"""Where Adam counts updates: a tensor without dimensions for each parameter."""

_placed = WeakTensorKeyDictionary()
"""Where each parameter was put that now stands in a flat one, for as long as the parameter lives."""

States = Sequence[MutableMapping[str, Any]]
"""What the optimizer keeps of each parameter of a bucket."""


class FlatBucket:
    """One bucket as its optimizer sees it: `place` once; then for each update `ready`, the optimizer's, `updated`."""

    def __init__(self, bucket: Bucket) -> None:
        self.parameters = bucket.parameters
        self._bucket = bucket
        self._values = self._flat(bucket.layout.parameter_dtype)
        self._values.whole.grad = bucket.result.whole
        self._state: dict[str, Flat] = {}
        self._steps_seen = -1
        self._steps_agree = False

    def ready(self, states: States, keys: Sequence[str]) -> bool:
        """Whether the bucket can be updated as one; if so, all of it is linked. See Note [Linked].

        It cannot if a gradient is missing or not the step's own, before the first update has made `keys` of the state,
        and if its parameters were not updated equally often.
        """
        if not self._has_whole_gradient() or not all(_is_tensor(state.get(key)) for state in states for key in keys):
            return False
        if not all(self._link_state(states, key) for key in keys):
            return False
        if STEP in keys and not self._agree_on_steps():
            return False
        self.place()
        return True

    @torch.no_grad()
    def place(self) -> None:
        """Afterwards the parameters stand in the flat one. See Note [Linked]."""
        for parameter, view in zip(self.parameters, self._values.views, strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                view.copy_(parameter)
                parameter.data = view
                _placed[parameter] = view.data_ptr()

    @property
    def whole(self) -> torch.Tensor:
        """The flat parameter, with its gradient."""
        return self._values.whole

    def state(self, keys: Sequence[str]) -> dict[str, torch.Tensor]:
        """The flat parameter's state. It counts updates where the first parameter does."""
        return {key: self._state[key].views[0] if key == STEP else self._state[key].whole for key in keys}

    @torch.no_grad()
    def updated(self) -> None:
        """After an update of the flat parameter: the other parameters have been updated as often as the first."""
        if (steps := self._state.get(STEP)) is not None:
            steps.whole[1:] = steps.whole[0]
            self._steps_seen = steps.whole._version

    def _has_whole_gradient(self) -> bool:
        views = self._bucket.result.views
        return all(p.grad is view for p, view in zip(self.parameters, views, strict=True))

    @torch.no_grad()
    def _link_state(self, states: States, key: str) -> bool:
        """Whether this part of the state now stands in one flat tensor: it must have one dtype."""
        flat = self._state.get(key)
        if flat is not None and all(state[key] is view for state, view in zip(states, flat.views, strict=True)):
            return True
        if len({(state[key].dtype, state[key].device) for state in states}) > 1:
            return False
        flat = self._state[key] = self._flat_like(key, states[0][key])
        for state, view in zip(states, flat.views, strict=True):
            view.copy_(state[key])
            state[key] = view
        if key == STEP:
            self._steps_seen = -1
        return True

    def _agree_on_steps(self) -> bool:
        """Waits for the device if the counts have changed since they were last known. Once apart, they stay apart."""
        steps = self._state[STEP].whole
        if self._steps_seen == -1 or (self._steps_agree and self._steps_seen != steps._version):
            self._steps_agree = bool((steps == steps[0]).all())
            self._steps_seen = steps._version
        return self._steps_agree

    def _flat_like(self, key: str, tensor: torch.Tensor) -> Flat:
        if key == STEP:
            counts = torch.empty(len(self.parameters), dtype=tensor.dtype, device=tensor.device)
            return Flat(counts, list(counts.unbind()))
        return self._flat(tensor.dtype)

    def _flat(self, dtype: torch.dtype) -> Flat:
        layout = self._bucket.layout
        whole = torch.zeros(layout.num_elements, dtype=dtype, device=layout.device)
        return Flat(whole, layout.cut(whole))


def sharing_memory(parameters: Sequence[torch.nn.Parameter]) -> set[int]:
    """Parameters, by id, whose memory holds something else too and was not given to them by a flat bucket.

    They may not be moved: others count on where they are (weights tied by views, the weights of an LSTM on a GPU).
    """
    alien = [p for p in parameters if p.numel() and _placed.get(p) != p.data_ptr()]
    storages = Counter(p.untyped_storage().data_ptr() for p in alien)
    return {id(p) for p in alien if storages[p.untyped_storage().data_ptr()] > 1 or _is_part(p)}


def _is_part(parameter: torch.nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() > parameter.nbytes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
